"""Words: what people read of a decision names its revision's trial, and money as money."""

from io import StringIO

from rich.console import Console, RenderableType

from tokenfleet.client.words import decision_words
from tokenfleet.wire.v1 import decision_pb2


def said(words: RenderableType, *, width: int = 200) -> str:
    console = Console(width=width, file=(out := StringIO()))
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


def test_at_80_columns_the_candidates_keep_their_names_and_figures() -> None:
    candidates = [
        decision_pb2.Candidate(
            instance=f"b-large-{i}",
            cost_s=12.446,
            ttft_s=3.644,
            wait_s=3.045,
            work_s=0.598,
            margin_s=0.251,
            kv_s=0.244,
            kv_use=0.62,
            hit_tokens=13_312,
            age_s=2.3,
        )
        for i in range(2)
    ]
    told = said(decision_words(decision_pb2.Decision(candidates=candidates)), width=80)
    for i in range(2):
        assert f"b-large-{i} 12446 3644 3045 598 0 251 0 244 0 62% 13312 2.3 s" in told
