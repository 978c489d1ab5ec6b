"""Compared: the cells of one scenario as a table, each figure as its mean over seeds and its worst seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum, isfinite
from typing import Protocol, TypeVar

from msgspec import Struct

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.compare import BOUNDS, Cell
from tokenfleet.sim.measure import late_s


class Span(Struct, frozen=True, kw_only=True):
    """A figure over several seeds; of what is the better the greater, the `worst` is the least. None where so many
    requests were lost."""

    mean: float | None
    worst: float | None


class Line(Struct, frozen=True, kw_only=True):
    """One policy: seconds, and changes against the baseline as shares of it (-0.5 is half).

    A change is taken seed by seed, between runs of the same requests; its mean is that of the changes.
    """

    policy: str
    seeds: tuple[int, ...]
    ttft_p50_s: Span
    ttft_p95_s: Span
    ttft_p99_s: Span
    change_p50: Span
    change_p95: Span
    tpot_p50_s: Span
    tpot_p95_s: Span
    e2e_p50_s: Span
    e2e_p95_s: Span
    hit_ratio: float
    throughput_tokens_per_s: float
    lost: int


class Compared(Struct, frozen=True, kw_only=True):
    """One scenario: `rho` is the mean offered load without caches, `measured` the requests of a seed on average."""

    scenario: str
    baseline: str
    seeds: tuple[int, ...]
    rho: float
    measured: float
    lines: tuple[Line, ...]


def compared(cells: Sequence[Cell], *, scenario: str, baseline: str) -> Compared:
    """The scenario's table, bounds last. Raises PolicyError if the baseline was not run."""
    its = [cell for cell in cells if cell.scenario == scenario]
    policies = sorted(dict.fromkeys(cell.policy for cell in its), key=lambda name: name in BOUNDS)
    against = {cell.seed: cell for cell in its if cell.policy == baseline}
    if not against:
        raise PolicyError(f"--baseline {baseline!r} is none of the policies compared: {listed(policies)}")
    return Compared(
        scenario=scenario,
        baseline=baseline,
        seeds=tuple(sorted(against)),
        rho=fsum(cell.rho for cell in against.values()) / len(against),
        measured=fsum(cell.measured for cell in against.values()) / len(against),
        lines=tuple(_line([cell for cell in its if cell.policy == name], name, against) for name in policies),
    )


def span(values: Iterable[float], *, worst: Callable[[Iterable[float]], float] = max) -> Span:
    """Mean and worst; None for infinity."""
    all_values = list(values)
    return Span(mean=_finite(fsum(all_values) / len(all_values)), worst=_finite(worst(all_values)))


class Seeded(Protocol):
    """One run on one seed."""

    @property
    def seed(self) -> int: ...


R = TypeVar("R", bound=Seeded)


def spans_of(
    runs: Sequence[R], against: Mapping[int, R]
) -> tuple[Callable[[Callable[[R], float | None]], Span], Callable[[Callable[[R], float | None]], Span]]:
    """For a figure of which less is better: what it is over the runs, and how it changes `against` those of the same
    seeds, as a share of theirs."""

    def over(figure: Callable[[R], float | None]) -> Span:
        return span(late_s(figure(run)) for run in runs)

    def change(figure: Callable[[R], float | None]) -> Span:
        pairs = [(late_s(figure(run)), late_s(figure(against[run.seed]))) for run in runs if run.seed in against]
        return span(own / other - 1.0 if isfinite(other) and other else float("inf") for own, other in pairs)

    return over, change


def _line(cells: Sequence[Cell], policy: str, against: dict[int, Cell]) -> Line:
    over, change = spans_of(cells, against)
    return Line(
        policy=policy,
        seeds=tuple(sorted(cell.seed for cell in cells)),
        ttft_p50_s=over(lambda cell: cell.ttft_s.p50),
        ttft_p95_s=over(lambda cell: cell.ttft_s.p95),
        ttft_p99_s=over(lambda cell: cell.ttft_s.p99),
        change_p50=change(lambda cell: cell.ttft_s.p50),
        change_p95=change(lambda cell: cell.ttft_s.p95),
        tpot_p50_s=over(lambda cell: cell.tpot_s.p50),
        tpot_p95_s=over(lambda cell: cell.tpot_s.p95),
        e2e_p50_s=over(lambda cell: cell.e2e_s.p50),
        e2e_p95_s=over(lambda cell: cell.e2e_s.p95),
        hit_ratio=fsum(cell.hit_ratio for cell in cells) / len(cells),
        throughput_tokens_per_s=fsum(cell.throughput_tokens_per_s for cell in cells) / len(cells),
        lost=sum(cell.lost for cell in cells),
    )


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
