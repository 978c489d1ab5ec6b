"""Compared: the cells of one load as a table, each figure as its mean over seeds and its worst seed."""

from collections.abc import Callable, Iterable, Sequence
from math import fsum, inf

from msgspec import Struct

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.compared import Span, span
from tokenfleet.sim.measure import late_s
from tokenfleet.sim.mixed.compare import Cell
from tokenfleet.sim.mixed.measure import CLASSES, Result


class Line(Struct, frozen=True, kw_only=True):
    """One design. Attainment is by class and of offered requests unless it says otherwise; tokens are a second's.

    Rates are of the window but for those `to_end`, which are of the makespan. `goodput_share` is goodput over all
    output of the window. A change is a share of the baseline's figure on the same seed, its mean that of the changes.
    `batch_s` is the mean time that a batch job took, `bulk_end_s` that of the slowest bulk.
    """

    design: str
    seeds: tuple[int, ...]
    attained: dict[str, Span]
    attained_of_admitted: Span
    goodput: Span
    goodput_change: Span
    goodput_share: Span
    output: Span
    output_change: Span
    goodput_to_end: Span
    output_to_end: Span
    output_to_end_change: Span
    cost: Span
    cost_change: Span
    ttft_p95_s: dict[str, Span]
    tpot_p95_s: dict[str, Span]
    batch_s: Span
    batch_change: Span
    bulk_end_s: Span
    waste_tokens: float
    rejected: float


class Compared(Struct, frozen=True, kw_only=True):
    """One load on one fleet: `rho` and `offered`, the requests, are means over the seeds."""

    instances: int
    load: float
    chat: str
    baseline: str
    seeds: tuple[int, ...]
    rho: float
    offered: float
    lines: tuple[Line, ...]


def compared(cells: Sequence[Cell], *, baseline: str) -> Compared:
    """The table, designs in the order of their first cell. Raises PolicyError if the baseline was not run."""
    designs = list(dict.fromkeys(cell.design for cell in cells))
    against = {cell.seed: cell.result for cell in cells if cell.design == baseline}
    if not against:
        raise PolicyError(f"--baseline {baseline!r} is none of the designs compared: {listed(designs)}")
    first = next(iter(against.values()))
    return Compared(
        instances=first.instances,
        load=first.load,
        chat=first.chat,
        baseline=baseline,
        seeds=tuple(sorted(against)),
        rho=fsum(result.rho for result in against.values()) / len(against),
        offered=fsum(result.requests["all"].offered for result in against.values()) / len(against),
        lines=tuple(_line([c.result for c in cells if c.design == design], design, against) for design in designs),
    )


def _line(results: Sequence[Result], design: str, against: dict[int, Result]) -> Line:
    pairs = [(result, against[result.seed]) for result in results if result.seed in against]

    def most(figure: Callable[[Result], float | None]) -> Span:
        """The more, the worse."""
        return span(late_s(figure(result)) for result in results)

    def least(figure: Callable[[Result], float | None]) -> Span:
        """The less, the worse."""
        return span((figure(result) or 0.0 for result in results), worst=min)

    def change(figure: Callable[[Result], float | None], worst: Callable[[Iterable[float]], float]) -> Span:
        changes = [_change(figure(own), figure(other)) for own, other in pairs]
        return span(changes, worst=worst)

    return Line(
        design=design,
        seeds=tuple(sorted(result.seed for result in results)),
        attained={name: least(lambda r, name=name: r.attainment_offered[name]) for name in CLASSES},
        attained_of_admitted=least(lambda r: r.attainment_admitted["all"]),
        goodput=least(_goodput),
        goodput_change=change(_goodput, min),
        goodput_share=least(lambda r: _goodput(r) / _output(r) if _output(r) else 0.0),
        output=least(_output),
        output_change=change(_output, min),
        goodput_to_end=least(lambda r: r.goodput_makespan_tokens_per_s["all"]),
        output_to_end=least(_output_to_end),
        output_to_end_change=change(_output_to_end, min),
        cost=most(_cost),
        cost_change=change(_cost, max),
        ttft_p95_s={name: most(lambda r, name=name: r.ttft_s[name].p95) for name in CLASSES},
        tpot_p95_s={name: most(lambda r, name=name: r.tpot_s[name].p95) for name in CLASSES},
        batch_s=most(_batch_s),
        batch_change=change(_batch_s, max),
        bulk_end_s=most(lambda r: max(late_s(end_s) for end_s in r.bulk_end_s)),
        waste_tokens=fsum(result.waste_tokens for result in results) / len(results),
        rejected=fsum(result.rejected for result in results) / len(results),
    )


def _goodput(result: Result) -> float:
    return result.goodput_tokens_per_s["all"]


def _output(result: Result) -> float:
    return result.throughput_tokens_per_s.window


def _output_to_end(result: Result) -> float:
    return result.throughput_tokens_per_s.makespan


def _cost(result: Result) -> float | None:
    return result.cost_per_million_goodput_tokens


def _batch_s(result: Result) -> float | None:
    return result.e2e_s["batch"].mean


def _change(own: float | None, other: float | None) -> float:
    return inf if own is None or not other else own / other - 1.0
