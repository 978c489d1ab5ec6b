"""Correction: how telemetry corrects what a decision sees of the ledger, and never the ledger.

The ledger knows our own placements at once, other replicas' late and other traffic never; the engine's counts know
everything, a scrape late. Each heartbeat bounds the engine's load from both sides; the ledger is right as long as it
lies between. What was counted and no entry explains is foreign, until an entry that is heard later explains it. What
other replicas placed since is expected at the rate at which they place there.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.capacity import InstanceRow
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.load import MeanWork, Standing
from tokenfleet.core.placed import InstancePlacements
from tokenfleet.core.policy import LedgerPolicy
from tokenfleet.core.records import Order


class Corrections:
    """The newest judgement on each instance."""

    def __init__(self, ledger: Ledger, policy: LedgerPolicy) -> None:
        self._ledger = ledger
        self.policy = policy
        self._judged: dict[str, Correction] = {}
        self.changed: set[str] = set()  # instances judged anew; the reader empties it

    def heard(self, row: InstanceRow, now_s: float) -> None:
        """Judge the heartbeat in `row`; one judged already, or with counts or age unknown, changes nothing.

        At most count + placed since the scrape and its lag run now. Below the ledger with even that, for
        `correction_beats` heartbeats, the oldest entries are phantoms whose end was lost. A new boot is a count of 0.
        """
        age_s, running, waiting = row.age_s(now_s), row.beat.running, row.beat.waiting
        before = self._judged.get(row.beat.instance, NONE)
        if age_s is None or running is None or waiting is None or before.order == row.order:
            return
        held = self._ledger.placements(row.beat.instance)
        at_s = now_s - age_s
        since_s = at_s - before.at_s
        lag_s = self.policy.correction_lag_s
        judged = Correction(
            order=row.order,
            at_s=at_s,
            ended_after_s=at_s - lag_s,
            count=running + waiting,
            waiting=waiting,
            mean=self._ledger.mean_work,
            others_work_s=held.others_work_s,
            others_share=_faded(before, held.others_work_s, since_s),
            unheard_s=max(0.0, min(self._ledger.lag_s, since_s)),
        )
        most = judged.count + held.placed_since(at_s - lag_s)
        if (phantoms := math.ceil(len(held) - most)) > 0:
            below = before.beats_below + 1
            certain = below >= self.policy.correction_beats
            believed_after_s = held.placed_at_of_oldest(phantoms) if certain else -math.inf
            judged = replace(judged, beats_below=below, believed_after_s=believed_after_s)
        self._judged[row.beat.instance] = judged
        self.changed.add(row.beat.instance)

    def standing(self, row: InstanceRow) -> Standing:
        """The load of one instance: the ledger's without phantoms, with foreign sequences at mean work, and with the
        work that other replicas are likely to have placed.

        Of the foreign ones as many wait for their first token as the engine says that wait. KV held is at least what
        the engine says it uses.
        """
        by = self._judged.get(row.beat.instance, NONE)
        standing = self._ledger.standing(row.beat.instance, believed_after_s=by.believed_after_s)
        load = standing.load
        used, size = row.beat.kv_used_blocks, row.beat.block_size
        used_tokens = 0.0 if used is None or size is None else used * size
        foreign = _unexplained(by, self._ledger.placements(row.beat.instance))
        expected_s = by.others_share * by.unheard_s
        if not (foreign or expected_s) and used_tokens <= load.kv_held_tokens:
            return standing
        mean = by.mean
        queued = min(foreign, by.waiting)
        decoding = foreign - queued
        corrected = replace(
            load,
            backlog_s=load.backlog_s + queued * mean.work_s + expected_s,
            behind_s=load.behind_s + queued * mean.work_s,
            queued=load.queued + round(queued),
            queued_tokens=load.queued_tokens + round(queued * mean.uncached_tokens),
            decoding=load.decoding + round(decoding),
            context_tokens=load.context_tokens + decoding * mean.kv_tokens,
            kv_held_tokens=max(used_tokens, load.kv_held_tokens + foreign * mean.kv_tokens),
            foreign=foreign,
        )
        return replace(standing, load=corrected)

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        self._judged.pop(instance, None)


class Correction(Struct, frozen=True, kw_only=True):
    """What one heartbeat told: `count` sequences at `at_s`, `waiting` of them not begun.

    A gauge may be older than the scrape: a sequence that ended after `ended_after_s` may have been counted. One that no
    entry explains is taken for the `mean` of what had been placed by then.

    Other replicas have placed `others_work_s` there ever, lately `others_share` seconds a second; what they placed in
    the last `unheard_s` is known neither from them nor by count.

    `beats_below` counts the heartbeats in a row that were below the ledger; entries up to `believed_after_s` are
    phantoms.
    """

    order: Order | None = None
    at_s: float = -math.inf
    ended_after_s: float = -math.inf
    count: float = 0.0
    waiting: float = 0.0
    mean: MeanWork = MeanWork()
    others_work_s: float = 0.0
    others_share: float = 0.0
    unheard_s: float = 0.0
    beats_below: int = 0
    believed_after_s: float = -math.inf


NONE = Correction()
FADE_S = 30.0  # four gateways that hear late lose 3 % of their median with 8 s and 20 % with 120


def _unexplained(judged: Correction, held: InstancePlacements) -> float:
    """Sequences that were counted at the scrape and of which no entry is known, even now."""
    return max(0.0, judged.count - held.there(judged.at_s, ended_after_s=judged.ended_after_s))


def _faded(before: Correction, others_work_s: float, since_s: float) -> float:
    """The share of time that other replicas' work takes, after `since_s` more; at most all of it."""
    if not 0.0 < since_s < math.inf:
        return before.others_share
    share = max(0.0, others_work_s - before.others_work_s) / since_s
    return min(1.0, before.others_share + (1.0 - math.exp(-since_s / FADE_S)) * (share - before.others_share))
