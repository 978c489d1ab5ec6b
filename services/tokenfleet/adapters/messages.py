"""Messages: the gRPC messages and the core's values, each way; the rim where a caller's fields are checked.

Everything a caller sends is checked here once, before any work: sizes, ranges, numbers that aren't numbers. Each
problem is a BadRequestError that names the field.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

from google.protobuf.message import Message
from msgspec import Struct
from msgspec.structs import asdict

from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.identity import ANYONE, Caller
from tokenfleet.core.records import OutcomeEvent, OutcomeKind
from tokenfleet.core.site import pool_name
from tokenfleet.core.tokenpilot.whatif import Added, Changes
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, scheduler_pb2

NAME_MAX_BYTES: Final = 256  # after NFC, in UTF-8
NAME_RAW_MAX_CHARS: Final = 4 * NAME_MAX_BYTES  # longer ones are refused unread; NFC never shortens a text so far
BIDI_CONTROLS: Final = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
SECONDS_MAX: Final = 1e9  # 31 years: longer is a fault, and sums of it are no numbers soon
WALL_MAX_S: Final = 2.5e11  # in the year 9892
STAMP_OFF_MAX_S: Final = 5.0  # of a stamp on no named clock: a report may have waited so long, else a clock is wrong
BLOCK_KEYS_MAX: Final = 16_384  # a prompt of 4 M tokens at 256 a block
TOKENS_MAX: Final = 2**31 - 1
ATTEMPT_MAX: Final = 1_000
SITES_TRIED_MAX: Final = 64
INSTANCES_NAMED_MAX: Final = 10_000
NUMBERS_NAMED_MAX: Final = 100
ENUM_PREFIXES: Final = {"verdict": "VERDICT_", "reason": "REASON_", "mode": "MODE_", "kind": "OUTCOME_KIND_"}
Kind = Any  # a protobuf message descriptor, whose type the backends don't share
REPORTED_KINDS: Final[dict[int, OutcomeKind]] = {
    number: cast(OutcomeKind, name.removeprefix("OUTCOME_KIND_").lower())
    for name, number in outcomes_pb2.OutcomeKind.items()
    if number not in (outcomes_pb2.OUTCOME_KIND_UNSPECIFIED, outcomes_pb2.OUTCOME_KIND_REJECTED)
}


def request_from_wire(
    message: decision_pb2.Request, *, site: str, dry_run: bool = False, caller: Caller = ANYONE
) -> Request:
    """The request that `message` asks about; `site` is the site asked, its origin when the message names none, and
    `caller` says whose it may be.

    Raises BadRequestError for a field that can't be used. A `max_tokens` beyond TOKENS_MAX is read as TOKENS_MAX.
    """
    keys = message.block_keys
    prompt_tokens = _tokens("prompt_tokens", message.prompt_tokens)
    return Request(
        id=_name("id", message.id),
        attempt=_at_most("attempt", message.attempt, ATTEMPT_MAX),
        model=_name("model", message.model),
        tenant=tenant_from_wire(message.tenant, caller),
        origin=_text("origin", message.origin) or site,
        prompt_tokens=prompt_tokens,
        max_tokens=_budget(message.max_tokens) if message.HasField("max_tokens") else 0,
        block_keys=_block_keys(keys, message.block_tokens, prompt_tokens),
        block_tokens=message.block_tokens if keys else 0,
        stream=message.stream,
        task=_text("task", message.task),
        declared_class=_text("declared_class", message.declared_class),
        deadline_s=_positive("deadline_s", message.deadline_s) if message.HasField("deadline_s") else None,
        session=_text("session", message.session),
        adapter=_text("adapter", message.adapter),
        data_class=_text("data_class", message.data_class),
        cross_site=not message.local_only,
        hop=_at_most("hop", message.hop, 1),
        lease=_text("lease", message.lease),
        sites_tried=_names("sites_tried", message.sites_tried, most=SITES_TRIED_MAX),
        elapsed_s=_not_negative("elapsed_s", message.elapsed_s),
        upload_bytes=_upload(message.upload_bytes),
        wait_max_s=_not_negative("wait_max_s", message.wait_max_s),
        dry_run=dry_run,
        idempotency_key=_text("idempotency_key", message.idempotency_key),
        body_hash=message.body_hash,
        ticket=_text("ticket", message.ticket),
    )


def outcome_from_wire(
    message: outcomes_pb2.OutcomeEvent, *, site: str, received_wall_s: float, caller: Caller = ANYONE
) -> OutcomeEvent:
    """The event that `message` reports. Raises BadRequestError for a field that can't be used."""
    if (kind := REPORTED_KINDS.get(message.kind)) is None:
        raise BadRequestError("kind", f"not one of {', '.join(REPORTED_KINDS.values())}")
    model = _name("model", message.model)
    ran_at = _text("site", message.site) or site
    instance = _text("instance", message.instance)
    return OutcomeEvent(
        request=_name("request", message.request),
        attempt=_at_most("attempt", message.attempt, ATTEMPT_MAX),
        kind=kind,
        decision=_text("decision", message.decision),
        tenant=tenant_from_wire(message.tenant, caller),
        request_class=_name("request_class", message.request_class),
        model=model,
        origin=_text("origin", message.origin) or site,
        site=ran_at,
        instance=instance,
        pool=pool_name(model, ran_at) if instance else "",
        at_wall_s=_stamp(message, received_wall_s),
        elapsed_s=_not_negative("elapsed_s", message.elapsed_s),
        attempt_s=_not_negative("attempt_s", message.attempt_s),
        ttft_s=_optional_seconds(message, "ttft_s"),
        tpot_s=_optional_seconds(message, "tpot_s"),
        prompt_tokens=_optional_tokens(message, "prompt_tokens"),
        cached_tokens=_optional_tokens(message, "cached_tokens"),
        output_tokens=_optional_tokens(message, "output_tokens"),
        stop=_text("stop", message.stop),
        clock=_text("clock", message.clock),
        clock_s=_optional_seconds(message, "clock_s") if message.clock else None,
    )


