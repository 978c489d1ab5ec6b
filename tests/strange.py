"""Strange: values of any record that its schema allows and no honest writer sends, for property tests."""

import math
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from tokenfleet.core.records import Entry, PlacementEvent

NAMES = st.sampled_from(["a", "b", "large-chat", "acme", "b-small-0", "x" * 256, "\x00", "\u202e", "fd00::10"])
FLOATS = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0, 1e308, -1e308, 5e-324, 1e18]) | st.floats()
KEYS = st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=4).map(b"".join)
PARTS = st.sampled_from([(0, 1), (0, 2), (1, 2), (0, 64), (63, 64)])
INTEGERS = (-(2**63), -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1)


def strange(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of the struct `kind`."""
    return _values(inspect.type_info(kind))


def _values(of: inspect.Type) -> st.SearchStrategy[Any]:
    match of:
        case inspect.StructType():
            return _structs(of)
        case inspect.UnionType():
            return st.one_of([_values(each) for each in of.types])
        case inspect.VarTupleType():
            return st.lists(_values(of.item_type), max_size=3).map(tuple)
        case inspect.DictType():
            return st.dictionaries(_values(of.key_type), _values(of.value_type), max_size=3)
        case inspect.LiteralType():
            return st.sampled_from(of.values)
        case inspect.IntType():
            low, high = -(2**63) if of.ge is None else of.ge, 2**63 if of.le is None else of.le
            return st.sampled_from([n for n in INTEGERS if low <= n <= high])
        case inspect.FloatType() if of.ge is not None:
            return st.floats(of.ge, of.le, allow_nan=False)
        case _:
            return SIMPLE[type(of)]


SIMPLE: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
    inspect.NoneType: st.none(),
    inspect.BoolType: st.booleans(),
    inspect.StrType: NAMES,
    inspect.BytesType: KEYS,
    inspect.FloatType: FLOATS,
}


def _structs(of: inspect.StructType) -> st.SearchStrategy[Any]:
    if of.cls is PlacementEvent:
        return st.builds(_placement, st.sampled_from(["placed", "first_token", "progress", "ended"]), strange(Entry))
    fields = {field.name: _values(field.type) for field in of.fields}
    if "parts" not in fields:
        return st.builds(of.cls, **fields)
    del fields["part"], fields["parts"]
    return st.builds(
        lambda part, rest: of.cls(part=part[0], parts=part[1], **rest), PARTS, st.fixed_dictionaries(fields)
    )


def _placement(kind: Any, of: Entry) -> PlacementEvent:
    return PlacementEvent(
        kind=kind, decision=of.decision, request=of.request, attempt=of.attempt, instance=of.instance, entry=of
    )
