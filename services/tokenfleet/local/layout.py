"""Layout: which part of a fleet listens where; a pure function of the fleet and the first port.

    +0 broker   +1 PostgreSQL   +10 … +13 status of agent, capacity, goodput, audit   +20 … status of decide
    +100 … decide's gRPC, ten a site   +200 Audit   +300 engines' control   +301 … engines, three ports each

The shipped base of 7400 puts decide at 7500, Audit at 7600: the defaults of the processes themselves.
"""

from collections.abc import Iterator
from itertools import count

from msgspec import Struct

from tokenfleet.core.errors import PolicyError, SetupError
from tokenfleet.local.fleet import Fleet
from tokenfleet.local.postgres import dsn

HOST = "127.0.0.1"
ALONE = ("agent", "capacity", "goodput", "audit")  # one process each for all sites
PORTS_A_SITE = 10
ENGINES_MAX = 500


class EnginePlace(Struct, frozen=True, kw_only=True):
    """One simulated engine: who it is and its loopback ports."""

    id: str
    site: str
    model: str
    digest: str
    profile: str
    block_size: int
    http_port: int
    kv_port: int
    kv_replay_port: int

    @property
    def address(self) -> str:
        return f"{HOST}:{self.http_port}"


class DecidePlace(Struct, frozen=True, kw_only=True):
    """One replica of a site's decision service."""

    site: str
    replica: int
    grpc_port: int
    status_port: int

    @property
    def name(self) -> str:
        """Names the process; its log is logs/NAME.log."""
        return f"decide-{self.site}-{self.replica}"

    @property
    def address(self) -> str:
        return f"{HOST}:{self.grpc_port}"


class Layout(Struct, frozen=True, kw_only=True):
    """All addresses of one fleet. `kafka_port` and `postgres_port` are None for parts that are not embedded."""

    kafka: str
    kafka_port: int | None
    postgres: str
    postgres_port: int | None
    audit_port: int
    control_port: int
    status_ports: dict[str, int]
    decides: tuple[DecidePlace, ...]
    engines: tuple[EnginePlace, ...]

    @property
    def gateways(self) -> dict[str, tuple[str, ...]]:
        """gRPC addresses by site."""
        sites = dict.fromkeys(place.site for place in self.decides)
        return {site: tuple(place.address for place in self.decides if place.site == site) for site in sites}

    def ports(self) -> Iterator[tuple[str, int]]:
        """Every port that this fleet listens on, with what it is for."""
        if self.kafka_port is not None:
            yield "the broker", self.kafka_port
        if self.postgres_port is not None:
            yield "PostgreSQL", self.postgres_port
        yield "the Audit service", self.audit_port
        for name, port in self.status_ports.items():
            yield f"the status of {name}", port
        for place in self.decides:
            yield place.name, place.grpc_port
        if self.engines:
            yield "the engines' control", self.control_port
        for engine in self.engines:
            yield f"engine {engine.id}", engine.http_port
            yield f"KV events of {engine.id}", engine.kv_port
            yield f"KV replay of {engine.id}", engine.kv_replay_port


def lay_out(
    fleet: Fleet,
    *,
    port_base: int,
    kafka: str = "",
    postgres: str = "",
    simulated: bool = True,
    replicas: int | None = None,
) -> Layout:
    """`replicas` of each site override the fleet's.

    Raises PolicyError for a fleet too large for its ports, SetupError for a base too high.
    """
    decides = tuple(_decides(fleet, port_base, replicas))
    engines = tuple(_engines(fleet, port_base + 301)) if simulated else ()
    if len(decides) > 80 or len(fleet.sites) > 10 or len(engines) > ENGINES_MAX:
        raise PolicyError(
            f"this fleet has {len(fleet.sites)} sites, {len(decides)} decide replicas and {len(engines)} engines; "
            f"at most 10, 80 and {ENGINES_MAX} fit on one machine"
        )
    layout = Layout(
        kafka=kafka or f"{HOST}:{port_base}",
        kafka_port=None if kafka else port_base,
        postgres=postgres or dsn(port=port_base + 1),
        postgres_port=None if postgres else port_base + 1,
        audit_port=port_base + 200,
        control_port=port_base + 300,
        status_ports={name: port_base + 10 + number for number, name in enumerate(ALONE)}
        | {place.name: place.status_port for place in decides},
        decides=decides,
        engines=engines,
    )
    if (highest := max(port for _, port in layout.ports())) > 65_535:
        raise SetupError(f"--port-base {port_base} is too high: ports up to {highest} are needed")
    return layout


def _decides(fleet: Fleet, base: int, replicas: int | None) -> Iterator[DecidePlace]:
    status_port = count(base + 20)
    for number, (name, site) in enumerate(fleet.sites.items()):
        for replica in range(replicas or site.decide_replicas):
            grpc_port = base + 100 + PORTS_A_SITE * number + replica
            yield DecidePlace(site=name, replica=replica, grpc_port=grpc_port, status_port=next(status_port))


def _engines(fleet: Fleet, first_port: int) -> Iterator[EnginePlace]:
    port = count(first_port)
    for name, site in fleet.sites.items():
        for group in site.engines:
            for number in range(group.count):
                yield EnginePlace(
                    id=f"{name}-{group.name}-{number}",
                    site=name,
                    model=group.model,
                    digest=group.digest,
                    profile=group.profile,
                    block_size=group.block_size,
                    http_port=next(port),
                    kv_port=next(port),
                    kv_replay_port=next(port),
                )