def tenant_from_wire(named: str, caller: Caller) -> str:
    """The tenant that `caller` speaks for. Raises BadRequestError for another's and for none."""
    return _name("tenant", caller.tenant(_text("tenant", named)))


def _stamp(message: outcomes_pb2.OutcomeEvent, received_wall_s: float) -> float:
    """The reporter's wall time where it says something: on a clock that it names, whose offset then shows in the log
    (goodput.event_time), or near the time of receipt."""
    at_wall_s = message.at_wall_s
    if not 0 < at_wall_s <= WALL_MAX_S:
        return received_wall_s
    return at_wall_s if message.clock or abs(at_wall_s - received_wall_s) <= STAMP_OFF_MAX_S else received_wall_s


def changes_from_wire(message: scheduler_pb2.Changes) -> Changes:
    """What would be otherwise. Raises BadRequestError for a field that can't be used."""
    added = [Added(like=_name("added", each.like), count=each.count or 1) for each in message.added]
    return Changes(
        weights=_numbers("weights", message.weights),
        drained=_names("drained", message.drained, most=INSTANCES_NAMED_MAX),
        removed=_names("removed", message.removed, most=INSTANCES_NAMED_MAX),
        added=tuple(added),
        calibration=_numbers("calibration", message.calibration),
    )


def decision_to_wire(decision: Decision) -> decision_pb2.Decision:
    """The reply that carries `decision`."""
    return decision_pb2.Decision(**wire_fields(decision, decision_pb2.Decision.DESCRIPTOR))


def to_wire(value: Struct, message: Message) -> Message:
    """Copies the fields of `value` into the fields of the same name of `message`, as `wire_fields` has them."""
    message.MergeFrom(type(message)(**wire_fields(value, message.DESCRIPTOR)))
    return message


def wire_fields(value: Struct, kind: Kind) -> dict[str, Any]:
    """What a message of `kind` that carries `value` is made of: its fields by name, at once, since setting them one by
    one takes five times as long.

    None stays absent. Nested structs, tuples and maps follow. Fields that the message lacks are left out.
    """
    fields = asdict(value)
    plan = _plan(type(value), kind)
    for name in plan.unknown:
        del fields[name]
    for name in plan.enums:
        if text := fields[name]:
            fields[name] = ENUM_PREFIXES[name] + text.upper()
        else:
            del fields[name]
    for name, child in plan.messages:
        if isinstance(field := fields[name], tuple):
            fields[name] = [wire_fields(each, child) for each in cast(tuple[Struct, ...], field)]
        elif field is not None:
            fields[name] = wire_fields(field, child)
    return fields


class _Plan(Struct, frozen=True):
    """Which fields of a struct its message lacks, has as an enum, and has as messages of a kind."""

    unknown: tuple[str, ...]
    enums: tuple[str, ...]
    messages: tuple[tuple[str, Kind], ...]


