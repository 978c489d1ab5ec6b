"""Drawing: what all pictures of a report share; SVG texts by matplotlib (the extra `report`)."""

from io import StringIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = {
    "svg.fonttype": "none",  # text stays text: searchable, and a third of the size
    "svg.hashsalt": "tokenfleet",  # else ids are drawn anew each time
    "font.family": ["sans-serif"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#9aa5b1",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
}
OWN = "#0b3d91"  # this product's own rule
WIDTH = 9.4  # inches, as wide as the page


def sheet(*, width: float, height: float) -> tuple[Figure, Axes]:
    """One picture of so many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def svg(figure: Figure, legend_of: Axes | None) -> str:
    """The figure as an SVG element, with the legend of one of its parts beside it."""
    if legend_of is not None:
        figure.legend(*legend_of.get_legend_handles_labels(), loc="outside right upper", fontsize=8.0)
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
