"""Shadow: where other weights would have sent the request, on the same tables, and what reuse the choice left.

Shadows place nothing. They are asked for a share of the decisions, by the request's id, and cost nothing otherwise.
"""

from collections.abc import Callable

import numpy as np
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.columns import Flags, Floats
from tokenfleet.core.decision import Regret, Request, ShadowChoice
from tokenfleet.core.policy import Policy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.tokenpilot.cost import weigh
from tokenfleet.core.tokenpilot.filters import ask_of, hard
from tokenfleet.core.tokenpilot.routing import Routing


class Watched(Struct, frozen=True, kw_only=True):
    """What is recorded with the decision."""

    shadows: tuple[ShadowChoice, ...] = ()
    regret: Regret | None = None


NOTHING = Watched()


def watched(
    request: Request,
    pool: PoolView,
    policy: Policy,
    routing: Routing,
    pick: Callable[[Policy], Routing],
    *,
    request_class: str,
    output_q50: float,
    output_q90: float,
    network_s: float,
    last_instance: str,
    ahead_s: Floats | None,
    held_s: float,
    allowed: Flags | None = None,
    pace_s: Floats | None = None,
) -> Watched:
    """The choice of each shadow of `policy` beside `routing`, which it made; nothing unless the request is sampled.

    `pick` chooses under another policy, with the same chance as `routing` had. All costs and times are predicted under
    the weights of `policy`; the other arguments are those of `choose`.
    """
    if not policy.shadows or not routing.target or not falls_to_shadows(request.id, policy.shadow_share):
        return NOTHING
    ask = ask_of(
        request,
        pool,
        policy,
        request_class=request_class,
        output_q90=output_q90,
        network_s=network_s,
        last_instance=last_instance,
    )
    slots = pool.columns.labels.slots
    told = {name: slots[pick(replace(policy, tokenpilot=other)).target] for name, other in policy.shadows.items()}
    able, _ = hard(pool.columns, ask, allowed)
    weights = policy.tokenpilot
    costs = weigh(
        request.prompt_tokens,
        pool,
        weights,
        able,
        output_q50=output_q50,
        ahead_s=ahead_s,
        held_s=held_s,
        pace_s=pace_s,
    )
    cached = pool.columns.hits
    hits = np.zeros(len(pool.columns)) if cached is None else np.minimum(cached, request.prompt_tokens)
    chosen = slots[routing.target]
    shadows = [
        ShadowChoice(
            shadow=name,
            instance=pool.columns.labels.names[slot],
            cost_s=float(costs.cost_s[slot]),
            ttft_s=float(costs.ttft_s[slot]),
            regret_s=float(costs.ttft_s[slot] - costs.ttft_s[chosen]),
            hit_tokens=int(hits[slot]),
        )
        for name, slot in told.items()
    ]
    return Watched(
        shadows=tuple(shadows),
        regret=Regret(
            available_tokens=int(_of(hits, able).max()),
            captured_tokens=int(hits[chosen]),
            ttft_s=float(costs.ttft_s[chosen] - _of(costs.ttft_s, able).min()),
        ),
    )


def falls_to_shadows(request: str, share: float) -> bool:
    """By a hash of the id, apart from those by which canaries and partitions are chosen."""
    return xxhash.xxh3_64_intdigest(f"shadow/{request}".encode()) < share * 2.0**64


def _of(values: Floats, able: Flags | None) -> Floats:
    return values if able is None else np.compress(able, values)
