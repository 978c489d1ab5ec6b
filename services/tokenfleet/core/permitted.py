"""Permitted: the values that a field takes which msgspec found a wrong one in; its own words name only the place."""

import re
from typing import Any

from msgspec import inspect

_WRONG = re.compile(r"Invalid enum value .* - at `\$\.(?P<path>[^`]+)`")


def permitted_words(problem: str, kind: type[Any]) -> str:
    """Such as "; there is: cost, random", for msgspec's `problem` with a value of `kind`; empty for another problem."""
    if (found := _WRONG.fullmatch(problem)) is None:
        return ""
    at: inspect.Type = inspect.type_info(kind)
    for part in found["path"].replace("[...]", ".[...]").split("."):
        at = _within(at, part)
    return f"; there is: {', '.join(map(repr, at.values))}" if isinstance(at, inspect.LiteralType) else ""


def _within(at: inspect.Type, part: str) -> inspect.Type:
    """The type of a field, or of the values that a table or list holds."""
    match at:
        case inspect.StructType():
            return next((field.type for field in at.fields if field.encode_name == part), at)
        case inspect.DictType():
            return at.value_type
        case inspect.VarTupleType():
            return at.item_type
        case _:
            return at
