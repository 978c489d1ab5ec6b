"""Fleet: which sites, engines, replicas and load `up` starts, read from a file with unknown keys refused."""

from importlib.resources import files
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tokenfleet.core.errors import PolicyError
from tokenfleet.core.policy import Policy

FILE, MIXED_FILE = "fleet.toml", "mixed.toml"

Name = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9._-]{0,30}$")]
Share = Annotated[float, Meta(ge=0.0)]


class EngineGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal engines of one site; instance ids are SITE-NAME-0, SITE-NAME-1, ...

    `digest` is the revision of `model` that they serve, `profile` a table of sim/profiles.toml.
    """

    name: Name
    model: str
    digest: str
    profile: str
    count: Annotated[int, Meta(ge=1, le=50)] = 1
    block_size: Annotated[int, Meta(ge=1)] = 32


class FleetSite(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One datacenter; without engines it is ingress only."""

    decide_replicas: Annotated[int, Meta(ge=1, le=8)] = 2
    engines: tuple[EngineGroup, ...] = ()


class LoadShares(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the recorded requests are laid on the fleet; shares are relative.

    `origins` are keyed by the site where a conversation arrives. `batch_tenants` send batch jobs only, of the other
    conversations `batch_share` are batch jobs. `copies` of the trace are laid over each other: 3.4 requests/s each.
    A request may be held for `wait_max_s` until an instance is near enough to idle.

    `mixed` above 0: instead of the recorded conversations come the chat, long and batch requests of the simulator's
    mixed workload, at that load of as many instances as there are engines; `model_of` are the models of classes that
    don't ask for one of `models`.
    """

    origins: dict[str, Share]
    models: dict[str, Share]
    tenants: dict[str, Share]
    batch_tenants: tuple[str, ...] = ()
    batch_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.08
    copies: Annotated[int, Meta(ge=1, le=20)] = 1
    wait_max_s: Annotated[float, Meta(ge=0.0)] = 0.0
    mixed: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    model_of: dict[str, str] = {}

    @property
    def asked_models(self) -> frozenset[str]:
        """All models that requests ask for."""
        return frozenset(self.models) | frozenset(self.model_of.values())


class Fleet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. `block_tokens` and `site_secret` make the names of prompt blocks (core/blocks.py),
    `scrape_period_s` is how often the agent reads engines' metrics."""

    sites: dict[Name, FleetSite]
    load: LoadShares
    scrape_period_s: Annotated[float, Meta(ge=0.05, le=60.0)] = 1.0
    block_tokens: Annotated[int, Meta(ge=1)] = 256
    site_secret: str

    @property
    def models(self) -> frozenset[str]:
        """All models that some engine serves."""
        return frozenset(group.model for site in self.sites.values() for group in site.engines)

    @property
    def engines(self) -> int:
        """How many there are."""
        return sum(group.count for site in self.sites.values() for group in site.engines)

    @property
    def ingress(self) -> tuple[str, ...]:
        """Sites where requests arrive, those without engines first."""
        arriving = [name for name in self.sites if self.load.origins.get(name, 0.0) > 0.0]
        return tuple(sorted(arriving, key=lambda name: (bool(self.sites[name].engines), name)))


def shipped_fleet() -> Fleet:
    """The fleet in the package."""
    return parse_fleet((files("tokenfleet.local") / FILE).read_text(encoding="utf-8"), source=FILE)


def mixed_fleet() -> Fleet:
    """The cluster of the package that three classes share."""
    return parse_fleet((files("tokenfleet.local") / MIXED_FILE).read_text(encoding="utf-8"), source=MIXED_FILE)


def parse_fleet(toml: str, *, source: str) -> Fleet:
    """Raises PolicyError, naming source and key, for what can't be read and for names that point nowhere."""
    try:
        fleet = msgspec.toml.decode(toml, type=Fleet)
    except (msgspec.DecodeError, ValueError) as error:
        raise PolicyError(f"{source}: {error}") from error
    if unknown := sorted(set(fleet.load.origins) - set(fleet.sites)):
        raise PolicyError(f"{source}: load.origins: no site {unknown[0]!r}")
    if not fleet.ingress:
        raise PolicyError(f"{source}: load.origins: requests arrive nowhere")
    return fleet


def refuse_strangers(fleet: Fleet, policy: Policy, *, source: str) -> None:
    """Raises PolicyError when the fleet names a site, model or tenant that the policy does not know."""
    for kind, named, known in (
        ("site", fleet.sites, policy.sites),
        ("model", fleet.models | fleet.load.asked_models, policy.models),
        ("tenant", fleet.load.tenants, policy.tenants),
    ):
        if unknown := sorted(set(named) - set(known)):
            raise PolicyError(f"{source}: no {kind} {unknown[0]!r} in the policy; there is: {', '.join(sorted(known))}")
