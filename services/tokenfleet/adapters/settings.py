"""Settings: how a process is told what to do, by one TOML file and the environment.

`TOKENFLEET_CONFIG` names the file. Its top-level keys are shared by all processes, a table named like a process
(`[agent]`) holds what only that process needs. An environment variable `TOKENFLEET_<KEY>` (upper case) wins
over both; lists are comma-separated there, tables are JSON. Unknown keys are refused with the list of known ones.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from tokenfleet.core.errors import SetupError

Port = Annotated[int, Meta(ge=0, le=65535)]
PREFIX = "TOKENFLEET_"


class Common(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every process needs.

    `kafka` is HOST:PORT[,HOST:PORT]. `state_dir` belongs to this process alone. `status_port` serves /health and
    /metrics, 0 picks a free one. `policy` is a policy file, empty for the shipped one. `sites` are the datacenters
    that this process serves or follows.
    """

    kafka: str = "127.0.0.1:9092"
    state_dir: str = ".tokenfleet/state"
    status_host: str = "127.0.0.1"
    status_port: Port = 0
    policy: str = ""
    sites: tuple[str, ...] = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class AgentSettings(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engines` is the watched discovery file. `site_secret_file` (else `site_secret`) holds the key of block keys."""

    agent: str = "agent"
    engines: str = "engines.toml"
    site_secret_file: str = ""
    site_secret: str = ""
    scrape_period_s: Annotated[float, Meta(ge=0.05, le=60.0)] = 1.0
    kv_snapshot_period_s: Annotated[float, Meta(ge=1.0)] = 60.0


class CapacitySettings(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateways` lists the gRPC addresses of each site's decision service, for the site summary."""

    gateways: dict[str, tuple[str, ...]] = {}
    snapshot_period_s: Annotated[float, Meta(ge=0.01, le=10.0)] = 0.1
    summary_period_s: Annotated[float, Meta(ge=0.05, le=10.0)] = 0.5
    sketch_period_s: Annotated[float, Meta(ge=0.5)] = 5.0


class DecideSettings(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`site` is the datacenter answered for; `listen` HOST:PORT of gRPC; `replica` is unique within the site.

    `credentials` is the file that says who may call (adapters/credentials.py); empty: whoever reaches it.
    `shard_secret_file` (else `shard_secret`) holds the key that signs the tokens of waiting requests, one for all
    replicas of a site; needed where the policy has slomax.shard on. `postgres` is a DSN: batch work with a far deadline
    waits there where the policy has slomax.batch on; empty: it does not.
    """

    site: str = ""
    replica: str = "0"
    listen: str = "127.0.0.1:7500"
    reflection: bool = True
    credentials: str = ""
    spool_max_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    shard_secret_file: str = ""
    shard_secret: str = ""
    postgres: str = ""


class GoodputSettings(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing of its own."""


class AuditSettings(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`postgres` is a DSN; `listen` HOST:PORT serves the Audit service; rows go after `retention_days`.

    `credentials` as for decide.
    """

    postgres: str = "postgres://postgres@127.0.0.1:5432/tokenfleet"
    listen: str = "127.0.0.1:7600"
    reflection: bool = True
    credentials: str = ""
    retention_days: Annotated[int, Meta(ge=1)] = 30


class CallerSettings(Struct, frozen=True, kw_only=True):
    """What one who asks the services brings: its bearer token, in the file `token_file` or as `token`."""

    token_file: str = ""
    token: str = ""


S = TypeVar("S", bound=Common)
PROCESSES: dict[str, type[Common]] = {
    "agent": AgentSettings,
    "capacity": CapacitySettings,
    "decide": DecideSettings,
    "goodput": GoodputSettings,
    "audit": AuditSettings,
}


def load_settings(process: str, kind: type[S], environ: Mapping[str, str] | None = None) -> S:
    """The settings of `process`, a key of PROCESSES.

    Raises SetupError, naming file or variable and key, for what can't be used.
    """
    environ = os.environ if environ is None else environ
    path = environ.get(PREFIX + "CONFIG", "")
    values = {**_from_file(process, path), **_from_environment(kind, environ)}
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        where = f"{PREFIX}* or {path}" if path else f"{PREFIX}*"
        raise SetupError(f"settings of {process}: {_words(error)} (set in {where})") from error


def token_of(environ: Mapping[str, str] | None = None) -> str:
    """The bearer token of TOKENFLEET_TOKEN_FILE, else of TOKENFLEET_TOKEN; empty without. Raises SetupError."""
    values = _from_environment(CallerSettings, os.environ if environ is None else environ)
    token = secret_of(CallerSettings(**values), "token")
    try:
        return token.decode("ascii")
    except UnicodeDecodeError as error:
        raise SetupError(f"{PREFIX}TOKEN: a token is plain ASCII, as `tokenfleet credentials new` prints it") from error


def secret_of(settings: Struct, name: str) -> bytes:
    """The secret `name` of `settings`: the content of the file that NAME_file names, else the text NAME; may be empty.

    Raises SetupError for a file that can't be read or is empty.
    """
    path: str = getattr(settings, f"{name}_file")
    if not path:
        return cast(str, getattr(settings, name)).encode()
    variable = f"{PREFIX}{name.upper()}_FILE"
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise SetupError(f"{variable}: {path}: {error.strerror}") from error
    if not secret:
        raise SetupError(f"{variable}: {path} is empty")
    return secret


def environment_of_child(config: Path, **further: str) -> dict[str, str]:
    """The environment of a process that reads `config` alone: this one's, without settings of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return kept | further | {PREFIX + "CONFIG": str(config)}


def _from_file(process: str, path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        document: dict[str, Any] = msgspec.toml.decode(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"{PREFIX}CONFIG: can't read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{path}: {error}") from error
    shared = {key: value for key, value in document.items() if key not in PROCESSES}
    known_somewhere = {field for kind in PROCESSES.values() for field in kind.__struct_fields__}
    if unknown := sorted(set(shared) - known_somewhere):
        raise SetupError(f"{path}: unknown key {unknown[0]!r}; there is: {', '.join(sorted(known_somewhere))}")
    mine = PROCESSES[process].__struct_fields__
    own = document.get(process, {})
    if not isinstance(own, dict):
        raise SetupError(f"{path}: {process!r} is not a table; write [{process}]")
    if unknown := sorted(set(cast(dict[str, Any], own)) - set(mine)):
        raise SetupError(f"{path}: unknown key {unknown[0]!r} in [{process}]; there is: {', '.join(sorted(mine))}")
    return {key: value for key, value in shared.items() if key in mine} | cast(dict[str, Any], own)


def _words(error: msgspec.ValidationError) -> str:
    """`status_port: expected int <= 65535`, of msgspec's "Expected `int` <= 65535 - at `$.status_port`"."""
    problem, _, where = str(error).replace("`", "").partition(" - at $.")
    return f"{where}: {problem[:1].lower()}{problem[1:]}" if where else problem


def _from_environment(kind: type[Struct], environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if (text := environ.get(PREFIX + field.name.upper())) is not None:
            values[field.name] = _parsed(field.name, text, field.type)
    return values


def _parsed(name: str, text: str, kind: Any) -> Any:
    origin = getattr(kind, "__origin__", None)
    if origin is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    if origin is dict:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise SetupError(f"{PREFIX}{name.upper()}: not JSON: {error}") from error
    return text
