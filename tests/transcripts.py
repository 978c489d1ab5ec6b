"""Transcripts: scenarios as text, a command, its input, four dashes and the answer, that read as stories.

    # a comment
    choose prompt=4096
    b-0 backlog_s=0.1
    ----
    b-0: first token in ...

A blank line ends an answer. TRANSCRIPTS_REWRITE=1 writes what the commands answer now into the file instead of
comparing; the change is then reviewed as a diff.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

DASHES = "----"


@dataclass(frozen=True, kw_only=True)
class Command:
    """`name` and `args` from the first line (key=value; a bare word has the value ""), `lines` the input below it."""

    name: str
    args: dict[str, str]
    lines: tuple[str, ...]


Commands = Mapping[str, Callable[[Command], str]]


def replay(path: Path, commands: Commands) -> None:
    """Run a transcript and compare each answer with the written one, or rewrite the file."""
    said = path.read_text()
    answered = answer(said, commands)
    if os.environ.get("TRANSCRIPTS_REWRITE"):
        path.write_text(answered)
    else:
        assert answered == said, f"{path.name}: answers differ; TRANSCRIPTS_REWRITE=1 writes them"


def answer(text: str, commands: Commands) -> str:
    """The transcript with the answers that `commands` give now. Comments and blank lines stay as they are."""
    out: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        out.append(line)
        if not line.strip() or line.startswith("#"):
            continue
        given: list[str] = []
        for below in lines:
            out.append(below)
            if below == DASHES:
                break
            given.append(below)
        else:
            raise ValueError(f"no {DASHES} after {line!r}")
        name, *words = line.split()
        command = Command(name=name, args=pairs(words), lines=tuple(given))
        out += [*commands[name](command).splitlines(), ""]
        for below in lines:  # the old answer
            if not below.strip():
                break
    return "\n".join(out).rstrip("\n") + "\n"


def pairs(words: list[str]) -> dict[str, str]:
    """key=value words as a dict."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}
