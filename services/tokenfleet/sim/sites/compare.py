"""Compare: designs of cross-site dispatch on the same requests, seed by seed; a cell is one design on one seed."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import process_time

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.compare_words import marked, seconds, spanned
from tokenfleet.sim.compared import Span, spans_of
from tokenfleet.sim.profiles import load_profile
from tokenfleet.sim.runs import Runs, named_by
from tokenfleet.sim.sites.measure import Result
from tokenfleet.sim.sites.run import SitesOptions, run_sites


class Cell(Struct, frozen=True, kw_only=True):
    """What is kept of one run."""

    result: Result

    @property
    def label(self) -> str:
        return f"{self.result.design}, seed {self.result.seed}"


class Line(Struct, frozen=True, kw_only=True):
    """One design: seconds, changes against the baseline as shares of it, the rest as means over the seeds."""

    design: str
    ttft_p50_s: Span
    ttft_p95_s: Span
    change_p50: Span
    change_p95: Span
    within_2s: float
    e2e_p50_s: Span
    change_e2e_p50: Span
    hit_ratio: float
    share: dict[str, float]
    lost: int
    residency_violations: int


class Compared(Struct, frozen=True, kw_only=True):
    """One load, design by design; `about` is what the runs have in common."""

    baseline: str
    seeds: tuple[int, ...]
    about: str
    lines: tuple[Line, ...]


def site_runs(folder: Path | None) -> Runs[SitesOptions, Cell]:
    """Raises SetupError if the folder can't be made."""
    return Runs(folder, kind=Cell, make=_cell, name=_file_name)


def wanted(base: SitesOptions, designs: Sequence[str], seeds: Sequence[int]) -> list[SitesOptions]:
    """Every design on each seed."""
    return [replace(base, design=design, seed=seed) for design in designs for seed in seeds]


def compared(cells: Sequence[Cell], *, baseline: str) -> Compared:
    """The table, designs in the order of their first cell. Raises PolicyError if the baseline was not run."""
    results = [cell.result for cell in cells]
    designs = list(dict.fromkeys(result.design for result in results))
    against = {result.seed: result for result in results if result.design == baseline}
    if not against:
        raise PolicyError(f"--baseline {baseline!r} is none of the designs compared: {listed(tuple(designs))}")
    first = results[0]
    about = (
        f"conversation × {first.copies:g}, {first.residency:.0%} of conversations stay at b, summaries each "
        f"{first.summary_age_s:g} s, {first.ingresses} × {first.replicas} replicas, events "
        f"{first.event_delay_s:g} s late"
    )
    return Compared(
        baseline=baseline,
        seeds=tuple(sorted(against)),
        about=about,
        lines=tuple(_line([r for r in results if r.design == design], design, against) for design in designs),
    )


HEADINGS = (
    "TTFT p50 s",
    "Δ %",
    "p95 s",
    "Δ %",
    "≤ 2 s %",
    "E2E p50 s",
    "Δ %",
    "hits",
    "b / c / d",
    "lost",
    "violations",
)


def table_of(of: Compared) -> str:
    """The comparison as a table for a terminal or a document."""
    seeds = f"{'seeds' if len(of.seeds) > 1 else 'seed'} {', '.join(map(str, of.seeds))}"
    about = f"{of.about}: {seeds}; changes against {of.baseline}."
    return "\n".join(
        [
            about,
            "",
            marked(("design", *HEADINGS)),
            "|---|" + "--:|" * len(HEADINGS),
            *(marked((line.design, *_texts(line))) for line in of.lines),
        ]
    )


def _texts(line: Line) -> tuple[str, ...]:
    return (
        seconds(line.ttft_p50_s),
        _percent(line.change_p50),
        seconds(line.ttft_p95_s),
        _percent(line.change_p95),
        f"{100 * line.within_2s:.2f}",
        seconds(line.e2e_p50_s),
        _percent(line.change_e2e_p50),
        f"{line.hit_ratio:.3f}",
        " / ".join(f"{share:.2f}" for share in line.share.values()),
        str(line.lost),
        str(line.residency_violations),
    )


def _percent(change: Span) -> str:
    return spanned(change, lambda share: f"{100 * share:+.1f}")


def _line(its: Sequence[Result], design: str, against: dict[int, Result]) -> Line:
    over, change = spans_of(its, against)
    return Line(
        design=design,
        ttft_p50_s=over(lambda result: result.ttft_s.p50),
        ttft_p95_s=over(lambda result: result.ttft_s.p95),
        change_p50=change(lambda result: result.ttft_s.p50),
        change_p95=change(lambda result: result.ttft_s.p95),
        within_2s=fmean([result.ttft_within_2s for result in its]),
        e2e_p50_s=over(lambda result: result.e2e_s.p50),
        change_e2e_p50=change(lambda result: result.e2e_s.p50),
        hit_ratio=fmean([result.hit_ratio for result in its]),
        share={name: fmean([result.share[name] for result in its]) for name in its[0].share},
        lost=sum(result.rejected + result.unfinished for result in its),
        residency_violations=sum(result.residency_violations for result in its),
    )


def _cell(options: SitesOptions) -> Cell:
    return Cell(result=run_sites(options, cpu_s=process_time).result)


def _file_name(options: SitesOptions) -> str:
    """Readable in front, then what tells it from all others; a profile in a file may change under its name."""
    profile = load_profile(options.profile)
    return named_by(f"sites.{options.design}", options.seed, msgspec.json.encode(options), msgspec.json.encode(profile))
