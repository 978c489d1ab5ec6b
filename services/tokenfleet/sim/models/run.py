"""Run: two models on one site, from the options to what came of it."""

import math
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.core.goodput.cost import HOUR_S, cost_per_million
from tokenfleet.core.policy import Policy
from tokenfleet.core.site import pool_name
from tokenfleet.core.slomax.terms import ClassShare, ControllerPolicy
from tokenfleet.sim.demand import Demand, demand_named
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.measure import prefill_s
from tokenfleet.sim.mixed.accounts import Accounts
from tokenfleet.sim.mixed.measure import Throughput, counts, percentiles
from tokenfleet.sim.mixed.run import LOAD_MAX, TOKEN_BUDGET
from tokenfleet.sim.mixed.service_levels import mixed_policy
from tokenfleet.sim.models.following import Following
from tokenfleet.sim.models.measure import ALL, Result, by_model, control_of_slots, revised, shares_of
from tokenfleet.sim.models.workload import LEN_S, MODELS, READ, TALK, workload
from tokenfleet.sim.pilot import Pilot, model_of
from tokenfleet.sim.profiles import Profile, load_profile
from tokenfleet.sim.served import Served
from tokenfleet.sim.telemetry import SITE

FOLLOWING, STATIC = "following", "static"
DESIGNS = (FOLLOWING, STATIC)
TARGET = 0.99  # of attainment, for both models
SLOTS_MAX = 100


class ModelsOptions(Struct, frozen=True, kw_only=True):
    """One run. `split` are the slots that serve the first model at the start, None: half of them; the design `static`
    keeps it, `following` moves slots after demand. `load` 1 is what slots shared out rightly can just serve."""

    design: str = FOLLOWING
    instances: int = 8
    load: float = 0.9
    demand: str = "waves"
    split: int | None = None
    seed: int = 1
    profile: str = "L70"
    drain_max_s: float = 1_800.0

    @property
    def slots_of_first(self) -> int:
        return self.instances // 2 if self.split is None else self.split

    @property
    def label(self) -> str:
        return f"{name_of(self.design, self.slots_of_first, self.instances)}, seed {self.seed}"


class ModelsRun(Struct, frozen=True, kw_only=True):
    """A run's figures, and all of its requests in the order of arrival."""

    result: Result
    served: list[Served]


def name_of(design: str, split: int, slots: int) -> str:
    """A design as tables name it: static ones by their split."""
    return design if design == FOLLOWING else f"{split}/{slots - split}"


def run_models(
    options: ModelsOptions, *, cpu_s: Callable[[], float], progress: Callable[[float], None] | None = None
) -> ModelsRun:
    """Serve the workload and measure. `cpu_s` reads the processor time spent, for `requests_per_cpu_s` alone.

    Raises PolicyError for an unknown design, demand or profile, and for figures out of range.
    """
    _refuse_impossible(options)
    demand = demand_named(options.demand, seed=options.seed)
    profile = replace(load_profile(options.profile), token_budget=TOKEN_BUDGET)
    policy = replace(mixed_policy(profile), models=dict.fromkeys(MODELS, model_of(profile)))
    slots, split = options.instances, options.slots_of_first
    rows = workload(load=options.load, slots=slots, demand=demand, profile=profile, seed=options.seed)
    serving = (TALK,) * split + (READ,) * (slots - split)
    began_s = cpu_s()
    terms = sharing(split, slots, enabled=options.design == FOLLOWING)
    overseer = Following(terms, policy, slots=slots)
    fleet = Fleet(
        FleetTerms(
            profile=profile,
            instances=slots,
            models=MODELS,
            serving=serving,
            policy=policy,
            drain_max_s=options.drain_max_s,
        ),
        Pilot,
        seed=options.seed,
        overseer=overseer,
    )
    served = fleet.serve(rows, progress=progress)
    spent_s = cpu_s() - began_s
    result = _result(options, demand, served, fleet, overseer, policy, profile, spent_s=spent_s)
    return ModelsRun(result=result, served=served)


