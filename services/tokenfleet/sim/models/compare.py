"""Compare: slots that follow demand beside every static split, seed by seed; a cell is one design on one seed."""

from collections.abc import Iterable, Sequence
from math import fsum
from pathlib import Path
from time import process_time

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.sim.compare_words import marked
from tokenfleet.sim.models.measure import ALL, Result
from tokenfleet.sim.models.run import FOLLOWING, STATIC, ModelsOptions, name_of, run_models
from tokenfleet.sim.models.workload import MODELS
from tokenfleet.sim.profiles import load_profile
from tokenfleet.sim.runs import Runs, named_by


class Cell(Struct, frozen=True, kw_only=True):
    """What is kept of one run."""

    result: Result

    @property
    def design(self) -> str:
        return name_of(self.result.design, self.result.split, self.result.instances)

    @property
    def label(self) -> str:
        return f"{self.design}, seed {self.result.seed}"


class Line(Struct, frozen=True, kw_only=True):
    """One design: attainment of offered by seed, and by model as the mean over seeds; goodput in tokens a second.

    `better` marks the static split with the best attainment over all seeds.
    """

    design: str
    better: bool
    attained: dict[int, float]
    attained_by_model: dict[str, float]
    goodput: float
    moves: float
    reversals_a_minute: float


class Compared(Struct, frozen=True, kw_only=True):
    """One demand and load. `gain` is, by seed, the attainment of following less that of the static split that is best
    on that seed."""

    instances: int
    load: float
    demand: str
    seeds: tuple[int, ...]
    lines: tuple[Line, ...]
    gain: dict[int, float]


def designs(base: ModelsOptions, splits: Sequence[int], seeds: Sequence[int]) -> list[ModelsOptions]:
    """Following from an even split, and static at each of the splits, on each seed."""
    every = [replace(base, design=FOLLOWING, split=None)]
    every += [replace(base, design=STATIC, split=split) for split in splits]
    return [replace(options, seed=seed) for options in every for seed in seeds]


def model_runs(folder: Path | None) -> Runs[ModelsOptions, Cell]:
    """Raises SetupError if the folder can't be made."""
    return Runs(folder, kind=Cell, make=_cell, name=_file_name)


def compared(cells: Sequence[Cell]) -> Compared:
    """The table, designs in the order of their first cell."""
    first = cells[0].result
    names = list(dict.fromkeys(cell.design for cell in cells))
    by_name = {name: {c.result.seed: c.result for c in cells if c.design == name} for name in names}
    attained = {name: {seed: _attained(r, ALL) for seed, r in its.items()} for name, its in by_name.items()}
    static = [name for name in names if name != FOLLOWING]
    better = max(static, key=lambda name: fsum(attained[name].values()), default="")
    lines = [_line(name, by_name[name], attained[name], better=name == better) for name in names]
    return Compared(
        instances=first.instances,
        load=first.load,
        demand=first.demand,
        seeds=tuple(sorted(attained[names[0]])),
        lines=tuple(lines),
        gain={
            seed: own - max(attained[name][seed] for name in static)
            for seed, own in attained.get(FOLLOWING, {}).items()
            if static
        },
    )


def table_of(of: Compared) -> str:
    """The comparison as a table for a terminal or a document."""
    seeds = [f"seed {seed}" for seed in of.seeds]
    headings = ("design", "met %", *seeds, *MODELS, "goodput", "moves", "reversals a minute")
    rows = [
        (
            f"{line.design} (the better one)" if line.better else line.design,
            f"{100 * _mean(line.attained.values()):.2f}",
            *(f"{100 * line.attained[seed]:.2f}" for seed in of.seeds),
            *(f"{100 * line.attained_by_model[model]:.2f}" for model in MODELS),
            f"{line.goodput:,.0f}",
            f"{line.moves:.1f}",
            f"{line.reversals_a_minute:.2f}",
        )
        for line in of.lines
    ]
    gains = ", ".join(f"{100 * gain:+.2f}" for gain in of.gain.values())
    which = f"{'seeds' if len(of.seeds) > 1 else 'seed'} {', '.join(map(str, of.seeds))}"
    about = f"N = {of.instances}, load {of.load:g}, demand {of.demand}: {which}."
    told = f"Following less the best static split of each seed, in points: {gains}." if gains else ""
    lines = [about, "", marked(headings), "|---|" + "--:|" * (len(headings) - 1), *map(marked, rows)]
    return "\n".join([*lines, *(["", told] if told else [])])


def _cell(options: ModelsOptions) -> Cell:
    return Cell(result=run_models(options, cpu_s=process_time).result)


def _file_name(options: ModelsOptions) -> str:
    """Readable in front, then what tells it from all others; a profile in a file may change under its name."""
    profile = load_profile(options.profile)
    name = name_of(options.design, options.slots_of_first, options.instances).replace("/", "-")
    return named_by(f"models.{name}", options.seed, msgspec.json.encode(options), msgspec.json.encode(profile))


def _line(name: str, its: dict[int, Result], attained: dict[int, float], *, better: bool) -> Line:
    results = list(its.values())
    return Line(
        design=name,
        better=better,
        attained=attained,
        attained_by_model={model: _mean([_attained(result, model) for result in results]) for model in MODELS},
        goodput=_mean([result.goodput_tokens_per_s[ALL] for result in results]),
        moves=_mean([float(len(result.moves)) for result in results]),
        reversals_a_minute=_mean([result.reversals / (result.window_s / 60.0) for result in results]),
    )


def _attained(result: Result, name: str) -> float:
    return result.attainment_offered[name] or 0.0


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fsum(listed) / len(listed)
