"""Report: a comparison of designs as a page."""

from collections.abc import Sequence
from html import escape

from tokenfleet.sim.mixed.compare import Cell
from tokenfleet.sim.mixed.compare_words import CAPTION, HEADINGS, about, texts
from tokenfleet.sim.mixed.compared import Compared
from tokenfleet.sim.page import page, table_of


def report(of: Compared, cells: Sequence[Cell]) -> str:
    """The page: the table, then what happened over time."""
    from tokenfleet.sim.mixed.pictures import drawn  # matplotlib is an extra: only what draws needs it

    rows = [((line.design, *texts(line)), "own" if line.design == "slomax" else "") for line in of.lines]
    sections = [
        ABOUT,
        f'<p class="about">{escape(about(of))}.</p>',
        table_of(("design", *HEADINGS), rows),
        *(f"<h3>{escape(heading)}</h3>\n{picture}" for heading, picture in drawn(cells).items()),
    ]
    return page("Mixed classes: designs compared", sections)


ABOUT = f"""<p class="about">Each design serves the same chat, long-context and batch requests on simulated engines in
virtual time. {escape(CAPTION)} A refused or unfinished request has missed its service level.</p>"""
