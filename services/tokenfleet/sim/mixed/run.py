"""Run: one mixed run from its options, and what came of it."""

import math
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError
from tokenfleet.core.goodput.cost import HOUR_S, cost_per_million
from tokenfleet.core.policy import Policy
from tokenfleet.sim.demand import demand_named
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.links import Links
from tokenfleet.sim.measure import prefill_s
from tokenfleet.sim.mixed.accounts import Accounts
from tokenfleet.sim.mixed.allowances import Allowances, control_of_allowance, control_of_share
from tokenfleet.sim.mixed.designs import design_named
from tokenfleet.sim.mixed.measure import Result, Throughput, bulk_ends_s, by_class, counts, percentiles
from tokenfleet.sim.mixed.service_levels import BATCH_DEADLINE_S, mixed_policy
from tokenfleet.sim.mixed.sharing import Shares, shared
from tokenfleet.sim.mixed.workload import LEN_S, tenant_name, workload
from tokenfleet.sim.profiles import Profile, load_profile
from tokenfleet.sim.router import MakeRouter
from tokenfleet.sim.served import Served
from tokenfleet.sim.telemetry import SITE
from tokenfleet.sim.traces.fits import check_fits

TOKEN_BUDGET = 2_048  # of an engine's step: a full one takes about as long as chat's time per token may


class MixedOptions(Struct, frozen=True, kw_only=True):
    """One run. `load` 1 is what the fleet can just serve; it is that of all `tenants`, of whom the first then sends
    `flood` times its chat. `demand` moves the chat stream, "" leaves it as it was recorded. `policy` None: the usual
    service levels. `shares` is how the classes share the pool's KV (mixed.sharing); designs without a `Site` know none.

    `make_router` is taken instead of the design's own and keeps its name. `prior_factor` and `learning` are what a
    router starts from and whether outcomes teach it (router.Setup). `event_delay_s` is that of placements,
    `outcome_delay_s` that of the tokens' reports to a gateway, `links` all else of the links. Callers who are told to
    come again do so for `patience_s` after their arrival.
    """

    design: str = "slomax"
    instances: int = 8
    load: float = 0.9
    chat: str = "azure-conv"
    tenants: int = 1
    flood: float = 1.0
    demand: str = ""
    shares: str = "none"
    seed: int = 1
    gateways: int = 1
    event_delay_s: float = 0.02
    outcome_delay_s: float = 0.0
    profile: str = "L70"
    telemetry_period_s: float = 0.25
    links: Links = Links()
    policy: Policy | None = None
    prior_factor: float = 1.0
    learning: bool = False
    make_router: MakeRouter | None = None
    drain_max_s: float = 1_800.0
    patience_s: float = BATCH_DEADLINE_S


class MixedRun(Struct, frozen=True, kw_only=True):
    """A run's figures, its engines, its accounts by window, and all of its requests in the order of arrival."""

    result: Result
    profile: Profile
    accounts: Accounts
    served: list[Served]


def run_mixed(
    options: MixedOptions,
    *,
    cpu_s: Callable[[], float],
    progress: Callable[[float], None] | None = None,
) -> MixedRun:
    """Serve the workload and measure. `cpu_s` reads the processor time spent, for `requests_per_cpu_s` alone.

    Raises PolicyError for an unknown design, chat stream or profile, and for figures out of range.
    """
    _refuse_impossible(options)
    make_router = options.make_router or design_named(options.design)
    profile = replace(load_profile(options.profile), token_budget=TOKEN_BUDGET)
    names = map(tenant_name, range(options.tenants)) if options.tenants > 1 else ()
    policy = options.policy or mixed_policy(
        profile, prior_factor=options.prior_factor, learning=options.learning, tenants=names
    )
    policy = shared(policy, options.shares)
    demand = demand_named(options.demand, seed=options.seed) if options.demand else None
    overseer = Shares(policy) if options.shares == "controlled" else Allowances()
    rows = workload(
        load=options.load,
        instances=options.instances,
        seed=options.seed,
        chat=options.chat,
        tenants=options.tenants,
        flood=options.flood,
        batch_deadline_s=policy.classes["batch"].deadline_s or BATCH_DEADLINE_S,
        demand=demand,
    )
    try:
        check_fits(rows, profile)
    except PolicyError as error:
        raise PolicyError(f"mixed on {options.profile}: {error}") from error
    began_s = cpu_s()
    fleet = Fleet(
        _terms(options, profile, policy),
        overseer.watching(make_router),
        seed=options.seed,
        lessons_policy=policy if options.learning else None,
        overseer=overseer,
    )
    if options.shares != "none" and not overseer.pilots:
        raise PolicyError(f"--shares {options.shares}: {options.design} shares nothing out between classes")
    served = fleet.serve(rows, progress=progress)
    spent_s = cpu_s() - began_s
    accounts = Accounts(served, policy)
    allowance = control_of_allowance(overseer.allowed, demand, until_s=LEN_S) if overseer.allowed else None
    result = replace(
        _result(options, served, accounts, profile, policy, spent_s=spent_s),
        allowance=allowance,
        share_of_chat=control_of_share(overseer.share_of_chat, demand, until_s=LEN_S)
        if isinstance(overseer, Shares)
        else None,
    )
    return MixedRun(result=result, profile=profile, accounts=accounts, served=served)