@cache
def _plan(value: type[Struct], kind: Kind) -> _Plan:
    names, known = value.__struct_fields__, kind.fields_by_name
    have = [(name, known[name]) for name in names if name in known]
    return _Plan(
        unknown=tuple([name for name in names if name not in known]),
        enums=tuple([name for name, field in have if field.enum_type is not None]),
        messages=tuple([(name, field.message_type) for name, field in have if _holds_messages(field)]),
    )


def _holds_messages(field: Any) -> bool:
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


def _text(field: str, value: str) -> str:
    """The text in NFC, so that equal names are equal. Raises BadRequestError for what can't stand in one line."""
    if len(value) > NAME_RAW_MAX_CHARS:
        raise BadRequestError(field, f"{len(value):,} characters, at most {NAME_MAX_BYTES} bytes are taken")
    value = unicodedata.normalize("NFC", value)
    if (size := len(value.encode())) > NAME_MAX_BYTES:
        raise BadRequestError(field, f"{size:,} bytes, at most {NAME_MAX_BYTES} are taken")
    if not value.isprintable() and any(_breaks_a_line(character) for character in value):
        raise BadRequestError(field, "holds a control character, a line break or a change of writing direction")
    return value


def _breaks_a_line(character: str) -> bool:
    """Whether the character could forge or reorder a line of a log or a terminal."""
    return (
        unicodedata.category(character) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(character) in BIDI_CONTROLS
    )


def _name(field: str, value: str) -> str:
    if not value:
        raise BadRequestError(field, "is empty")
    return _text(field, value)


def _names(field: str, values: Sequence[str], *, most: int) -> tuple[str, ...]:
    if len(values) > most:
        raise BadRequestError(field, f"{len(values):,} values, at most {most:,} are taken")
    return tuple(_name(field, value) for value in values)


def _numbers(field: str, values: Mapping[str, float]) -> dict[str, float]:
    if len(values) > NUMBERS_NAMED_MAX:
        raise BadRequestError(field, f"{len(values):,} values, at most {NUMBERS_NAMED_MAX} are taken")
    return {_name(field, name): value for name, value in values.items()}


def _at_most(field: str, value: int, most: int) -> int:
    if value > most:
        raise BadRequestError(field, f"{value} is more than {most}")
    return value


def _tokens(field: str, value: int) -> int:
    if not 0 <= value <= TOKENS_MAX:
        raise BadRequestError(field, f"{value} is not between 0 and {TOKENS_MAX}")
    return value


def _budget(value: int) -> int:
    if value < 1:
        raise BadRequestError("max_tokens", f"{value} is below 1; leave the field out when there is no budget")
    return min(value, TOKENS_MAX)


def _block_keys(keys: bytes, block_tokens: int, prompt_tokens: int) -> bytes:
    count, rest = divmod(len(keys), 8)
    if rest:
        raise BadRequestError("block_keys", f"{len(keys)} bytes are not a whole number of 8-byte keys")
    if count > BLOCK_KEYS_MAX:
        raise BadRequestError("block_keys", f"{count:,} keys, at most {BLOCK_KEYS_MAX:,} are taken")
    if count and not block_tokens:
        raise BadRequestError("block_tokens", "is needed with block_keys")
    if count * block_tokens > prompt_tokens:
        raise BadRequestError("block_keys", f"{count} blocks of {block_tokens} tokens exceed {prompt_tokens} tokens")
    return keys


def _not_negative(field: str, value: float) -> float:
    if not 0 <= value <= SECONDS_MAX:  # what is not a number is in no range
        raise BadRequestError(field, f"{value:g} is not a number of seconds between 0 and {SECONDS_MAX:g}")
    return value


def _positive(field: str, value: float) -> float:
    if not 0 < value <= SECONDS_MAX:
        raise BadRequestError(field, f"{value:g} is not a number of seconds above 0 and up to {SECONDS_MAX:g}")
    return value


def _upload(value: int) -> int:
    if value < 0:
        raise BadRequestError("upload_bytes", f"{value} is below 0")
    return value


def _optional_seconds(message: outcomes_pb2.OutcomeEvent, field: Any) -> float | None:
    return _not_negative(field, getattr(message, field)) if message.HasField(field) else None


def _optional_tokens(message: outcomes_pb2.OutcomeEvent, field: Any) -> int | None:
    return _tokens(field, getattr(message, field)) if message.HasField(field) else None
