"""Pictures: one scenario's runs drawn as SVG texts, by matplotlib (the extra `report`)."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import TypedDict

from matplotlib import rc_context
from matplotlib.figure import Figure

from tokenfleet.sim.compare import BOUNDS, Cell
from tokenfleet.sim.drawing import OWN, STYLE, WIDTH, sheet, svg
from tokenfleet.sim.measure import late_s

COLOURS = {  # blind rules pale, peers strong
    "tokenpilot": OWN,
    "round_robin": "#f2a65a",
    "random": "#d5bdaf",
    "power_of_two": "#b8a9c9",
    "least_requests": "#6d597a",
    "least_stale": "#a3b18a",
    "sglang": "#e63946",
    "dynamo": "#4f9d2f",
    "llmd": "#00a6c0",
}
BOUND = "#9aa5b1"
BIN_S = 20.0  # of the timelines
CURVE_POINTS = 250  # of a distribution: finer than a pixel


def waits(cells: Sequence[Cell]) -> str:
    """The share of measured requests that had their first token within so many seconds, all seeds together."""
    figure, axes = sheet(width=WIDTH, height=3.9)
    for policy, its in by_policy(cells).items():
        times = sorted(time for cell in its for time in measured_s(cell))
        steps = range(0, len(times), max(1, len(times) // CURVE_POINTS))
        finite = [(times[step], (step + 1) / len(times)) for step in steps if times[step] < float("inf")]
        axes.plot([time for time, _ in finite], [share for _, share in finite], label=policy, **_look(policy))
    axes.set_xscale("log")
    axes.set_xlabel("seconds to the first token")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0.0, 1.0)
    return svg(figure, axes)


def timelines(cells: Sequence[Cell]) -> str:
    """One seed over time: the median wait by arrival, and the requests that wait for their first token."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    first = first_seed(cells)
    for policy, its in by_policy(first).items():
        look = _look(policy)
        upper.plot(*_medians(its[0]), label=policy, **look)
        if policy not in BOUNDS:
            lower.plot(*_waiting(its[0]), **look)
    for axes in (upper, lower):
        axes.set_yscale("log")
        axes.axvspan(0.0, first[0].warm_s, color="#f1f3f5", zorder=0)
    upper.set_ylabel(f"median TTFT, s, of {BIN_S:.0f} s")
    lower.set_ylabel("requests without first token, mean")
    lower.set_xlabel(f"seconds (seed {first[0].seed}; grey: warm-up, not measured)")
    return svg(figure, upper)


def instance_loads(cells: Sequence[Cell]) -> str:
    """Prefill seconds a second of each instance, one dot an instance, one seed."""
    its = [cell for cell in first_seed(cells) if cell.loads]
    figure, axes = sheet(width=WIDTH, height=0.32 * len(its) + 0.9)
    for place, cell in enumerate(its):
        busy = [load.prefill_s / cell.len_s for load in cell.loads]
        colour = _colour(cell.policy)
        axes.plot([min(busy), max(busy)], [place, place], color=colour, linewidth=3.0, alpha=0.25)
        axes.plot(busy, [place] * len(busy), linestyle="", marker="o", markersize=4.5, color=colour, alpha=0.75)
    axes.set_yticks(range(len(its)), [cell.policy for cell in its])
    axes.invert_yaxis()
    axes.set_xlim(left=0.0)
    axes.set_xlabel("seconds of prefill a second, by instance")
    return svg(figure, None)


def reuse(cells: Sequence[Cell]) -> str:
    """Shares of the prompt tokens: cached on some instance, on the chosen one, and found by the engine; all seeds."""
    by_name = by_policy(cells)
    names = [name for name in by_name if name not in BOUNDS]
    figure, axes = sheet(width=WIDTH, height=0.42 * len(names) + 1.1)
    for place, name in enumerate(names):
        for row, (label, colour) in enumerate(REUSE.items()):
            share = fmean(reuse_of(cell)[row] for cell in by_name[name])
            axes.barh(place + (row - 1) * 0.26, share, height=0.24, color=colour, label=None if place else label)
    for bound, style in zip(BOUNDS, ("--", ":"), strict=True):
        if bound in by_name:
            share = fmean(reuse_of(cell)[-1] for cell in by_name[bound])
            axes.axvline(share, color="#52606d", linestyle=style, linewidth=1.0, label=bound)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("share of prompt tokens")
    return svg(figure, axes)


