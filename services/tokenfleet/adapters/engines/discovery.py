"""Discovery: which engines an agent watches, from a TOML file that is read again when it changes.

[[engine]]
id = "b-llama-7"
site = "b"
address = "10.0.0.7:8000"
kv_endpoint = "tcp://10.0.0.7:5557"
kv_replay_endpoint = "tcp://10.0.0.7:5558"
model = "llama-8b"
"""

import logging
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from tokenfleet.adapters.engines.addresses import canonical_address
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.records import Name

ENGINES_MAX = 1000  # rows of one envelope, which must stay below a record's 1 MiB; more engines need more agents
SiteName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9._-]{1,64}$")]  # part of topic names
Endpoint = Annotated[str, Meta(pattern=r"^(@?(tcp|ipc|inproc)://.+)?$")]

logger = logging.getLogger(__name__)


class EngineSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. `address` is where requests go, canonical HOST:PORT after reading.

    `metrics_url` is http://ADDRESS/metrics when empty. `kv_endpoint` is its PUB socket, with a leading `@` one of
    ours that it dials; without it the instance has no prefix credit. `ranks` are its data-parallel ranks: rank r
    publishes r ports higher. `context_max_tokens` 0 is unknown. `state` other than ready is an operator's word that
    overrules the page.
    """

    id: Name
    site: SiteName
    address: str
    model: Name
    metrics_url: str = ""
    kv_endpoint: Endpoint = ""
    kv_replay_endpoint: Endpoint = ""
    ranks: Annotated[int, Meta(ge=1, le=256)] = 1
    model_digest: str = ""
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm"
    accelerator: str = ""
    context_max_tokens: Annotated[int, Meta(ge=0)] = 0
    state: Literal["ready", "starting", "draining"] = "ready"


class Discovered(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    engine: tuple[EngineSpec, ...] = ()


def parse_discovery(toml: str, *, source: str) -> tuple[EngineSpec, ...]:
    """The engines in the file's order; of several at one address the first counts, and a line is logged.

    Raises PolicyError, naming `source` and the engine, for unknown keys, a bad address or an id of two engines.
    """
    try:
        listed = msgspec.toml.decode(toml, type=Discovered).engine
    except msgspec.DecodeError as error:
        raise PolicyError(f"{source}: {error}") from error
    if len(listed) > ENGINES_MAX:
        raise PolicyError(f"{source}: {len(listed)} engines, one agent watches at most {ENGINES_MAX}")
    by_address: dict[str, EngineSpec] = {}
    for listing in listed:
        spec = _resolved(listing, source)
        first = by_address.setdefault(spec.address, spec)
        if first is not spec:
            logger.warning("%s: %s and %s are both %s: one instance", source, first.id, spec.id, spec.address)
    if len({spec.id for spec in by_address.values()}) < len(by_address):
        raise PolicyError(f"{source}: an id stands for two engines: {_twice(by_address)}")
    return tuple(by_address.values())


def _resolved(spec: EngineSpec, source: str) -> EngineSpec:
    try:
        address = canonical_address(spec.address)
    except ValueError as error:
        raise PolicyError(f"{source}: engine {spec.id!r}: address: {error}") from error
    return replace(spec, address=address, metrics_url=spec.metrics_url or f"http://{address}/metrics")


def _twice(specs: dict[str, EngineSpec]) -> str:
    ids = [spec.id for spec in specs.values()]
    return next(name for name in ids if ids.count(name) > 1)


class DiscoveryFile:
    """The watched file. A bad or missing one keeps the last good engines, and `problem` says so."""

    def __init__(self, path: Path) -> None:
        self.engines: tuple[EngineSpec, ...] = ()
        self.problem = f"{path} has not been read yet"
        self._path = path
        self._stamp: tuple[int, int, int] | None = None

    def refresh(self) -> bool:
        """Read the file if it changed; True if the engines are others than before."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == self._stamp:
                return False
            engines = parse_discovery(self._path.read_text(encoding="utf-8"), source=str(self._path))
        except (OSError, UnicodeDecodeError, PolicyError) as error:
            self._complain(str(error))
            return False
        self._stamp, self.problem = stamp, ""
        changed, self.engines = engines != self.engines, engines
        return changed

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            logger.error("discovery: %s; %d engines of the last good file stay", problem, len(self.engines))
        self.problem = problem
