"""Peers: what this replica knows of the other sites, from their summaries and sketches."""

from msgspec import Struct

from tokenfleet.core.records import SiteSummary, SketchChunk
from tokenfleet.core.sketch import Sketches
from tokenfleet.core.view import PeerView


class Peers:
    """The newest summary and sketches of each site. A writer that was deposed (lower epoch) is not heard."""

    def __init__(self) -> None:
        self._summaries: dict[str, _Heard] = {}
        self._sketches = Sketches()

    def heard_summary(self, summary: SiteSummary, *, offset: int, now_s: float, live: bool) -> bool:
        """Keeps `summary` if it is newer; `offset` is its own, the epoch of a writer's first message.

        What was read while catching up is of unknown age until the next one.
        """
        epoch = offset if summary.epoch < 0 else summary.epoch
        known = self._summaries.get(summary.site)
        if known and known.summary.cluster == summary.cluster and (epoch, summary.n) <= (known.epoch, known.summary.n):
            return False
        self._summaries[summary.site] = _Heard(summary=summary, epoch=epoch, heard_at_s=now_s, live=live)
        return True

    def heard_sketch(self, chunk: SketchChunk) -> None:
        """Takes in a part of a pool's sketch."""
        self._sketches.heard(chunk)

    def view(self, site: str, *, pool: str, block_keys: bytes, block_tokens: int, now_s: float) -> PeerView:
        """`site` as a dispatch sees it, with the prefix credit of a request's keys in `pool`."""
        known = self._summaries.get(site)
        if known is None:
            return PeerView(site=site, summary=None, age_s=None)
        blocks = self._sketches.prefix_hits(site, pool, block_keys) if block_keys else 0
        return PeerView(
            site=site,
            summary=known.summary,
            age_s=now_s - known.heard_at_s if known.live else None,
            hit_tokens=blocks * block_tokens,
        )

    def retain(self, sites: frozenset[str]) -> None:
        """Forgets the sites that the policy no longer names."""
        self._summaries = {site: heard for site, heard in self._summaries.items() if site in sites}
        self._sketches.retain(sites)

    def summary(self, site: str) -> SiteSummary | None:
        """The last summary of `site`, however old."""
        known = self._summaries.get(site)
        return known.summary if known else None

    def age_s(self, site: str, now_s: float) -> float | None:
        """Time since `site` was heard, None if never or only while catching up."""
        known = self._summaries.get(site)
        return now_s - known.heard_at_s if known and known.live else None


class _Heard(Struct, frozen=True, kw_only=True):
    summary: SiteSummary
    epoch: int
    heard_at_s: float
    live: bool
