"""Token: what a caller holds while its request waits. It is signed and describes itself.

A new owner takes the ticket's place in line from it. Layout (core/sealed.py): version, then each field as type, length,
bytes.
"""

import struct
from typing import Literal

from msgspec import Struct, ValidationError, convert
from msgspec.structs import fields

from tokenfleet.core.records import Order
from tokenfleet.core.sealed import seal, unseal
from tokenfleet.core.shard.records import Holder, Ticket

VERSION = b"\x01"

Problem = Literal["malformed", "tampered", "expired"]
Standing = Literal["same", "earlier", "later", "other_cluster"]


class Token(Struct, frozen=True, kw_only=True):
    """A ticket's place: `units` and `work_s` are its demand, `deadline_s` is on the clock of the epoch's owner."""

    book: str
    ticket: str
    tenant: str
    request_class: str
    rank: int
    units: int
    work_s: float
    virtual_start: float
    deadline_s: float
    cluster: str
    claim: int

    def standing(self, epoch: Order) -> Standing:
        """Under which epoch it was signed, seen from `epoch`."""
        if self.cluster != epoch.cluster:
            return "other_cluster"
        return "same" if self.claim == epoch.claim else "earlier" if self.claim < epoch.claim else "later"


class TokenRefused(Struct, frozen=True, kw_only=True):
    """Why a token is worth nothing."""

    problem: Problem


def sign(token: Token, secret: bytes) -> str:
    """The token as text."""
    return seal(VERSION + b"".join(_packed(getattr(token, field.name)) for field in fields(Token)), secret)


def verify(text: str, secret: bytes, *, epoch: Order, now_s: float) -> Token | TokenRefused:
    """The token that `secret` signed, or why there is none.

    It expires on the clock of the owner that signed it: under another epoch nobody can tell, and who shows it says how
    much longer it waits.
    """
    body = unseal(text, secret, version=VERSION)
    if isinstance(body, str):
        return TokenRefused(problem=body)
    try:
        token = convert(dict(zip((field.name for field in fields(Token)), _unpacked(body), strict=True)), Token)
    except (ValueError, struct.error, ValidationError):  # another version's
        return TokenRefused(problem="malformed")
    if token.standing(epoch) == "same" and now_s > token.deadline_s:
        return TokenRefused(problem="expired")
    return token


def ticket_with(token: Token, secret: bytes, *, order: Order, holder: Holder, n: int, ahead: int) -> Ticket:
    """The record of the ticket that `token` describes, with the token."""
    return Ticket(
        book=token.book,
        order=order,
        holder=holder,
        n=n,
        ticket=token.ticket,
        tenant=token.tenant,
        request_class=token.request_class,
        rank=token.rank,
        units=token.units,
        work_s=token.work_s,
        virtual_start=token.virtual_start,
        token=sign(token, secret),
        ahead=ahead,
    )


def _packed(value: str | int | float) -> bytes:
    if isinstance(value, str):
        kind, raw = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int):
        kind, raw = b"i", struct.pack(">q", value)
    else:
        kind, raw = b"f", struct.pack(">d", value)
    return kind + struct.pack(">I", len(raw)) + raw


def _unpacked(body: bytes) -> list[str | int | float]:
    values: list[str | int | float] = []
    at = len(VERSION)
    while at < len(body):
        kind, (size,) = body[at : at + 1], struct.unpack_from(">I", body, at + 1)
        raw = body[at + 5 : at + 5 + size]
        at += 5 + size
        if kind == b"s":
            values.append(raw.decode("utf-8", "surrogatepass"))
        else:
            values.append(struct.unpack(">q" if kind == b"i" else ">d", raw)[0])
    return values
