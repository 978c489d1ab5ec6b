"""What a replica sends to another site the others of its origin hear, and count until that site's next summary."""

from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import Decided
from tokenfleet.core.records import PlacementEnvelope
from tokenfleet.core.sent import SendEvent
from tokenfleet.core.site import Heard


def wait_at_b(origin: Town) -> float:
    """What a request would wait at site b, as the origin sees it; nothing comes of asking."""
    decided = origin.decide(asked("dry", origin="a", dry_run=True))
    [option] = [option for option in decided.decision.sites if option.site == "b"]
    assert option.wait_s is not None
    return option.wait_s


def hears(origin: Town, *sends: SendEvent, replica: str = "1", live: bool = True) -> None:
    envelope = PlacementEnvelope(site="a", replica=replica, start="1", n=1, events=(), sends=sends)
    origin.site.heard(envelope, Heard(now_s=origin.now_s, live=live))


def two_replicas() -> tuple[Town, Town, Decided]:
    """Both heard b's summary; the first has just sent b a long prompt."""
    b, first, second = Town("b", small=1), Town("a"), Town("a")
    for origin in (first, second):
        origin.hears_summary_of(b)
        origin.now_s += 0.2
    return first, second, first.decide(asked("r", origin="a", prompt_tokens=20_000))


def test_a_redirect_tells_the_other_replicas_what_it_adds_at_that_site() -> None:
    first, second, decided = two_replicas()
    assert decided.decision.verdict == "redirect"
    assert decided.sent is not None
    assert (decided.sent.request, decided.sent.site, decided.sent.model) == ("r", "b", "small-chat")
    assert wait_at_b(second) == 0.0
    hears(second, decided.sent)
    assert wait_at_b(second) == wait_at_b(first) > 0.0


def test_a_send_heard_twice_counts_once() -> None:
    _, second, decided = two_replicas()
    assert decided.sent is not None
    hears(second, decided.sent, decided.sent)
    once_s = wait_at_b(second)
    hears(second, decided.sent)
    assert wait_at_b(second) == once_s


def test_ones_own_send_read_back_changes_nothing() -> None:
    first, _, decided = two_replicas()
    assert decided.sent is not None
    own_s = wait_at_b(first)
    hears(first, replace(decided.sent, request="other"), replica=first.site.replica)
    assert wait_at_b(first) == own_s


def test_what_was_sent_before_one_listened_is_in_the_summaries() -> None:
    _, second, decided = two_replicas()
    assert decided.sent is not None
    hears(second, decided.sent, live=False)
    assert wait_at_b(second) == 0.0


def test_a_dry_run_tells_nobody() -> None:
    first, _, _ = two_replicas()
    assert first.decide(asked("dry", origin="a", dry_run=True)).sent is None
