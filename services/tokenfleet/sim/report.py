"""Report: a comparison as one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import MappingProxyType

from tokenfleet.core.errors import SetupError
from tokenfleet.sim.compare import BOUNDS, Cell
from tokenfleet.sim.compare_words import CAPTION, HEADINGS, about, texts
from tokenfleet.sim.compared import Compared
from tokenfleet.sim.tuned import Tried

Grids = Mapping[str, Mapping[str, Sequence[Tried]]]  # scenario → policy → points, the best first


def check_report(path: Path) -> None:
    """Nothing, when pictures can be drawn and the file's folder is there.

    Raises SetupError with the remedy, before hours are spent.
    """
    if find_spec("matplotlib") is None:
        raise SetupError(
            "--html draws with matplotlib, which is not installed: install tokenfleet[report], or leave --html out"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise SetupError(f"--html {path}: name a file in a folder that exists")


def write_report(
    path: Path, tables: Sequence[Compared], cells: Sequence[Cell], grids: Grids = MappingProxyType({})
) -> None:
    """Write the file. Raises SetupError if it can't be written."""
    text = report(tables, cells, grids)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"--html {path}: {error.strerror or error}; name a file in a folder that exists") from error


def report(tables: Sequence[Compared], cells: Sequence[Cell], grids: Grids = MappingProxyType({})) -> str:
    """The page: a section for each scenario, its table, how peers were tuned, its pictures."""
    template = Template((files("tokenfleet.sim") / "report.html").read_text(encoding="utf-8"))
    sections = [_section(table, [c for c in cells if c.scenario == table.scenario], grids) for table in tables]
    names = ", ".join(table.scenario for table in tables)
    return template.substitute(title=escape(f"Routing compared: {names}"), body="\n".join([ABOUT, *sections]))


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
        _row((line.policy, *texts(line)), kind="bound" if line.policy in BOUNDS else _own(line.policy))
        for line in table.lines
    ]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in ("policy", *HEADINGS))
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n' + "\n".join(rows) + "\n</table></div>"


def _grid(tried: Mapping[str, Sequence[Tried]]) -> str:
    """Which settings won for each peer, of how many."""
    rows = [
        _row((policy, points[0].policy, str(len(points)), f"{points[0].ttft_p50_s:.3f}", f"{points[0].ttft_p95_s:.2f}"))
        for policy, points in tried.items()
    ]
    head = "".join(f"<th>{name}</th>" for name in ("tuned", "won", "points tried", "TTFT p50 s", "p95 s"))
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n' + "\n".join(rows) + "\n</table></div>"


def _row(values: Sequence[str], *, kind: str = "") -> str:
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>"


def _own(policy: str) -> str:
    return "own" if policy.startswith("tokenpilot") else ""