def sharing(split: int, slots: int, *, enabled: bool) -> ControllerPolicy:
    """The controller's terms for two models on so many slots; no gateway admits by its ceiling, so it stays."""
    shares = {TALK: split / slots, READ: 1.0 - split / slots}
    least = 1.0 / slots
    return ControllerPolicy(
        enabled=enabled,
        slots=slots,
        ceiling_min=0.95,
        classes={
            name: ClassShare(share=share, floor=least, ceiling=1.0 - least, target=TARGET)
            for name, share in shares.items()
        },
    )


def _refuse_impossible(options: ModelsOptions) -> None:
    slots = options.instances
    if options.design not in DESIGNS:
        raise PolicyError(f"--design {options.design!r}: there is {listed(DESIGNS)}")
    if not len(MODELS) <= slots <= SLOTS_MAX:
        raise PolicyError(f"--instances {slots}: it is {len(MODELS)} to {SLOTS_MAX}")
    if not 1 <= options.slots_of_first < slots:
        raise PolicyError(f"--split {options.split}: it is 1 to {slots - 1}, for each model has a slot")
    if not 0.0 < options.load <= LOAD_MAX:
        raise PolicyError(f"--load {options.load:g}: it is more than 0 and at most {LOAD_MAX:g}")


def _result(
    options: ModelsOptions,
    demand: Demand,
    served: list[Served],
    fleet: Fleet,
    overseer: Following,
    policy: Policy,
    profile: Profile,
    *,
    spent_s: float,
) -> Result:
    slots, split, moves = options.instances, options.slots_of_first, fleet.slots.moves
    its, accounts = by_model(served), Accounts(served, policy)
    names = {ALL: ALL} | {model: pool_name(model, SITE) for model in MODELS}
    pools = [names[model] for model in MODELS]
    window, whole = accounts.by_pool(pools, until_s=LEN_S), accounts.by_pool(pools)
    makespan_s = max((each.finished_s or 0.0 for each in served), default=0.0) or LEN_S
    cost = slots * policy.site(SITE).price_per_instance_hour * LEN_S / HOUR_S
    prompt_tokens = sum(each.row.prompt_tokens for each in served if each.finished_s is not None)
    control = control_of_slots(split, moves, demand, slots=slots) if options.design == FOLLOWING else None
    return Result(
        seed=options.seed,
        design=options.design,
        demand=options.demand,
        split=split,
        instances=slots,
        load=options.load,
        profile=options.profile,
        window_s=LEN_S,
        makespan_s=makespan_s,
        rho=math.fsum(prefill_s(each, profile, cached_tokens=0) for each in served) / (slots * LEN_S),
        requests={name: counts(each) for name, each in its.items()},
        rejected=sum(bool(each.refused) for each in served),
        attainment_offered={name: whole[pool].attainment_offered for name, pool in names.items()},
        attainment_admitted={name: whole[pool].attainment_admitted for name, pool in names.items()},
        goodput_tokens_per_s={name: window[pool].goodput_tokens_per_s for name, pool in names.items()},
        throughput_tokens_per_s=Throughput(
            window=window[ALL].output_tokens / LEN_S, makespan=whole[ALL].output_tokens / makespan_s
        ),
        waste_tokens=whole[ALL].waste_tokens,
        cost_per_million_goodput_tokens=cost_per_million(cost, window[ALL].goodput_tokens),
        ttft_s=percentiles(its, lambda figures: figures.ttft_s),
        tpot_s=percentiles(its, lambda figures: figures.tpot_s, ended_only=True),
        e2e_s=percentiles(its, lambda figures: figures.e2e_s),
        hit_ratio=sum(each.cached_tokens for each in served) / prompt_tokens if prompt_tokens else 0.0,
        requests_per_cpu_s=len(served) / max(spent_s, 1e-9),
        shares=shares_of((TALK,) * split + (READ,) * (slots - split), moves),
        moves=tuple(moves),
        revisions=revised(overseer.followed, slots=slots),
        reversals=control.reversals if control else 0,
        control=control,
    )
