"""Pictures: mixed runs of one load drawn as SVG texts, by matplotlib (the extra `report`)."""

from collections.abc import Callable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tokenfleet.core.policy import REQUIRED_CLASSES
from tokenfleet.sim.drawing import OWN, STYLE, WIDTH, svg
from tokenfleet.sim.mixed.compare import Cell
from tokenfleet.sim.mixed.service_levels import WINDOW_S
from tokenfleet.sim.mixed.timeline import Timeline

DESIGN_COLOURS = {"slomax": OWN, "least_requests": "#6d597a", "priority": "#e63946", "pools": "#4f9d2f"}
OTHER = "#f2a65a"
CLASS_COLOURS = dict(zip(REQUIRED_CLASSES, ("#0b3d91", "#e07a5f", "#b5bfc9"), strict=True))
Column = Mapping[str, Sequence[float | None]]


def attained(cells: Sequence[Cell]) -> str:
    """The share of each window's arrivals that met their service level, a part a class."""
    return _by_class(cells, lambda timeline: timeline.attained, period_s=WINDOW_S, label="met", share=True)


def goodput(cells: Sequence[Cell]) -> str:
    """Goodput tokens a second, a part a class."""
    return _by_class(cells, lambda timeline: timeline.goodput_tokens_per_s, period_s=WINDOW_S, label="tokens/s")


def held(cells: Sequence[Cell]) -> str:
    """Requests that wait in their gateways, a part a class."""
    return _by_class(cells, lambda timeline: timeline.held, period_s=1.0, label="held")


def running(cells: Sequence[Cell]) -> str:
    """Requests in the engines and their queues, a part a class."""
    return _by_class(cells, lambda timeline: timeline.running, period_s=1.0, label="in engines")


def shares(cells: Sequence[Cell]) -> str:
    """Prefill work that goes out, in instances kept busy by it, stacked by class; a part a design."""
    figure = Figure(figsize=(WIDTH, 1.5 * len(cells) + 0.6), layout="constrained")
    parts = _parts(figure, len(cells))
    for axes, cell in zip(parts, cells, strict=True):
        columns = [cell.timeline.prefill_share[name] for name in REQUIRED_CLASSES]
        middles = [(place + 0.5) * WINDOW_S for place in range(len(columns[0]))]
        colours = [CLASS_COLOURS[name] for name in REQUIRED_CLASSES]
        axes.stackplot(middles, *columns, labels=REQUIRED_CLASSES, colors=colours)
        axes.set_ylabel(cell.design)
        axes.set_ylim(0.0, float(cell.result.instances))
    parts[-1].set_xlabel(_seconds(cells))
    return svg(figure, parts[0])


def waste(cells: Sequence[Cell]) -> str:
    """Tokens a second of requests that missed their service level, all classes."""
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    (axes,) = _parts(figure, 1)
    for cell in cells:
        columns = cell.timeline.waste_tokens_per_s.values()
        _draw(axes, cell.design, [sum(values) for values in zip(*columns, strict=True)], WINDOW_S)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(0.0)
    axes.set_xlabel(_seconds(cells))
    return svg(figure, axes)


def drawn(cells: Sequence[Cell]) -> dict[str, str]:
    """All pictures of one load, of its least seed, heading to SVG."""
    first = [cell for cell in cells if cell.seed == min(cell.seed for cell in cells)]
    with rc_context(STYLE):
        return {
            "Service level met, by arrival": attained(first),
            "Goodput": goodput(first),
            "Waste": waste(first),
            "Queues in the gateways": held(first),
            "In the engines": running(first),
            "Shares: prefill work by class, in instances": shares(first),
        }


def _by_class(
    cells: Sequence[Cell],
    column: Callable[[Timeline], Column],
    *,
    period_s: float,
    label: str,
    share: bool = False,
) -> str:
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    parts = _parts(figure, len(REQUIRED_CLASSES))
    for axes, name in zip(parts, REQUIRED_CLASSES, strict=True):
        for cell in cells:
            _draw(axes, cell.design, column(cell.timeline)[name], period_s)
        axes.set_ylabel(f"{name}: {label}")
        if share:
            axes.set_ylim(0.0, 1.02)
        else:
            axes.set_ylim(0.0)
    parts[-1].set_xlabel(_seconds(cells))
    return svg(figure, parts[0])


def _draw(axes: Axes, design: str, values: Sequence[float | None], period_s: float) -> None:
    known = [((place + 0.5) * period_s, value) for place, value in enumerate(values) if value is not None]
    own = design == "slomax"
    axes.plot(
        [at_s for at_s, _ in known],
        [value for _, value in known],
        label=design,
        color=DESIGN_COLOURS.get(design, OTHER),
        linewidth=1.8 if own else 1.1,
        zorder=3.0 if own else 2.0,
    )


def _parts(figure: Figure, rows: int) -> list[Axes]:
    """One above the other, over the same time."""
    return [axes for (axes,) in figure.subplots(rows, 1, sharex=True, squeeze=False)]


def _seconds(cells: Sequence[Cell]) -> str:
    return f"seconds (seed {cells[0].seed})"
