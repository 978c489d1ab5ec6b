"""Beat: what of a heartbeat can be believed.

NaN, ±inf, negative and absurdly large values are unknown, which is None and never zero: an idle engine's 0/0
must not drop the whole observation, and a broken gauge must not win or lose a comparison.
"""

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tokenfleet.core.records import Heartbeat, Histogram

AGE_UNKNOWN_S = math.inf  # what `age_s` says when the agent's own figure can't be believed


def cleaned(beat: Heartbeat) -> Heartbeat:
    """`beat` with every value that can't be true made unknown; `beat` itself when all is well.

    An age that is negative (a stamp from the future) becomes AGE_UNKNOWN_S, an unbelievable `scrape_failed_for_s` 0:
    unknown never vetoes.
    """
    changes: dict[str, Any] = {}
    for field, most in CEILINGS.items():
        value = getattr(beat, field)
        if value is not None and not 0 <= value <= most:
            changes[field] = None
    for field in SIZES:
        if getattr(beat, field) == 0:  # a size of zero divides nothing
            changes[field] = None
    for field in HISTOGRAMS:
        if (histogram := getattr(beat, field)) is not None and not _believable(histogram):
            changes[field] = None
    if not 0 <= beat.age_s <= SECONDS_MAX:
        changes["age_s"] = AGE_UNKNOWN_S
    if not 0 <= beat.scrape_failed_for_s <= SECONDS_MAX:
        changes["scrape_failed_for_s"] = 0.0
    return replace(beat, **changes) if changes else beat


def sum_of_ages(*ages_s: float | None) -> float | None:
    """The sum of ages, each from one clock; None when one of them is unknown."""
    total_s = 0.0
    for age_s in ages_s:
        if age_s is None or not 0 <= age_s <= SECONDS_MAX:
            return None
        total_s += age_s
    return total_s


def _believable(histogram: Histogram) -> bool:
    return 0 <= histogram.sum_s <= TOTAL_MAX and 0 <= histogram.count <= TOTAL_MAX


SECONDS_MAX = 1e9  # thirty years
SEQUENCES_MAX = 1e6  # an engine's batch has hundreds
BLOCKS_MAX = 1e9  # of 16 tokens: a hundred times the largest known KV cache
TOTAL_MAX = 2.0**53  # a counter beyond has lost its ones in a float
CEILINGS: Mapping[str, float] = {
    "running": SEQUENCES_MAX,
    "waiting": SEQUENCES_MAX,
    "kv_used_blocks": BLOCKS_MAX,
    "kv_total_blocks": BLOCKS_MAX,
    "block_size": 1e6,
    "in_flight_tokens": BLOCKS_MAX,
    "prompt_tokens_total": TOTAL_MAX,
    "generation_tokens_total": TOTAL_MAX,
    "cached_tokens_total": TOTAL_MAX,
    "iterations_total": TOTAL_MAX,
    "preemptions_total": TOTAL_MAX,
}
SIZES = ("kv_total_blocks", "block_size")
HISTOGRAMS = ("ttft", "prefill", "queue")
