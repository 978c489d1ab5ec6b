"""What `up` plans before anything starts: the fleet, its ports, the files of its processes."""

import socket
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.ports import free_port
from tokenfleet.adapters.engines.discovery import parse_discovery
from tokenfleet.adapters.policy_file import load_policy
from tokenfleet.adapters.settings import PROCESSES, DecideSettings, load_settings, secret_of
from tokenfleet.core.errors import PolicyError, SetupError
from tokenfleet.local.configs import Configs, load_config, toml_table, write_configs
from tokenfleet.local.engine_config import EnginesConfig
from tokenfleet.local.fleet import Fleet, parse_fleet, refuse_strangers, shipped_fleet
from tokenfleet.local.layout import Layout, lay_out
from tokenfleet.local.load_config import LoadConfig
from tokenfleet.local.ports import refuse_taken
from tokenfleet.local.real_engines import real_fleet

SMALL = """
site_secret = "s"
[sites.a]
[sites.b]
engines = [{ name = "e", model = "m", digest = "m@1", profile = "demo" }]
[load]
origins = { a = 1.0 }
models = { m = 1.0 }
tenants = { t = 1.0 }
"""


def shipped(**options: object) -> tuple[Fleet, Layout]:
    fleet = shipped_fleet()
    known: dict[str, object] = {"port_base": 7400}
    return fleet, lay_out(fleet, **(known | options))  # pyright: ignore[reportArgumentType] -- a builder


def test_the_shipped_fleet_is_one_ingress_and_three_sites_and_agrees_with_the_policy() -> None:
    fleet, layout = shipped()
    engines = Counter((engine.site, engine.digest) for engine in layout.engines)
    assert engines == {
        ("b", "small-chat@2026-08"): 4,
        ("b", "large-chat@2026-09"): 1,
        ("c", "small-chat@2026-08"): 1,
        ("c", "large-chat@2026-09"): 1,
        ("d", "large-chat@2026-03"): 2,
    }
    assert fleet.ingress[0] == "a"
    assert {site: len(addresses) for site, addresses in layout.gateways.items()} == {"a": 2, "b": 2, "c": 1, "d": 1}
    refuse_strangers(fleet, load_policy()[0], source="shipped")


def test_every_port_has_one_use_and_the_shipped_base_gives_the_processes_own_defaults() -> None:
    _, layout = shipped()
    ports = [port for _, port in layout.ports()]
    assert len(ports) == len(set(ports))
    assert layout.gateways["a"][0] == load_settings("decide", PROCESSES["decide"], {}).listen  # pyright: ignore[reportAttributeAccessIssue] -- decide's own
    assert layout.audit_port == 7600


def test_parts_of_others_need_no_port_of_ours() -> None:
    _, layout = shipped(kafka="kafka:9092", postgres="postgres://db/x", simulated=False, replicas=1)
    assert (layout.kafka, layout.postgres) == ("kafka:9092", "postgres://db/x")
    assert {what.partition(" of ")[0] for what, _ in layout.ports()} == {
        "the Audit service",
        "the status",
        *(f"decide-{site}-0" for site in "abcd"),
    }


def test_a_base_without_room_above_it_is_refused() -> None:
    with pytest.raises(SetupError, match="--port-base 65500 is too high"):
        shipped(port_base=65_500)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("name =", "nme ="), "unknown field `nme`"),
        (("origins = { a", "origins = { z"), "load.origins: no site 'z'"),
        (("origins = { a = 1.0 }", "origins = { a = 0.0 }"), "requests arrive nowhere"),
    ],
)
def test_a_fleet_file_with_a_mistake_is_refused_by_name(change: tuple[str, str], problem: str) -> None:
    with pytest.raises(PolicyError, match=problem):
        parse_fleet(SMALL.replace(*change), source="fleet.toml")


def test_a_fleet_that_the_policy_does_not_know_is_refused_with_what_exists() -> None:
    with pytest.raises(PolicyError, match="no model 'm' in the policy; there is: large-chat, small-chat"):
        refuse_strangers(parse_fleet(SMALL, source="f"), load_policy()[0], source="f")


def test_a_taken_port_is_named_with_its_use_and_the_remedy() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} for the broker is taken.*--port-base"):
            refuse_taken([("PostgreSQL", free_port()), ("the broker", port)])


