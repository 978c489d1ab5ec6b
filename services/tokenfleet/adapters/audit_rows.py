"""Audit rows: decisions, outcomes, goodput, policy revisions and changes of shares as rows of their tables."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.adapters.postgres import Row
from tokenfleet.adapters.safe_text import day_of, safe, safe_json, safe_key, safe_moment
from tokenfleet.core.accounts import GoodputPartial, GoodputRow
from tokenfleet.core.records import DecisionEnvelope, OutcomeEnvelope
from tokenfleet.core.revisions import PolicyRecord, PolicyRevision


class Table(NamedTuple):
    """A table of migrations/ and the columns that its rows fill, in their order."""

    name: str
    columns: tuple[str, ...]


class Item(NamedTuple):
    """One row, and the item of which record it is."""

    row: Row
    topic: str
    partition: int
    offset: int
    number: int


DECISION_ROWS = Table(
    "decisions",
    (
        *("day", "id", "request", "attempt", "tenant", "model", "request_class", "verdict", "reason", "mode"),
        *("origin", "site", "pool", "target", "replica", "policy_revision", "at", "body"),
    ),
)
OUTCOME_ROWS = Table(
    "outcomes",
    (
        *("day", "request", "attempt", "kind", "at_origin", "decision", "tenant", "model", "request_class", "origin"),
        *("site", "pool", "instance", "replica", "output_tokens", "at", "body"),
    ),
)
_SUMS = tuple(GoodputRow.__struct_fields__[GoodputRow.__struct_fields__.index("goodput_tokens") :])
GOODPUT_KEY = ("width_s", "start_s", "request_class", "tenant", "pool", "cluster", "site", "partition")
GOODPUT_ROWS = Table("goodput", (*GOODPUT_KEY, "version", *_SUMS))
REVISION_ROWS = Table(
    "policy_revisions",
    (
        *("revision", "canary", "sha256", "published_by", "reason"),
        *("canary_share", "canary_for_s", "at", "toml"),
    ),
)
SHARE_ROWS = Table("share_changes", ("revision", "sha256", "pool", "kind", "before", "after", "why", "window_end"))


def decision_items(records: Sequence[Record[DecisionEnvelope]]) -> list[Item]:
    """One row a decision. `at_wall_s` is written once, with the id, so equal ids have equal days."""
    items: list[Item] = []
    for record in records:
        for number, decision in enumerate(record.message.decisions):
            row = (
                day_of(decision.at_wall_s),
                safe_key(decision.id),
                safe_key(decision.request),
                decision.attempt,
                safe_key(decision.tenant),
                safe(decision.model),
                safe(decision.request_class),
                decision.verdict,
                decision.reason,
                decision.mode,
                safe(decision.origin),
                safe(decision.site),
                safe(decision.pool),
                safe(decision.target),
                safe(decision.replica or record.message.replica),
                decision.policy_revision,
                safe_moment(decision.at_wall_s),
                safe_json(decision),
            )
            items.append(_item(record, number, row))
    return items


def outcome_items(records: Sequence[Record[OutcomeEnvelope]]) -> list[Item]:
    """One row an event."""
    items: list[Item] = []
    for record in records:
        for number, event in enumerate(record.message.events):
            row = (
                day_of(event.at_wall_s),
                safe_key(event.request),
                event.attempt,
                event.kind,
                record.message.site == event.origin,
                safe(event.decision),
                safe_key(event.tenant),
                safe(event.model),
                safe(event.request_class),
                safe(event.origin),
                safe(event.site),
                safe(event.pool),
                safe(event.instance),
                safe(record.message.replica),
                event.output_tokens,
                safe_moment(event.at_wall_s),
                safe_json(event),
            )
            items.append(_item(record, number, row))
    return items


def goodput_items(records: Sequence[Record[GoodputPartial]]) -> list[Item]:
    """One row a partial sum."""
    items: list[Item] = []
    for record in records:
        partial = record.message
        for number, row in enumerate(partial.rows):
            key = (
                row.width_s,
                row.start_s,
                *(safe_key(row.request_class), safe_key(row.tenant), safe_key(row.pool)),
                *(safe_key(partial.cluster), safe_key(partial.site), partial.partition),
            )
            items.append(_item(record, number, (*key, row.version, *(getattr(row, name) for name in _SUMS))))
    return items


def revision_items(records: Sequence[Record[PolicyRecord]]) -> list[Item]:
    """One row a published file; a judge's reports are none, what they come to is told by the revision that follows."""
    items: list[Item] = []
    for record in records:
        revision = record.message
        if isinstance(revision, PolicyRevision):
            row = (
                revision.revision,
                revision.is_canary,
                safe_key(revision.sha256),
                safe(revision.by),
                safe(revision.reason),
                revision.canary_share,
                revision.canary_for_s,
                safe_moment(revision.at_wall_s),
                safe(revision.toml),
            )
            items.append(_item(record, 0, row))
    return items


def share_items(records: Sequence[Record[PolicyRecord]]) -> list[Item]:
    """One row a pool whose shares or ceiling a revision of the controller changed."""
    items: list[Item] = []
    for record in records:
        revision = record.message
        if not isinstance(revision, PolicyRevision):
            continue
        for number, change in enumerate(revision.shares):
            row = (
                revision.revision,
                safe_key(revision.sha256),
                safe_key(change.pool),
                change.kind,
                safe_json(change.old),
                safe_json(change.new),
                safe(change.why),
                safe_moment(change.at_s),
            )
            items.append(_item(record, number, row))
    return items


def _item(record: Record[Struct], number: int, row: Row) -> Item:
    return Item(row, record.topic.at(record.site), record.partition, record.offset, number)
