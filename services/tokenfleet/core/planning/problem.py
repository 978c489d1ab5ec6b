"""Problem: what a plan has to decide on; sites, models, what is offered and what is running.

Demand and rates are in one unit of work a second, whatever it is (predicted GPU seconds, goodput tokens): a replica at
a site serves `rate` of it within service levels.
"""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

Site = str
Model = str
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class SiteStock(Struct, frozen=True, kw_only=True):
    """What a site has: accelerators, host memory for weights that sleep, and the price of an accelerator."""

    gpus: int
    sleeping_max: int = 0
    price_per_gpu_hour: float = 1.0


class ModelNeeds(Struct, frozen=True, kw_only=True):
    """What a replica of a model needs: accelerators, and steps until it is ready from cold and from sleep.

    `critical` is the share of its demand that must be served with any one site lost.
    """

    gpus: int = 1
    cold_steps: int = 2
    warm_steps: int = 1
    critical: Share = 0.0


class Replicas(Struct, frozen=True, kw_only=True):
    """Of one model at one site, now: ready, asleep, and those under way by the step at which they are ready.

    `rate` is what one serves; `held` says that somebody's hand is on it and that it is not to be changed.
    """

    rate: float
    ready: int = 0
    sleeping: int = 0
    starting: tuple[int, ...] = ()
    held: bool = False


class Way(Struct, frozen=True, kw_only=True):
    """From an origin to a site: what a unit of work that goes there costs, traffic and delay together."""

    cost_per_unit: float = 0.0


class Prices(Struct, frozen=True, kw_only=True):
    """What a plan weighs against each other, in money: a unit of work not served, one that N−1 would not serve, a
    start, a stop, and an hour of a sleeping replica."""

    unmet_per_unit: float = 0.05
    exposed_per_unit: float = 0.01
    cold_start: float = 0.5
    warm_start: float = 0.05
    stop: float = 0.02
    sleeping_per_hour: float = 0.02


class Problem(Struct, frozen=True, kw_only=True):
    """One planning: all that is decided on. `demand` is by origin and model, a value a step, as high as it is likely to
    be (p90). A pair of origin and site that `ways` lacks for a model is not permitted. `use_max` is the share of its
    rate that a replica is planned for, `change_share` how much of a site's replicas of a model may start, and stop, in
    a step (one always may). `taken` are accelerators and sleeping places of each site, step by step, that models which
    aren't part of this problem use.
    """

    step_s: float
    steps: int
    sites: Mapping[Site, SiteStock]
    models: Mapping[Model, ModelNeeds]
    replicas: Mapping[tuple[Site, Model], Replicas]
    demand: Mapping[tuple[Site, Model], tuple[float, ...]]
    ways: Mapping[tuple[Site, Site, Model], Way]
    taken: Mapping[Site, tuple[tuple[float, float], ...]] = {}
    prices: Prices = Prices()
    use_max: float = 0.8
    change_share: float = 0.1

    @property
    def step_hours(self) -> float:
        return self.step_s / 3600.0

    def of(self, model: Model, taken: Mapping[Site, tuple[tuple[float, float], ...]]) -> "Problem":
        """The part of one model, beside what the others have `taken`."""
        return replace(
            self,
            models={model: self.models[model]},
            replicas={pair: here for pair, here in self.replicas.items() if pair[1] == model},
            demand={pair: offered for pair, offered in self.demand.items() if pair[1] == model},
            ways={way: terms for way, terms in self.ways.items() if way[2] == model},
            taken=taken,
        )

    def unchanged(self) -> "Problem":
        """The same with nobody free to start or stop anything."""
        return replace(self, replicas={pair: replace(here, held=True) for pair, here in self.replicas.items()})

    def changes_max(self, site: Site, model: Model) -> int:
        """How many replicas may start, and how many stop, in one step."""
        here = self.replicas[site, model]
        return 0 if here.held else max(1, int(self.change_share * (here.ready + sum(here.starting))))
