"""Backlogs: what each instance of a pool has still to do, when time alone has passed since its work was added up."""

from typing import Any

import numpy as np

from tokenfleet.core.columns import Floats
from tokenfleet.core.compiled import Twin


def left_s(work_s: Any, head_began_s: Any, head_work_s: Any, now_s: float) -> Any:
    """The work without what is done of its head (core.load.Standing), of one instance or of all."""
    return np.maximum(work_s - np.minimum(np.maximum(now_s - head_began_s, 0.0), head_work_s), 0.0)


def by_arrays(work_s: Floats, head_began_s: Floats, head_work_s: Floats, now_s: float) -> Floats:
    return left_s(work_s, head_began_s, head_work_s, now_s)


def one_by_one(work_s: Floats, head_began_s: Floats, head_work_s: Floats, now_s: float) -> Floats:
    """The same, an instance at a time, to be compiled."""
    backlog_s = np.empty(len(work_s))
    for instance in range(len(work_s)):
        backlog_s[instance] = left_s(work_s[instance], head_began_s[instance], head_work_s[instance], now_s)
    return backlog_s


def _sample() -> tuple[object, ...]:
    return np.ones(1), np.ones(1), np.ones(1), 1.0


backlogs_s = Twin(by_arrays, one_by_one, sample=_sample, formulas=(left_s,))
