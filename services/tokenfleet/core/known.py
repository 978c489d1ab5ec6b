"""Known: which numbers of an instance can be used at all. NaN, infinite, negative and absent mean unknown."""

import math


def known(value: float | None) -> float | None:
    """The value if it is finite and not negative, else None."""
    return value if value is not None and 0.0 <= value < math.inf else None
