"""Checks: what a record's types can't say of it. A ValueError makes the record a dead letter where it is read."""


def check_keys(*packed: bytes) -> None:
    if any(len(keys) % 8 for keys in packed):
        raise ValueError("block keys are not whole u64s")


def check_part(part: int, parts: int, keys: bytes = b"") -> None:
    check_keys(keys)
    if part >= parts:
        raise ValueError("a part beyond the last")


def check_same(event: object, entry: object | None) -> None:
    """An event and the entry that it carries are about one placement."""
    for name in ("decision", "request", "attempt", "instance"):
        if getattr(event, name) != getattr(entry, name, None):
            raise ValueError("the entry is missing, or another decision's")