def test_each_process_reads_its_file(tmp_path: Path) -> None:
    fleet, layout = shipped()
    load = load_config(fleet, layout, run="r", folder=tmp_path / "load", copies=None, seed=1)
    configs = write_configs(fleet, layout, state_dir=tmp_path, discovery=None, load=load)
    for name in ("agent", "capacity", "goodput", "audit"):
        settings = load_settings(name, PROCESSES[name], {"TOKENFLEET_CONFIG": str(configs.of(name))})
        assert (settings.kafka, settings.status_port) == (layout.kafka, layout.status_ports[name])
        assert settings.sites == ("a", "b", "c", "d")
    capacity = load_settings("capacity", PROCESSES["capacity"], {"TOKENFLEET_CONFIG": str(configs.of("capacity"))})
    assert capacity.gateways == layout.gateways  # pyright: ignore[reportAttributeAccessIssue] -- capacity's own
    for place in layout.decides:
        settings = load_settings("decide", PROCESSES["decide"], {"TOKENFLEET_CONFIG": str(configs.of(place.name))})
        assert (settings.site, settings.listen) == (place.site, place.address)  # pyright: ignore[reportAttributeAccessIssue] -- decide's own
    assert msgspec.json.decode(configs.of("load").read_bytes(), type=LoadConfig) == load
    assert len(state_dirs(configs, layout)) == 4 + len(layout.decides)


def state_dirs(configs: Configs, layout: Layout) -> set[str]:
    """Each process has a folder of its own: two spools in one would eat each other's records."""
    names = {"agent", "capacity", "goodput", "audit"} | {place.name for place in layout.decides}
    return {
        load_settings(kind, PROCESSES[kind], {"TOKENFLEET_CONFIG": str(configs.of(name))}).state_dir
        for name in names
        for kind in ("decide" if name.startswith("decide") else name,)
    }


def test_agent_and_engines_are_told_the_same_engines(tmp_path: Path) -> None:
    fleet, layout = shipped()
    configs = write_configs(fleet, layout, state_dir=tmp_path, discovery=None, load=None)
    discovery = configs.folder / "discovery.toml"
    watched = parse_discovery(discovery.read_text(), source="discovery")
    served = msgspec.json.decode(configs.of("engines").read_bytes(), type=EnginesConfig).instances
    assert [(each.id, each.address, each.kv_endpoint, each.kv_replay_endpoint) for each in watched] == [
        (
            each.id,
            f"127.0.0.1:{each.http_port}",
            f"tcp://127.0.0.1:{each.kv_port}",
            f"tcp://127.0.0.1:{each.kv_replay_port}",
        )
        for each in served
    ]
    assert {each.model_digest for each in watched if each.site == "d"} == {"large-chat@2026-03"}


def test_values_survive_the_way_through_toml() -> None:
    values = {"text": 'a "b" \\ ü', "n": 3, "x": 0.5, "on": True, "list": ["a", "b"], "table": {"a b": ["c"], "d": 1}}
    assert msgspec.toml.decode(toml_table("t", values)) == {"t": values}


def test_real_engines_replace_the_simulated_ones_and_the_load_asks_their_models(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text('[[engine]]\nid = "x"\nsite = "c"\naddress = "10.0.0.7:8000"\nmodel = "small-chat"\n')
    fleet = real_fleet(shipped_fleet(), path)
    assert fleet.load.models == {"small-chat": 0.5}
    assert fleet.models == {"small-chat"}
    assert [name for name, site in fleet.sites.items() if site.engines] == ["c"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "lists no engine"),
        ('[[engine]]\nid = "x"\nsite = "z"\naddress = "h:1"\nmodel = "m"\n', "no site 'z' in the fleet"),
    ],
)
def test_real_engines_that_cannot_be_used_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=problem):
        real_fleet(shipped_fleet(), path)


def test_all_replicas_share_one_secret_of_the_state_folder_that_nobody_else_may_read(tmp_path: Path) -> None:
    fleet, layout = shipped()

    def told() -> set[bytes]:
        configs = write_configs(fleet, layout, state_dir=tmp_path, discovery=None, load=None)
        files = [{"TOKENFLEET_CONFIG": str(configs.of(place.name))} for place in layout.decides]
        return {secret_of(load_settings("decide", DecideSettings, each), "shard_secret") for each in files}

    [secret] = told()
    assert len(secret) == 64
    assert (tmp_path / "config" / "shard_secret").stat().st_mode & 0o077 == 0
    assert told() == {secret}
