"""Sends: what has been sent to a site since its last summary, and the waits that this makes there.

A summary is old the moment it is sent; what went out since is known here, at once for one's own sends and on the
placement event for those of peers. Replay over the summary's waits keeps the 95th percentile that a mean correction
loses (policies.md 1.4: 1.827 s against 2.04 s at summaries 5 s old).
"""

import heapq
from collections.abc import Iterable, Sequence

from msgspec import Struct

SENDS_PER_POOL_MAX = 20_000  # about 1,300 sends a second over 15 s; the oldest go first


class Send(Struct, frozen=True, kw_only=True):
    """One request sent to a pool of a site, at `at_s` on our clock (for a peer's: when its event was heard).

    `request` and `attempt` name it, so that a send heard twice counts once. `work_s` is its predicted stand-alone
    prefill, `uncached_tokens` the tokens of it, `kv_tokens` prompt and estimated output.
    """

    request: str
    attempt: int = 0
    site: str
    model: str
    at_s: float
    work_s: float
    uncached_tokens: int = 0
    kv_tokens: int = 0


class Sends:
    """The sends of the last `kept_s` seconds by site and model."""

    def __init__(self, *, kept_s: float) -> None:
        self._kept_s = kept_s
        self._sends: dict[tuple[str, str], dict[tuple[str, int], Send]] = {}

    def sent(self, send: Send) -> None:
        """Remembers a send; a second word of the same request and attempt changes nothing."""
        sends = self._sends.setdefault((send.site, send.model), {})
        sends.setdefault((send.request, send.attempt), send)
        while len(sends) > SENDS_PER_POOL_MAX or next(iter(sends.values())).at_s < send.at_s - self._kept_s:
            del sends[next(iter(sends))]

    def withdrawn(self, request: str, attempt: int, *, site: str, model: str) -> None:
        """Forgets a send that never reached its site or was refused there."""
        self._sends.get((site, model), {}).pop((request, attempt), None)

    def since(self, site: str, model: str, *, stamp_s: float, now_s: float) -> tuple[Send, ...]:
        """The sends to a site in (stamp_s, now_s] that are still remembered, oldest first."""
        found = [send for send in self._sends.get((site, model), {}).values() if stamp_s < send.at_s <= now_s]
        return tuple(sorted(found, key=lambda send: send.at_s))


def replay(
    waits_s: Sequence[float], sends: Iterable[Send], *, stamp_s: float, now_s: float, instances: int
) -> tuple[float, ...]:
    """Waits at `now_s`, least first: each instance drains at 1 s/s, each send adds its work to the least loaded one.

    `waits_s` held at `stamp_s`; `sends` are those since, oldest first. `instances` is the number of instances that
    `waits_s` stand for: when the summary was thinned, one value carries several and takes that much less of a send.
    """
    share = min(1.0, len(waits_s) / max(1, instances))
    free_at_s = [stamp_s + wait_s for wait_s in waits_s]  # draining needs no step: a wait is what is left until then
    heapq.heapify(free_at_s)
    for send in sends if free_at_s else ():
        heapq.heapreplace(free_at_s, max(free_at_s[0], send.at_s) + send.work_s * share)
    return tuple(sorted(max(0.0, at_s - now_s) for at_s in free_at_s))


def site_wait_s(waits_s: Sequence[float], *, min_share: float) -> float:
    """Expected wait at a site: min_share · least + (1 − min_share) · mean over its instances (policies.md 1.4)."""
    if not waits_s:
        return 0.0
    return min_share * min(waits_s) + (1.0 - min_share) * sum(waits_s) / len(waits_s)
