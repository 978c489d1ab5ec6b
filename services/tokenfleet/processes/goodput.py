"""Goodput: adds up how every request ended and what it cost, and publishes what decisions can learn from it.

Outcomes of all sites are read by assignment, without a group. All state is in memory; what survives a restart are the
topics themselves: the rows published before (their versions go on) and the outcomes, read again from so far back that
every row that can still change is rebuilt whole. So nothing is committed, and a kill at any point changes no sum.
"""

import asyncio
import logging
import math
from collections.abc import Callable

from prometheus_client import Counter, Gauge

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.faust_app import run_processor
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_follower import Follower
from tokenfleet.adapters.kafka_link import KafkaAwayError
from tokenfleet.adapters.kafka_reading import BEGINNING, LAST, Record, ago
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.adapters.running import watched
from tokenfleet.adapters.settings import GoodputSettings
from tokenfleet.adapters.status import Status
from tokenfleet.adapters.topics import FEEDBACK, GOODPUT, OUTCOMES, POLICY, SUMMARY
from tokenfleet.core.accounts import Feedback, GoodputPartial, GoodputRow
from tokenfleet.core.errors import BadRecordError, PolicyError, SetupError
from tokenfleet.core.goodput.cost import PoolCost
from tokenfleet.core.goodput.event_time import OFFSET_WINDOW_S
from tokenfleet.core.goodput.lessons import Lessons
from tokenfleet.core.goodput.partition import PartitionGoodput
from tokenfleet.core.goodput.steering import Steering
from tokenfleet.core.goodput.table import GoodputTable
from tokenfleet.core.goodput.trial import Judge
from tokenfleet.core.policy import GoodputPolicy, Policy
from tokenfleet.core.records import OutcomeEnvelope, SiteSummary
from tokenfleet.core.revisions import FILE_KEY, REPORT_KEY, PolicyRecord

PUBLISH_EVERY_S = 1.0
FEEDBACK_FIRST_S = 60.0  # so long decisions get a revision with each publication: the priors are wrong at first
FEEDBACK_EVERY_S = 5.0
REPORT_EVERY_S = 5.0
WRITER = "fleet"  # the `site` of our partials: one worker adds up all sites
KEY = "fleet"

EVENTS = Counter("tokenfleet_goodput_events_total", "Outcome events taken in; repeats are not counted")
REQUESTS = Gauge("tokenfleet_goodput_requests", "Logical requests in memory")
WATERMARK_AGE = Gauge("tokenfleet_goodput_watermark_age_seconds", "Wall clock minus the least watermark")

logger = logging.getLogger(__name__)