REUSE = {
    "available: cached on some instance": "#cbd2d9",
    "captured: cached where it went": "#7ea6e0",
    "delivered: found by the engine": OWN,
}


def reuse_of(cell: Cell) -> tuple[float, float, float]:
    """Available, captured and delivered tokens of the measured requests, as shares of their prompt tokens."""
    its = cell.requests
    places = [place for place, at_s in enumerate(its.at_s) if cell.warm_s <= at_s < cell.len_s]
    prompt_tokens = sum(its.prompt_tokens[place] for place in places) or 1
    available, captured, delivered = (
        sum(column[place] for place in places) / prompt_tokens
        for column in (its.available_tokens, its.captured_tokens, its.cached_tokens)
    )
    return available, captured, delivered


def by_policy(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of each policy, policies in the order of their first one."""
    its: dict[str, list[Cell]] = {}
    for cell in cells:
        its.setdefault(cell.policy, []).append(cell)
    return its


def first_seed(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of the least seed."""
    least = min(cell.seed for cell in cells)
    return [cell for cell in cells if cell.seed == least]


def measured_s(cell: Cell) -> list[float]:
    """Times to first token of the measured requests; infinite for those that never had one."""
    its = cell.requests
    return [
        late_s(ttft_s) for at_s, ttft_s in zip(its.at_s, its.ttft_s, strict=True) if cell.warm_s <= at_s < cell.len_s
    ]


def _medians(cell: Cell) -> tuple[list[float], list[float]]:
    """Middle of each bin of arrivals, and the median wait of its requests."""
    bins: dict[int, list[float]] = {}
    for at_s, ttft_s in zip(cell.requests.at_s, cell.requests.ttft_s, strict=True):
        bins.setdefault(int(at_s // BIN_S), []).append(late_s(ttft_s))
    known = {number: median(times) for number, times in sorted(bins.items())}
    finite = {number: time for number, time in known.items() if time < float("inf")}
    return [(number + 0.5) * BIN_S for number in finite], list(finite.values())


def _waiting(cell: Cell) -> tuple[list[float], list[float]]:
    """Middle of each bin, and the mean number of requests in it that had arrived but had no first token yet."""
    bins = [0.0] * (int(cell.len_s / BIN_S) + 1)
    for at_s, ttft_s in zip(cell.requests.at_s, cell.requests.ttft_s, strict=True):
        end_s = min(at_s + late_s(ttft_s), cell.len_s)
        for number in range(int(at_s / BIN_S), int(end_s / BIN_S) + 1):
            bins[number] += max(0.0, min(end_s, (number + 1) * BIN_S) - max(at_s, number * BIN_S)) / BIN_S
    whole = int(cell.len_s / BIN_S)
    return [(number + 0.5) * BIN_S for number in range(whole)], bins[:whole]


class _Look(TypedDict):
    color: str
    linestyle: str | tuple[int, tuple[int, int]]
    linewidth: float
    zorder: float


def _look(policy: str) -> _Look:
    if policy in BOUNDS:
        return _Look(color=BOUND, linestyle=("--", ":")[BOUNDS.index(policy)], linewidth=1.1, zorder=1.0)
    base, _, tuned = policy.partition(":")
    own = base == "tokenpilot"
    style = (0, (4, 1)) if tuned else "-"
    return _Look(color=_colour(policy), linestyle=style, linewidth=2.2 if own else 1.2, zorder=3.0 if own else 2.0)


def _colour(policy: str) -> str:
    """A variant has its policy's colour."""
    return COLOURS.get(policy.partition(":")[0], "#52606d")


def drawn(cells: Sequence[Cell]) -> dict[str, str]:
    """All pictures of one scenario, heading to SVG."""
    with rc_context(STYLE):
        return {
            "Time to first token": waits(cells),
            "Over time": timelines(cells),
            "Load by instance": instance_loads(cells),
            "Reuse: available, captured, delivered": reuse(cells),
        }
