"""Page: a report as one HTML file that needs nothing else."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from tempfile import TemporaryFile

from tokenfleet.core.errors import SetupError


def check_report(path: Path) -> None:
    """Nothing, when pictures can be drawn and the file can be written.

    Raises SetupError with the remedy, before hours are spent.
    """
    if find_spec("matplotlib") is None:
        raise SetupError(
            "--html draws with matplotlib, which is not installed: install tokenfleet[report], or leave --html out"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise SetupError(f"--html {path}: name a file in a folder that exists")
    try:
        with path.open("ab") if path.exists() else TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def write_report(path: Path, text: str) -> None:
    """Write the file. Raises SetupError if it can't be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> SetupError:
    return SetupError(f"--html {path}: {error.strerror or error}; name a file that can be written")


def page(title: str, sections: Sequence[str]) -> str:
    """One HTML page that needs nothing else."""
    template = Template((files("tokenfleet.sim") / "report.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body="\n".join(sections))


def table_of(headings: Sequence[str], rows: Iterable[tuple[Sequence[str], str]]) -> str:
    """A table as wide as it needs; each row with its kind: `own`, `bound` or none."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(_row(values, kind=kind) for values, kind in rows)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def _row(values: Sequence[str], *, kind: str) -> str:
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>"
