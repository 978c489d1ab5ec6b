"""Rows: the sums of every window, and which of them have changed since they were last published.

A row stays in memory while a living request counts in it or late events may reach it, so that retractions find what
they take back. After a restart rows that began before the replay are frozen as they were published.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from tokenfleet.core.accounts import GoodputRow
from tokenfleet.core.goodput.request import Posting


class RowKey(NamedTuple):
    """One window of one (class, tenant, pool)."""

    width_s: float
    start_s: float
    request_class: str
    tenant: str
    pool: str


class _Row:
    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        self.postings = 0  # of living requests


class Rows:
    """Sums of one outcomes partition. `published` are rows of an earlier life, the newest version of each.

    Windows that begin before `from_s` belong to that earlier life and are left as they are.
    """

    def __init__(
        self, widths_s: Iterable[float], *, published: Iterable[GoodputRow] = (), from_s: float = -math.inf
    ) -> None:
        self._widths_s = tuple(widths_s)
        self._rows: dict[RowKey, _Row] = {}
        self._published = {key_of(row): row for row in published}
        self._changed: set[RowKey] = set()
        self._from_s = from_s
        self._closed_s = -math.inf

    def post(self, postings: Iterable[Posting]) -> None:
        for posting in postings:
            for key in self._keys(posting):
                row = self._rows.get(key)
                if row is None:
                    if key.start_s < self._from_s or key.start_s + key.width_s <= self._closed_s:
                        continue
                    row = self._rows[key] = _Row()
                row.postings += 1
                self._add(key, row, posting, 1)

    def retract(self, postings: Iterable[Posting]) -> None:
        """Take back what `post` posted."""
        for posting in postings:
            for key in self._keys(posting):
                if (row := self._rows.get(key)) is not None:
                    row.postings -= 1
                    self._add(key, row, posting, -1)

    def release(self, postings: Iterable[Posting]) -> None:
        """The request of these postings is forgotten: they stand for good."""
        for posting in postings:
            for key in self._keys(posting):
                if (row := self._rows.get(key)) is not None:
                    row.postings -= 1

    def changed(self, at_most: int) -> tuple[GoodputRow, ...]:
        """Rows that differ from what was published, each under its next version; they count as published now."""
        rows: list[GoodputRow] = []
        while self._changed and len(rows) < at_most:
            key = self._changed.pop()
            last = self._published.get(key)
            row = _published_row(key, self._rows[key].sums, version=1 if last is None else last.version + 1)
            if last is None or _sums_differ(row, last):
                self._published[key] = row
                rows.append(row)
        return tuple(rows)

    def close(self, watermark_s: float, *, lateness_s: float) -> None:
        """Forget rows that no living request counts in and no event can reach any more."""
        self._closed_s = max(self._closed_s, watermark_s - lateness_s)
        for key in [key for key, row in self._rows.items() if row.postings == 0 and self._is_past(key)]:
            if key not in self._changed:
                del self._rows[key]
        for key in [key for key in self._published if key not in self._rows and self._is_past(key)]:
            del self._published[key]

    def _is_past(self, key: RowKey) -> bool:
        return key.start_s + key.width_s <= self._closed_s

    def _add(self, key: RowKey, row: _Row, posting: Posting, sign: int) -> None:
        for column, count in posting.counts:
            row.sums[column] = row.sums.get(column, 0) + sign * count
        self._changed.add(key)

    def _keys(self, posting: Posting) -> Iterable[RowKey]:
        for width_s in self._widths_s:
            start_s = posting.at_s // width_s * width_s
            yield RowKey(width_s, start_s, posting.request_class, posting.tenant, posting.pool)


def key_of(row: GoodputRow) -> RowKey:
    return RowKey(row.width_s, row.start_s, row.request_class, row.tenant, row.pool)


def _published_row(key: RowKey, sums: dict[str, int], *, version: int) -> GoodputRow:
    return GoodputRow(
        width_s=key.width_s,
        start_s=key.start_s,
        request_class=key.request_class,
        tenant=key.tenant,
        pool=key.pool,
        version=version,
        **sums,  # type: ignore[arg-type]  # columns of GoodputRow, all counts
    )


SUMMED = tuple(GoodputRow.__struct_fields__[GoodputRow.__struct_fields__.index("goodput_tokens") :])


def _sums_differ(row: GoodputRow, other: GoodputRow) -> bool:
    return any(getattr(row, column) != getattr(other, column) for column in SUMMED)