class Goodput:
    """One worker for all partitions of all sites. `run` reads and publishes until cancelled."""

    def __init__(self, settings: GoodputSettings, policy: Policy) -> None:
        self._settings = settings
        toml = policy_text(settings.policy)
        self._judge = Judge(policy, toml)
        self._steering = Steering(policy, toml)
        self._partitions: list[PartitionGoodput] = []
        self._cost = PoolCost(policy.goodput.windows_s)
        self._lessons = Lessons()
        self._unsent: list[GoodputPartial] = []
        self._watermark_s: float | None = None

    def revise(self, heard: PolicyRecord) -> None:
        """Our own follower hears it too, with its time."""
        del heard

    async def run(self) -> None:
        settings = self._settings
        if not settings.sites:
            raise SetupError("TOKENFLEET_SITES: name the sites whose outcomes are added up")
        async with (
            Kafka(settings.kafka, client_id="goodput") as kafka,
            Status("goodput", host=settings.status_host, port=settings.status_port) as status,
        ):
            readers = [*await self._outcome_readers(kafka), *self._summary_readers(kafka)]
            status.parts["outcomes"] = lambda: _reading(readers)
            status.parts["watermark"] = self._watermark_part
            status.parts["shares"] = self._shares_part
            async with asyncio.TaskGroup() as tasks:
                for reader in readers:
                    watched(tasks, reader.run(), name=f"follow {reader.name}")
                watched(tasks, self._publisher(kafka), name="publish")
                watched(tasks, self._teacher(kafka), name="teach")
                policies = kafka.follower(POLICY, "", self._hear_policy, start=BEGINNING)
                watched(tasks, policies.run(), name=f"follow {policies.name}")
                watched(tasks, self._judging(kafka), name="judge")
                watched(tasks, self._steer(kafka), name="steer")

    async def _outcome_readers(self, kafka: Kafka) -> list[Follower[OutcomeEnvelope]]:
        """Take up what earlier lives published, and begin the outcomes where it can still change."""
        table = GoodputTable()

        def hear(record: Record[GoodputPartial]) -> None:
            table.hear(record.message)
            self._steering.hear_goodput(record.message)

        replay_s = _replay_s(self._policy.goodput)
        for before in (
            kafka.follower(POLICY, "", self._hear_policy, start=BEGINNING),
            kafka.follower(GOODPUT, "", hear, start=ago(replay_s)),
            kafka.follower(FEEDBACK, "", self._take_revision, start=LAST),
        ):
            await before.read_to_end()
        counts = {site: await kafka.partitions(OUTCOMES, site) for site in self._settings.sites}
        if len(set(counts.values())) > 1:
            raise SetupError(f"outcomes: all sites need the same number of partitions, found {counts}")
        reached = [
            table.watermark_of(cluster=kafka.cluster_id, site=WRITER, partition=partition)
            for partition in range(max(counts.values(), default=0))
        ]
        published = [
            table.published(cluster=kafka.cluster_id, site=WRITER, partition=partition)
            for partition in range(len(reached))
        ]
        self._cost = PoolCost(self._policy.goodput.windows_s, published=published[0] if published else ())
        self._partitions = [self._partition(rows, at_s) for rows, at_s in zip(published, reached, strict=True)]
        known = [at_s for at_s in reached if at_s is not None]
        # Wall time only chooses how far back to read: too far costs time, and a row outside is left as it is.
        start = ago(max(0.0, wall_s() - min(known)) + replay_s) if len(known) == len(reached) else BEGINNING
        return [
            kafka.follower(
                OUTCOMES,
                site,
                self._hear_outcomes,
                start=start,
                on_caught_up=self._caught_up(site),
                on_reset=_refuse_reset,
            )
            for site in self._settings.sites
        ]

    def _partition(self, published: tuple[GoodputRow, ...], reached_s: float | None) -> PartitionGoodput:
        from_s = -math.inf if reached_s is None else reached_s - _replay_s(self._policy.goodput) + OFFSET_WINDOW_S
        partition = PartitionGoodput(self._policy, sources=self._settings.sites, published=published, from_s=from_s)
        partition.count_into(self._judge.arms)
        return partition

    def _caught_up(self, site: str) -> Callable[[], None]:
        def caught_up() -> None:
            for partition in self._partitions:
                partition.caught_up(site)

        return caught_up

    def _summary_readers(self, kafka: Kafka) -> list[Follower[SiteSummary]]:
        return [kafka.follower(SUMMARY, site, self._hear_summary, start=LAST) for site in self._settings.sites]

    def _hear_outcomes(self, record: Record[OutcomeEnvelope]) -> None:
        new = self._partitions[record.partition].hear(
            record.site, record.message, appended_wall_s=record.appended_wall_s, now_s=monotonic_s()
        )
        EVENTS.inc(len(new))
        self._lessons.observe(new, self._policy)
        self._steering.observe(new)

    def _hear_policy(self, record: Record[PolicyRecord]) -> None:
        """Go by this policy, or count this trial, from now on, if it is newer than ours and can be used."""
        try:
            self._take_policy(record.message, record.appended_wall_s)
        except PolicyError as error:
            raise BadRecordError(str(error)) from error

    def _take_policy(self, record: PolicyRecord, at_s: float) -> None:
        arms = self._judge.arms
        self._judge.hear(record, at_s=at_s)
        self._steering.hear(record, self._policy, at_s=at_s)
        for pool in self._lessons.follow(self._policy):
            logger.warning("learning of %s starts over: policy revision %d changes it", pool, self._policy.revision)
        for partition in self._partitions:
            partition.policy = self._policy
            if self._judge.arms is not arms:
                partition.count_into(self._judge.arms)

    def _hear_summary(self, record: Record[SiteSummary]) -> None:
        site = self._policy.sites.get(record.message.site)
        price = 0.0 if site is None else site.price_per_instance_hour
        self._cost.hear(record.message, price_per_hour=price, at_s=record.appended_wall_s)
        self._steering.hear_summary(record.message)

    def _take_revision(self, record: Record[Feedback]) -> None:
        self._lessons.revision = max(self._lessons.revision, record.message.revision)

    async def _publisher(self, kafka: Kafka) -> None:
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            self._collect(kafka.cluster_id)
            try:
                # A partial that was written after all and comes again is the same rows under the same versions.
                while self._unsent:
                    await kafka.send(GOODPUT, "", self._unsent[:PARTIALS_AT_ONCE], partition=0, key=KEY)
                    del self._unsent[:PARTIALS_AT_ONCE]
            except KafkaAwayError as error:
                logger.warning("%d partial sums wait: %s", len(self._unsent), error)

    def _collect(self, cluster: str) -> None:
        """Fetch what changed, unless something waits already: changes gather in the rows meanwhile."""
        if self._unsent:
            return
        for number, partition in enumerate(self._partitions):
            partials = partition.partials(site=WRITER, partition=number, cluster=cluster, now_s=monotonic_s())
            self._unsent += partials
            for partial in partials:
                self._steering.hear_goodput(partial)
            if number == 0 and partials and (rows := self._cost.changed()):
                self._unsent.append(
                    GoodputPartial(
                        site=WRITER, partition=0, watermark_s=partials[0].watermark_s, rows=rows, cluster=cluster
                    )
                )
        REQUESTS.set(sum(partition.requests for partition in self._partitions))
        self._watermark_s = min((partial.watermark_s for partial in self._unsent), default=None)
        if self._watermark_s is not None:
            WATERMARK_AGE.set(wall_s() - self._watermark_s)

    async def _teacher(self, kafka: Kafka) -> None:
        began_s = monotonic_s()
        while True:
            first = monotonic_s() - began_s < FEEDBACK_FIRST_S
            await asyncio.sleep(PUBLISH_EVERY_S if first else FEEDBACK_EVERY_S)
            if self._watermark_s is None:
                continue  # half-read logs teach half-truths
            try:
                await kafka.send(FEEDBACK, "", [self._lessons.feedback(at_wall_s=wall_s())], key=KEY)
            except KafkaAwayError as error:
                logger.warning("a calibration revision was not published: %s", error)

    async def _judging(self, kafka: Kafka) -> None:
        """Publishes how a trial stands and, once it is decided, the revision that ends it."""
        told_s = -math.inf
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            if self._watermark_s is None:
                continue
            try:
                standing = self._judge.due(complete_s=self._watermark_s, at_wall_s=wall_s())
                if standing is None:
                    continue
                report, end = standing
                if end is not None:  # goes first: a verdict is told when it is in force
                    await kafka.send(POLICY, "", [end], key=FILE_KEY)
                    self._take_policy(end, wall_s())
                elif monotonic_s() - told_s < REPORT_EVERY_S:
                    continue
                await kafka.send(POLICY, "", [report], key=REPORT_KEY)
                told_s = monotonic_s()
            except (KafkaAwayError, PolicyError) as error:
                logger.warning("a canary goes on unjudged, and ends by itself: %s", error)

    async def _steer(self, kafka: Kafka) -> None:
        """Publishes what the controllers of shares change."""
        told = 0
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            if self._watermark_s is None:
                continue
            if (revision := self._steering.due(now_wall_s=wall_s())) is None:
                continue
            try:
                await kafka.send(POLICY, "", [revision], key=FILE_KEY)
            except KafkaAwayError as error:
                logger.warning("a change of shares was not published: %s", error)
            else:
                if revision.revision != told:
                    logger.info("policy revision %d: %s", revision.revision, revision.reason)
                told = revision.revision

    @property
    def _policy(self) -> Policy:
        """The policy in force."""
        return self._judge.policy

    def _watermark_part(self) -> tuple[bool, str]:
        if self._watermark_s is None:
            return True, "nothing heard yet"
        return True, f"{wall_s() - self._watermark_s:.1f} s behind the wall clock"

    def _shares_part(self) -> tuple[bool, str]:
        held = "; ".join(f"{pool}: {why}" for pool, why in self._steering.held.items() if why)
        return True, self._steering.problem or held or "nothing is shared out, or all moves"


PARTIALS_AT_ONCE = 16


def _replay_s(terms: GoodputPolicy) -> float:
    """How far behind a watermark events can lie that still change a row, and the warm-up of reporters' offsets."""
    return terms.settled_keep_s + terms.open_sweep_s + terms.lateness_s + max(terms.windows_s) + OFFSET_WINDOW_S


def _refuse_reset() -> None:
    """Sums of a log that is gone can't be told from those of its successor in place: a restart can (by cluster)."""
    raise SetupError("the log of outcomes is another one; starting anew")


def _reading(readers: list[Follower[OutcomeEnvelope] | Follower[SiteSummary]]) -> tuple[bool, str]:
    behind = [reader for reader in readers if not reader.caught_up]
    return not behind, f"{sum(reader.lag for reader in readers)} records behind"


def main() -> None:
    run_processor("goodput", GoodputSettings, Goodput)


if __name__ == "__main__":
    main()
