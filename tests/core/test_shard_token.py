"""Tokens: what was signed comes back whole, and nothing else does."""

from base64 import urlsafe_b64decode, urlsafe_b64encode

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import order
from tokenfleet.core.sealed import seal
from tokenfleet.core.shard.token import Token, TokenRefused, sign, verify

SECRET = b"site secret"
TOKEN = Token(
    book="small-chat@b",
    ticket="r1#0",
    tenant="acme",
    request_class="chat",
    rank=0,
    units=1200,
    work_s=0.25,
    virtual_start=3.5,
    deadline_s=100.0,
    cluster="kafka-1",
    claim=7,
)
EPOCH = order(claim=7)


def refusal(text: str, *, secret: bytes = SECRET, now_s: float = 50.0) -> str:
    found = verify(text, secret, epoch=EPOCH, now_s=now_s)
    return found.problem if isinstance(found, TokenRefused) else ""


@given(
    names=st.tuples(st.text(), st.text(), st.text(), st.text()),
    units=st.integers(0, 2**40),
    start=st.floats(allow_nan=False),
)
def test_a_token_describes_itself(names: tuple[str, str, str, str], units: int, start: float) -> None:
    book, ticket, tenant, request_class = names
    token = replace(
        TOKEN, book=book, ticket=ticket, tenant=tenant, request_class=request_class, units=units, virtual_start=start
    )
    assert verify(sign(token, SECRET), SECRET, epoch=EPOCH, now_s=50.0) == token


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_byte_that_changed_is_found(at: int, flip: int) -> None:
    raw = bytearray(urlsafe_b64decode(sign(TOKEN, SECRET)))
    raw[at % len(raw)] ^= flip
    assert refusal(urlsafe_b64encode(raw).decode()) == ("tampered" if at % len(raw) else "malformed")


@given(text=st.text())
def test_no_other_text_is_a_token(text: str) -> None:
    assert refusal(text) in ("malformed", "tampered")


def test_bytes_that_move_between_two_fields_change_the_signature() -> None:
    one, other = replace(TOKEN, ticket="ab", tenant="c"), replace(TOKEN, ticket="a", tenant="bc")
    assert urlsafe_b64decode(sign(one, SECRET))[:-32] != urlsafe_b64decode(sign(other, SECRET))[:-32]


def test_another_site_s_token_is_worth_nothing() -> None:
    assert refusal(sign(TOKEN, b"other secret")) == "tampered"


def test_it_expires_on_the_clock_of_the_owner_that_signed_it() -> None:
    assert refusal(sign(TOKEN, SECRET), now_s=100.0) == ""
    assert refusal(sign(TOKEN, SECRET), now_s=100.1) == "expired"
    earlier = replace(TOKEN, claim=5)  # whose clock ended with its owner
    assert refusal(sign(earlier, SECRET), now_s=1e9) == ""


def test_another_epoch_is_told_from_this_one() -> None:
    assert TOKEN.standing(EPOCH) == "same"
    assert TOKEN.standing(order(claim=9)) == "earlier"
    assert TOKEN.standing(order(claim=5)) == "later"
    assert TOKEN.standing(order(claim=7, cluster="kafka-2")) == "other_cluster"


def test_what_a_later_version_signed_is_not_guessed_at() -> None:
    body = urlsafe_b64decode(sign(TOKEN, SECRET))[:-32]
    from tokenfleet.core.shard.token import _packed

    assert refusal(seal(body + _packed("one field more"), SECRET)) == "malformed"
