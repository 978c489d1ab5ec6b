"""Words: what people read of a decision names its revision's trial, and money as money."""

from io import StringIO

from rich.console import Console, RenderableType

from tokenfleet.client.words import decision_words
from tokenfleet.wire.v1 import decision_pb2


def said(words: RenderableType) -> str:
    console = Console(width=200, file=(out := StringIO()))
    console.print(words)
    return " ".join(out.getvalue().split())


def test_a_decision_under_a_canary_says_so() -> None:
    tried = decision_pb2.Decision(verdict=decision_pb2.VERDICT_ADMIT, policy_revision=7, canary=True)
    assert "policy 7 (canary), calibration" in said(decision_words(tried))
    assert "policy 7, calibration" in said(decision_words(decision_pb2.Decision(policy_revision=7)))


def test_what_a_site_costs_is_told_in_whole_units() -> None:
    sites = [decision_pb2.SiteOption(site="b", cost=0.003324), decision_pb2.SiteOption(site="c", refused="no room")]
    told = said(decision_words(decision_pb2.Decision(sites=sites)))
    assert "0.003324" in told
    assert "in the policy's currency" in told
