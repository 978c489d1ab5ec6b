"""Report: a comparison of routing policies as a page."""

from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType

from tokenfleet.sim.compare import BOUNDS, Cell
from tokenfleet.sim.compare_words import CAPTION, HEADINGS, about, texts
from tokenfleet.sim.compared import Compared
from tokenfleet.sim.page import page, table_of
from tokenfleet.sim.tuned import Tried

Grids = Mapping[str, Mapping[str, Sequence[Tried]]]  # scenario → policy → points, the best first


def report(tables: Sequence[Compared], cells: Sequence[Cell], grids: Grids = MappingProxyType({})) -> str:
    """The page: a section for each scenario, its table, how peers were tuned, its pictures."""
    sections = [_section(table, [c for c in cells if c.scenario == table.scenario], grids) for table in tables]
    names = ", ".join(table.scenario for table in tables)
    return page(f"Routing compared: {names}", [ABOUT, *sections])


ABOUT = f"""<p class="about">Each policy serves the same requests on simulated engines in virtual time.
{escape(CAPTION)} TTFT is the time from arrival to the first token, TPOT the mean time of a further
token, hits the share of prompt tokens that the engines found cached. Requests that were rejected or never finished
count as infinitely late.</p>"""


def _section(table: Compared, cells: Sequence[Cell], grids: Grids) -> str:
    from tokenfleet.sim.pictures import drawn  # matplotlib is an extra: only what draws needs it

    parts = [
        f"<h2>{escape(table.scenario)}</h2>",
        f'<p class="about">{escape(about(table).capitalize())}</p>',
        _table(table),
    ]
    parts += [_grid(grids[table.scenario])] if table.scenario in grids else []
    parts += [f"<h3>{escape(heading)}</h3>\n{svg}" for heading, svg in drawn(cells).items()]
    return "\n".join(parts)


def _table(table: Compared) -> str:
    rows = [
        ((line.policy, *texts(line)), "bound" if line.policy in BOUNDS else _own(line.policy)) for line in table.lines
    ]
    return table_of(("policy", *HEADINGS), rows)


def _grid(tried: Mapping[str, Sequence[Tried]]) -> str:
    """Which settings won for each peer, of how many."""
    rows = [
        ((policy, points[0].policy, str(len(points)), f"{points[0].ttft_p50_s:.3f}", f"{points[0].ttft_p95_s:.2f}"), "")
        for policy, points in tried.items()
    ]
    return table_of(("tuned", "won", "points tried", "TTFT p50 s", "p95 s"), rows)


def _own(policy: str) -> str:
    return "own" if policy.startswith("tokenpilot") else ""
