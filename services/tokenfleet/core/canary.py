"""Canary: is the revision on trial worse than the one in force? A function of counts, safe to ask at any time.

Three questions on shares of requests: those of a class that missed its service level, those that failed, and those
slower to first token than SLOWER_RATIO times the other arm's p50, or p95. The canary is worse when its share is greater
beyond doubt. The bounds hold at all times at once (a mixture over all shares is a martingale under the true one, so by
Ville's inequality it never exceeds 1/α but with chance α: Robbins 1970, "Statistical methods related to the law of the
iterated logarithm"), so asking every second makes no error likelier; over all questions together a good canary is
rolled back with a chance of at most 1 − CONFIDENCE. What a threshold taken from the other arm adds is not counted.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import Struct

from tokenfleet.core.revisions import MARGIN_S, ArmFigures, ClassShare

CONFIDENCE = 0.99
SAMPLES_MIN = 100  # of each arm, before the bound is asked and for a promotion
FAILURES_STOP = 10  # failed requests that end a canary without a bound …
FAILURES_STOP_SHARE = 0.5  # … if their share is so much greater than the other arm's
SLOWER_RATIO = 1.1  # a p50 or p95 within a tenth of the other's is no loss
BISECTIONS = 40  # a share to 1e-12
BUCKET = math.log(2.0) / 16  # times are kept to 4.4 %
LEAST_S = 1e-4


class Arm(Struct, kw_only=True):
    """Counts of one arm: requests that ended, and how; `open` of them have not, and can't meet their level any more.

    `ttft` are times to first token in buckets of BUCKET.
    """

    requests: int = 0
    failed: int = 0
    open: int = 0
    met: dict[str, int] = {}
    offered: dict[str, int] = {}
    ttft: dict[int, int] = {}

    def figures(self, revision: int) -> ArmFigures:
        """The counts in words of the record that people read."""
        return ArmFigures(
            revision=revision,
            requests=self.requests,
            failed=self.failed,
            open=self.open,
            classes={
                name: ClassShare(met=self.met.get(name, 0), offered=offered)
                for name, offered in sorted(self.offered.items())
                if offered
            },
            ttft_p50_s=quantile_s(self.ttft, 0.5),
            ttft_p95_s=quantile_s(self.ttft, 0.95),
        )


class Judgement(NamedTuple):
    """What becomes of the canary, and why in words."""

    verdict: Literal["running", "promoted", "rolled_back"]
    reason: str


def judged(base: Arm, canary: Arm, *, elapsed_s: float, for_s: float) -> Judgement:
    """`elapsed_s` of the `for_s` of the trial have passed, in the time in which the counts are complete."""
    if stopped := _stopped(base, canary):
        return Judgement("rolled_back", stopped)
    enough = min(base.requests, canary.requests) >= SAMPLES_MIN
    if enough and (worse := next(_worse(base, canary), "")):
        return Judgement("rolled_back", worse)
    if elapsed_s >= for_s + MARGIN_S:
        return Judgement("rolled_back", f"nobody judged it within {MARGIN_S:g} s of its end")
    have = f"{canary.requests} requests beside {base.requests}"
    if elapsed_s < for_s:
        return Judgement("running", f"{have}, {max(0.0, for_s - elapsed_s):.0f} s to go")
    if not enough:
        return Judgement("rolled_back", f"{have} in {for_s:g} s, at least {SAMPLES_MIN} of each are needed")
    return Judgement("promoted", f"no worse over {have} in {for_s:g} s")


def loss_bound(bad: int, of: int, bad_other: int, of_other: int, *, alpha: float) -> float:
    """How much greater the share `bad`/`of` is than the other for certain, but for a chance `alpha`: at any time.

    Below 0 when it may be no greater.
    """
    return least_share(bad, of, alpha=alpha / 2) - (1.0 - least_share(of_other - bad_other, of_other, alpha=alpha / 2))


def least_share(part: int, of: int, *, alpha: float) -> float:
    """The least share that is not ruled out by `part` of `of` Bernoulli draws, at any time, but for a chance `alpha`.

    Ruled out is p when B(part + 1, of − part + 1) / (p^part · (1 − p)^(of − part)) ≥ 1/α, a uniform mixture over p.
    """
    if not part:
        return 0.0
    rest = of - part
    mixture = math.lgamma(part + 1) + math.lgamma(rest + 1) - math.lgamma(of + 2) + math.log(alpha)
    low, high = 0.0, part / of
    for _ in range(BISECTIONS):
        p = (low + high) / 2
        if mixture >= part * math.log(p) + (rest * math.log1p(-p) if rest else 0.0):
            low = p
        else:
            high = p
    return low


def bucket_of(seconds: float) -> int:
    """The bucket that holds `seconds`; bucket b ends at 2^(b/16) s."""
    return math.ceil(math.log(max(seconds, LEAST_S)) / BUCKET)


def quantile_s(times: dict[int, int], share: float) -> float | None:
    """The end of the bucket in which the quantile lies, None of nothing."""
    left = share * sum(times.values())
    for bucket in sorted(times):
        left -= times[bucket]
        if left <= 0.0 and times[bucket]:
            return math.exp(bucket * BUCKET)
    return None


def _stopped(base: Arm, canary: Arm) -> str:
    if canary.failed < FAILURES_STOP:
        return ""
    share, other = canary.failed / canary.requests, base.failed / max(base.requests, 1)
    if share - other < FAILURES_STOP_SHARE:
        return ""
    return f"{canary.failed} of its {canary.requests} requests failed, {base.failed} of {base.requests} of the others"


def _worse(base: Arm, canary: Arm) -> Iterator[str]:
    """Each question to which the answer is yes, in words."""
    classes = [name for name, offered in sorted(canary.offered.items()) if offered and base.offered.get(name)]
    alpha = (1.0 - CONFIDENCE) / (len(classes) + 3)
    for name in classes:
        of, of_other = canary.offered[name], base.offered[name]
        met, met_other = canary.met.get(name, 0), base.met.get(name, 0)
        if loss_bound(of - met, of, of_other - met_other, of_other, alpha=alpha) > 0.0:
            yield f"{name} within service level {met / of:.1%} of {of}, {met_other / of_other:.1%} of {of_other}"
    if loss_bound(canary.failed, canary.requests, base.failed, base.requests, alpha=alpha) > 0.0:
        yield f"{canary.failed / canary.requests:.1%} failed, {base.failed / base.requests:.1%} of the others"
    for share in (0.5, 0.95):
        if slower := _slower(base.ttft, canary.ttft, share, alpha):
            yield slower


def _slower(base: dict[int, int], canary: dict[int, int], share: float, alpha: float) -> str:
    """Whether its quantile lies beyond SLOWER_RATIO · the other's, and more of its first tokens do than of the other's
    beyond doubt."""
    other_s, own_s = quantile_s(base, share), quantile_s(canary, share)
    if other_s is None or own_s is None or own_s <= SLOWER_RATIO * other_s:
        return ""
    limit = bucket_of(SLOWER_RATIO * other_s)
    late, of = sum(n for bucket, n in canary.items() if bucket > limit), sum(canary.values())
    late_other, of_other = sum(n for bucket, n in base.items() if bucket > limit), sum(base.values())
    if loss_bound(late, of, late_other, of_other, alpha=alpha) <= 0.0:
        return ""
    return f"p{share * 100:g} of time to first token {own_s * 1e3:.0f} ms, {other_s * 1e3:.0f} ms of the others"
