"""Known: which numbers of an instance can be used at all. NaN, infinite, negative and absent mean unknown."""

import math
from collections.abc import Iterable


def known(value: float | None) -> float | None:
    """The value if it is finite and not negative, else None."""
    return value if value is not None and 0.0 <= value < math.inf else None


def upper_quartile(values: Iterable[float | None], *, otherwise: float) -> float:
    """The nearest-rank p75 of the known values: what is assumed of an instance that says nothing, so never zero load
    while the others work. `otherwise` when none is known."""
    have = sorted(value for value in values if value is not None)
    return have[math.ceil(0.75 * len(have)) - 1] if have else otherwise