def _refuse_impossible(options: MixedOptions) -> None:
    for name, value, most in (("--instances", options.instances, 1_000), ("--gateways", options.gateways, 1_000)):
        if not 1 <= value <= most:
            raise PolicyError(f"{name} {value}: it is 1 to {most}")
    if not 1 <= options.tenants <= TENANTS_MAX:
        raise PolicyError(f"--tenants {options.tenants}: it is 1 to {TENANTS_MAX}")
    if not 1.0 <= options.flood <= FLOOD_MAX:
        raise PolicyError(f"--flood {options.flood:g}: it is 1 to {FLOOD_MAX:g}")
    if options.flood > 1.0 and options.tenants < 2:
        raise PolicyError(f"--flood {options.flood:g}: it takes two --tenants or more, for one floods the others")
    if not 0.0 < options.load <= LOAD_MAX:
        raise PolicyError(f"--load {options.load:g}: it is more than 0 and at most {LOAD_MAX:g}")
    if not 0.0 < options.prior_factor < math.inf:
        raise PolicyError(f"--prior-factor {options.prior_factor:g}: it is more than 0")
    for name, delay_s in (("--event-delay", options.event_delay_s), ("--outcome-delay", options.outcome_delay_s)):
        if not 0.0 <= delay_s < math.inf:
            raise PolicyError(f"{name} {delay_s:g}: it is 0.0 or more")


LOAD_MAX = 10.0
TENANTS_MAX = 1_000
FLOOD_MAX = 1_000.0


def _terms(options: MixedOptions, profile: Profile, policy: Policy) -> FleetTerms:
    links = options.links
    return FleetTerms(
        profile=profile,
        instances=options.instances,
        gateways=options.gateways,
        telemetry_period_s=options.telemetry_period_s,
        links=replace(
            links,
            placements=replace(links.placements, delay_s=options.event_delay_s),
            outcomes=replace(links.outcomes, delay_s=options.outcome_delay_s),
        ),
        policy=policy,
        prior_factor=options.prior_factor,
        learning=options.learning,
        drain_max_s=options.drain_max_s,
        patience_s=options.patience_s,
    )


def _result(
    options: MixedOptions,
    served: list[Served],
    accounts: Accounts,
    profile: Profile,
    policy: Policy,
    *,
    spent_s: float,
) -> Result:
    its = by_class(served)
    window, whole = accounts.by_class(until_s=LEN_S), accounts.by_class()
    makespan_s = max((each.finished_s or 0.0 for each in served), default=0.0) or LEN_S
    cost = options.instances * policy.site(SITE).price_per_instance_hour * LEN_S / HOUR_S
    prompt_tokens = sum(each.row.prompt_tokens for each in served if each.finished_s is not None)
    cold_s = math.fsum(prefill_s(each, profile, cached_tokens=0) for each in served)
    return Result(
        seed=options.seed,
        design=options.design,
        chat=options.chat,
        instances=options.instances,
        load=options.load,
        gateways=options.gateways,
        event_delay_s=options.event_delay_s,
        outcome_delay_s=options.outcome_delay_s,
        profile=options.profile,
        window_s=LEN_S,
        makespan_s=makespan_s,
        rho=cold_s / (options.instances * LEN_S),
        requests={name: counts(each) for name, each in its.items()},
        rejected=sum(bool(each.refused) for each in served),
        attainment_offered={name: sums.attainment_offered for name, sums in whole.items()},
        attainment_admitted={name: sums.attainment_admitted for name, sums in whole.items()},
        goodput_tokens_per_s={name: sums.goodput_tokens_per_s for name, sums in window.items()},
        goodput_makespan_tokens_per_s={name: sums.goodput_tokens / makespan_s for name, sums in whole.items()},
        throughput_tokens_per_s=Throughput(
            window=window["all"].output_tokens / LEN_S, makespan=whole["all"].output_tokens / makespan_s
        ),
        waste_tokens=whole["all"].waste_tokens,
        cost_per_million_goodput_tokens=cost_per_million(cost, window["all"].goodput_tokens),
        ttft_s=percentiles(its, lambda figures: figures.ttft_s),
        tpot_s=percentiles(its, lambda figures: figures.tpot_s, ended_only=True),
        e2e_s=percentiles(its, lambda figures: figures.e2e_s),
        bulk_end_s=bulk_ends_s(its["batch"]),
        hit_ratio=sum(each.cached_tokens for each in served) / prompt_tokens if prompt_tokens else 0.0,
        requests_per_cpu_s=len(served) / max(spent_s, 1e-9),
        demand=options.demand,
        shares=options.shares,
    )
