"""Configs: the files that tell each process of a fleet what to do, written into the state folder.

Any of the processes can be run again by hand: `TOKENFLEET_CONFIG=.tokenfleet/config/agent.toml tokenfleet agent`.
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from tokenfleet.local.engine_config import EnginesConfig, InstanceConfig
from tokenfleet.local.fleet import Fleet
from tokenfleet.local.layout import ALONE, HOST, Layout
from tokenfleet.local.load_config import LoadConfig

AGENT = "agent-local"


class Configs(Struct, frozen=True, kw_only=True):
    """Where each process's file is, by the process's name in the fleet; `engines` and `load` are JSON, others TOML."""

    folder: Path

    def of(self, name: str) -> Path:
        return self.folder / f"{name}.{'json' if name in ('engines', 'load') else 'toml'}"


def write_configs(
    fleet: Fleet, layout: Layout, *, state_dir: Path, discovery: Path | None, load: LoadConfig | None
) -> Configs:
    """`discovery` is a file of real engines; None writes one of the simulated engines."""
    configs = Configs(folder=state_dir / "config")
    configs.folder.mkdir(parents=True, exist_ok=True)
    if discovery is None:
        discovery = configs.folder / "discovery.toml"
        discovery.write_text(_discovery(layout), encoding="utf-8")
        configs.of("engines").write_bytes(msgspec.json.format(msgspec.json.encode(_engines(layout))))
    if load is not None:
        configs.of("load").write_bytes(msgspec.json.format(msgspec.json.encode(load)))

    common = {"kafka": layout.kafka, "status_host": HOST, "sites": list(fleet.sites)}
    own: dict[str, dict[str, Any]] = {
        "agent": {
            "agent": AGENT,
            "engines": str(discovery),
            "site_secret": fleet.site_secret,
            "scrape_period_s": fleet.scrape_period_s,
        },
        "capacity": {"gateways": {site: list(addresses) for site, addresses in layout.gateways.items()}},
        "goodput": {},
        "audit": {"postgres": layout.postgres, "listen": f"{HOST}:{layout.audit_port}"},
    }
    secret = _secret(configs.folder / "shard_secret")
    for place in layout.decides:
        own[place.name] = {
            "site": place.site,
            "replica": str(place.replica),
            "listen": place.address,
            "shard_secret_file": str(secret),
            "postgres": layout.postgres,
        }
    for name, settings in own.items():
        process = name if name in ALONE else "decide"
        places = {"state_dir": str(state_dir / "state" / name), "status_port": layout.status_ports[name]}
        configs.of(name).write_text(toml_table(process, common | places | settings), encoding="utf-8")
    return configs


def load_config(fleet: Fleet, layout: Layout, *, run: str, folder: Path, copies: int | None, seed: int) -> LoadConfig:
    """The load of the fleet, asking its gateways."""
    shares = fleet.load
    return LoadConfig(
        run=run,
        origins={site: layout.gateways[site] for site in fleet.ingress},
        origin_shares={site: shares.origins[site] for site in fleet.ingress},
        models=shares.models,
        tenants=shares.tenants,
        batch_tenants=shares.batch_tenants,
        batch_share=shares.batch_share,
        site_secret=fleet.site_secret,
        block_tokens=fleet.block_tokens,
        copies=copies or shares.copies,
        wait_max_s=shares.wait_max_s,
        mixed=shares.mixed,
        model_of=shares.model_of,
        instances=fleet.engines,
        seed=seed,
        folder=str(folder),
    )


def toml_table(name: str, values: Mapping[str, Any]) -> str:
    """One TOML table; values are text, numbers, truth values, lists and tables of them."""
    return "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in values.items()), ""])


def toml_value(value: Any) -> str:
    """A value in TOML. Strings, numbers and lists are written as in JSON, of which TOML has the same escapes."""
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value)
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml_value(each)}" for key, each in pairs.items()) + " }"
    return json.dumps(value)


def _secret(path: Path) -> Path:
    """A file with a secret of this state folder, made when it is not there; nobody else may read it."""
    if not path.exists():
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return path


def _discovery(layout: Layout) -> str:
    tables = [
        toml_table(
            "[engine]",
            {
                "id": engine.id,
                "site": engine.site,
                "address": engine.address,
                "model": engine.model,
                "model_digest": engine.digest,
                "kv_endpoint": f"tcp://{HOST}:{engine.kv_port}",
                "kv_replay_endpoint": f"tcp://{HOST}:{engine.kv_replay_port}",
            },
        )
        for engine in layout.engines
    ]
    return "\n".join(["# Written by `tokenfleet up`: the simulated engines that the agent watches.", *tables])


def _engines(layout: Layout) -> EnginesConfig:
    instances = [
        InstanceConfig(
            id=engine.id,
            http_port=engine.http_port,
            kv_port=engine.kv_port,
            kv_replay_port=engine.kv_replay_port,
            model=engine.model,
            profile=engine.profile,
            block_size=engine.block_size,
            seed=number,
        )
        for number, engine in enumerate(layout.engines)
    ]
    return EnginesConfig(instances=instances, control_port=layout.control_port)
