"""Timeline: one mixed run over time, class by class."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from msgspec import Struct

from tokenfleet.core.policy import REQUIRED_CLASSES
from tokenfleet.sim.measure import late_s, prefill_s
from tokenfleet.sim.mixed.accounts import Accounts
from tokenfleet.sim.mixed.service_levels import WINDOW_S
from tokenfleet.sim.mixed.workload import LEN_S
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.served import Served

WINDOWS = round(LEN_S / WINDOW_S)
SAMPLES = round(LEN_S)  # one a second


class Timeline(Struct, frozen=True, kw_only=True):
    """Columns by class over [0, LEN_S): of windows of WINDOW_S the first four, then samples at each full second.

    `attained` is the share of those that arrived in the window, refused ones included, that met their service level
    later; None where none arrived. Tokens count in the window in which their request ended. `prefill_share` is the
    prefill work that went out in the window, in instances kept busy by it. `held` wait in their gateway, `running` are
    in an engine, its own queue included.
    """

    attained: dict[str, list[float | None]]
    goodput_tokens_per_s: dict[str, list[float]]
    waste_tokens_per_s: dict[str, list[float]]
    prefill_share: dict[str, list[float]]
    held: dict[str, list[int]]
    running: dict[str, list[int]]


def timeline_of(served: Sequence[Served], accounts: Accounts, profile: Profile) -> Timeline:
    """The run's timeline; cached prompt tokens count as no work."""
    windows = [accounts.window(number) for number in range(WINDOWS)]
    its = {name: [each for each in served if each.request_class == name] for name in REQUIRED_CLASSES}
    return Timeline(
        attained={name: [sums[name].attainment_arrived for sums in windows] for name in its},
        goodput_tokens_per_s={name: [sums[name].goodput_tokens_per_s for sums in windows] for name in its},
        waste_tokens_per_s={name: [sums[name].waste_tokens / WINDOW_S for sums in windows] for name in its},
        prefill_share={name: _work(each, profile) for name, each in its.items()},
        held={name: _present(_held(each)) for name, each in its.items()},
        running={name: _present(_running(each)) for name, each in its.items()},
    )


def _work(served: Iterable[Served], profile: Profile) -> list[float]:
    work_s = [0.0] * WINDOWS
    for each in served:
        if each.dispatched_s is not None and each.dispatched_s < LEN_S:
            place = int(each.dispatched_s // WINDOW_S)
            work_s[place] += prefill_s(each, profile, cached_tokens=each.cached_tokens)
    return [seconds / WINDOW_S for seconds in work_s]


def _held(served: Iterable[Served]) -> Iterable[tuple[float, float]]:
    for each in served:
        yield each.row.at_s, late_s(each.refused_s if each.dispatched_s is None else each.dispatched_s)


def _running(served: Iterable[Served]) -> Iterable[tuple[float, float]]:
    for each in served:
        if each.dispatched_s is not None:
            yield each.dispatched_s, late_s(each.finished_s)


def _present(spans: Iterable[tuple[float, float]]) -> list[int]:
    """How many of the spans [from, until) hold each full second."""
    changes = [0] * (SAMPLES + 1)
    for from_s, until_s in spans:
        changes[_sample(from_s)] += 1
        changes[_sample(until_s)] -= 1
    return list(accumulate(changes))[:SAMPLES]


def _sample(at_s: float) -> int:
    """The first full second at or after."""
    return SAMPLES if at_s > SAMPLES else -int(-at_s // 1)
