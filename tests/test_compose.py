"""The compose file: every process in it would start with what it is told; names, ports and files fit together."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from tests.ports import free_port
from tokenfleet.adapters.endpoints import read_endpoints
from tokenfleet.adapters.engines.discovery import parse_discovery
from tokenfleet.adapters.settings import (
    PREFIX,
    PROCESSES,
    load_settings,
)
from tokenfleet.local.engine_config import EnginesConfig, InstanceConfig
from tokenfleet.local.engines import Engines
from tokenfleet.local.fleet import shipped_fleet
from tokenfleet.local.load_config import LoadConfig

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "compose"
MOUNTED_AT = "/etc/tokenfleet/"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOTS = ("topics", "migrate")  # they run, end and have done their work
IMAGE = re.compile(r"^(apache/kafka|postgres|tokenfleet):\d+\.\d+(\.\d+)?$")


def processes() -> dict[str, str]:
    """The services that are processes of ours, with the process they run."""
    first = {name: service["command"][0] for name, service in SERVICES.items() if "command" in service}
    return {name: word for name, word in first.items() if word in PROCESSES}


def settings_of(name: str) -> Any:
    process = processes()[name]
    return load_settings(process, PROCESSES[process], SERVICES[name]["environment"])


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="no docker compose here",
)
def test_compose_itself_takes_the_file() -> None:
    subprocess.run(["docker", "compose", "--profile", "load", "--profile", "cli", "config", "-q"], cwd=ROOT, check=True)


def test_every_process_runs_once_and_decide_for_each_site() -> None:
    sites = [settings_of(name).site for name, process in processes().items() if process == "decide"]
    assert set(processes().values()) == set(PROCESSES)
    assert set(sites) == set(shipped_fleet().sites)
    alone = [process for process in processes().values() if process != "decide"]
    assert sorted(alone) == sorted(set(PROCESSES) - {"decide"})


@pytest.mark.parametrize("name", processes())
def test_a_process_takes_its_settings(name: str) -> None:
    environment, kind = SERVICES[name]["environment"], PROCESSES[processes()[name]]
    assert all(isinstance(value, str) for value in environment.values()), (
        "YAML makes numbers and truth values of the rest"
    )
    assert {key for key in environment if key.startswith(PREFIX)} == set(environment)
    assert {key.removeprefix(PREFIX).lower() for key in environment} <= set(kind.__struct_fields__)
    settings = settings_of(name)
    assert settings.sites == tuple(shipped_fleet().sites)
    assert settings.kafka == read_endpoints(FOLDER).kafka
    assert f"{name}:{settings.state_dir}" in SERVICES[name]["volumes"], "a spool of its own"


@pytest.mark.parametrize("name", processes())
def test_health_is_asked_where_it_is_served(name: str) -> None:
    test = " ".join(SERVICES[name]["healthcheck"]["test"])
    assert f"http://127.0.0.1:{settings_of(name).status_port}/health" in test
    compile(SERVICES[name]["healthcheck"]["test"][-1], name, "exec")


def test_files_are_what_tools_compose_writes() -> None:
    checked = subprocess.run([sys.executable, ROOT / "tools" / "compose", "--check"], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stdout + checked.stderr


def test_a_stale_file_is_found(tmp_path: Path) -> None:
    tool = tmp_path / "tools" / "compose"
    tool.parent.mkdir()
    shutil.copy(ROOT / "tools" / "compose", tool)
    shutil.copytree(FOLDER, tmp_path / "deploy" / "compose")
    with (tmp_path / "deploy" / "compose" / "load.json").open("a") as load:
        load.write(" ")
    checked = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (1, "deploy/compose/load.json is out of date: run tools/compose\n")


def test_gateways_have_the_same_addresses_everywhere_and_somebody_listens_there() -> None:
    gateways = read_endpoints(FOLDER).gateways
    assert settings_of("capacity").gateways == gateways
    load = msgspec.json.decode((FOLDER / "load.json").read_bytes(), type=LoadConfig)
    assert all(load.origins[site] == gateways[site] for site in load.origins)
    for site, addresses in gateways.items():
        for address in addresses:
            host, _, port = address.rpartition(":")
            listeners = [settings_of(name) for name in answering_to(host)]
            assert (
                [(each.site, each.listen) for each in listeners] == [(site, f"0.0.0.0:{port}")] * len(listeners) != []
            )


def answering_to(host: str) -> list[str]:
    """The services that this host name means inside the network."""
    aliases = {name: SERVICES[name].get("networks", {}).get("default", {}).get("aliases", []) for name in SERVICES}
    return [name for name in SERVICES if host in (name, *aliases[name])]


def test_replicas_of_a_site_have_names_of_their_own() -> None:
    decides = [settings_of(name) for name, process in processes().items() if process == "decide"]
    assert len({(each.site, each.replica) for each in decides}) == len(decides)


def test_the_agent_watches_the_engines_that_run_with_the_loads_secret() -> None:
    agent = settings_of("agent")
    assert agent.engines.startswith(MOUNTED_AT)
    path = FOLDER / agent.engines.removeprefix(MOUNTED_AT)
    watched = parse_discovery(path.read_text(), source=path.name)
    run = msgspec.json.decode((FOLDER / "engines.json").read_bytes(), type=EnginesConfig)
    assert run.host == "0.0.0.0"
    assert {(engine.id, engine.address, engine.kv_endpoint, engine.kv_replay_endpoint) for engine in watched} == {
        (
            engine.id,
            f"engines:{engine.http_port}",
            f"tcp://engines:{engine.kv_port}",
            f"tcp://engines:{engine.kv_replay_port}",
        )
        for engine in run.instances
    }
    assert f":{run.instances[0].http_port}/health" in SERVICES["engines"]["healthcheck"]["test"][-1]
    load = msgspec.json.decode((FOLDER / "load.json").read_bytes(), type=LoadConfig)
    assert agent.site_secret == load.site_secret


def test_every_mounted_folder_and_named_file_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (ROOT / source).is_dir() if source.startswith(".") else source in COMPOSE["volumes"], volume
        for argument in service.get("command", []):
            if argument.startswith(MOUNTED_AT):
                assert (FOLDER / argument.removeprefix(MOUNTED_AT)).is_file()


def test_images_are_pinned_and_ours_is_of_this_version() -> None:
    images = {service["image"] for service in SERVICES.values()}
    assert all(IMAGE.match(image) for image in images), images
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"tokenfleet:{version}" in images
    built = {service["build"]["dockerfile"] for service in SERVICES.values() if "build" in service}
    assert [(ROOT / path).is_file() for path in built] == [True]


def test_the_image_copies_what_the_wheel_is_made_of() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE) for name in line.split()}
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert re.search(r"^FROM python:3\.\d+-slim$", dockerfile, re.MULTILINE)


def test_only_loopback_ports_are_published_and_each_once() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len({port.split(":")[1] for port in published}) == len(published)


def test_what_is_waited_for_exists_and_can_become_so() -> None:
    for service in SERVICES.values():
        for awaited, how in service.get("depends_on", {}).items():
            assert (awaited in ONE_SHOTS) == (how["condition"] == "service_completed_successfully")
            assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[awaited]


@pytest.mark.parametrize("name", [*ONE_SHOTS, "cli"])
def test_the_command_line_knows_the_commands(name: str) -> None:
    command = [sys.executable, "-m", "tokenfleet.cli", *SERVICES[name]["command"], "--help"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


async def test_simulated_engines_listen_where_they_are_told() -> None:
    http_port, kv_port, replay_port, control_port = (free_port() for _ in range(4))
    instance = InstanceConfig(
        id="a", http_port=http_port, kv_port=kv_port, kv_replay_port=replay_port, model="tiny", profile="demo"
    )
    engines = Engines(EnginesConfig(instances=[instance], control_port=control_port, host="127.0.0.2"))
    try:
        await engines.start()
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.2:{http_port}/health") as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"http://127.0.0.1:{http_port}/health")
    finally:
        await engines.stop()
