"""Site face: what one site shows the others, published by the worker that owns its shard 0.

It follows the site's topics like any reader, joins them in a `Site`, and tells capacity every summary period and which
blocks each pool caches every sketch period.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tokenfleet.adapters.claim import EPOCH_UNKNOWN, Claim
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.hearing import hear
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_follower import Follower
from tokenfleet.adapters.kafka_link import KafkaAwayError
from tokenfleet.adapters.kafka_reading import BEGINNING, LAST, Record, ago
from tokenfleet.adapters.running import watched
from tokenfleet.adapters.settings import CapacitySettings
from tokenfleet.adapters.topics import CAPACITY, CONTROL, FEEDBACK, KVCACHE, PLACEMENTS, SKETCH, SUMMARY
from tokenfleet.core.policy import Policy
from tokenfleet.core.site import Site
from tokenfleet.core.sketch import Sketch
from tokenfleet.core.summary import summarise

ADVANCE_PERIOD_S = 0.5

logger = logging.getLogger(__name__)


async def publish_summaries(kafka: Kafka, name: str, policy: Callable[[], Policy], settings: CapacitySettings) -> None:
    """Publish the summaries and sketches of the site `name` until cancelled; `policy` is asked for the one in force."""
    face = _Face(kafka, name, policy, settings)
    async with asyncio.TaskGroup() as tasks:
        for follower in face.followers:
            watched(tasks, follower.run(), name=f"follow {follower.name}")
        watched(tasks, face.advance(), name="advance")
        await asyncio.gather(*(follower.until_caught_up() for follower in face.followers))
        watched(tasks, face.summaries(), name=f"summaries of {name}")
        watched(tasks, face.sketches(), name=f"sketches of {name}")


class _Face:
    """One site's tables and the place of its messages in the logs."""

    def __init__(self, kafka: Kafka, name: str, policy: Callable[[], Policy], settings: CapacitySettings) -> None:
        self._kafka = kafka
        self._policy = policy
        self._settings = settings
        self._site = Site(name, policy())
        self._claim = Claim()
        self._placements = kafka.follower(PLACEMENTS, name, self._hear, start=ago(policy().ledger.read_back_s))
        self.followers: list[Follower[Any]] = [
            kafka.follower(CAPACITY, name, self._hear, start=LAST),
            kafka.follower(KVCACHE, name, self._hear, start=BEGINNING),
            kafka.follower(CONTROL, name, self._hear, start=BEGINNING),
            kafka.follower(FEEDBACK, "", self._hear, start=LAST),
            self._placements,
        ]

    async def advance(self) -> None:
        """Let time pass in the ledger while placements are read at their end."""
        partitions = await self._kafka.partitions(PLACEMENTS, self._site.name)
        while True:
            now_s = monotonic_s()
            for partition in range(partitions):
                self._site.advance(partition, now_s, live=self._placements.caught_up)
            await asyncio.sleep(ADVANCE_PERIOD_S)

    async def summaries(self) -> None:
        while True:
            self._follow_policy()
            cluster = self._kafka.cluster_id
            n = self._claim.next(cluster)
            summary = summarise(
                self._site.name,
                self._site.pools(monotonic_s()),
                self._site.policy,
                cluster=cluster,
                epoch=self._claim.epoch,
                n=n,
                period_s=self._settings.summary_period_s,
                gateways=self._settings.gateways.get(self._site.name, ()),
            )
            try:
                self._claim.written(
                    await self._kafka.send(SUMMARY, self._site.name, [summary], partition=0, key=self._site.name)
                )
            except KafkaAwayError as error:
                logger.warning("%s: a summary was not published: %s", self._site.name, error)
            await asyncio.sleep(self._settings.summary_period_s)

    async def sketches(self) -> None:
        """Tell which blocks each pool caches, under the epoch that the summaries got."""
        n = 0
        while True:
            await asyncio.sleep(self._settings.sketch_period_s)
            if self._claim.epoch == EPOCH_UNKNOWN:
                continue
            n += 1
            for pool in self._site.pools(monotonic_s()):
                census = self._site.prefix.census(instance.instance for instance in pool.instances)
                sketch = Sketch.of(await asyncio.to_thread(census.keys))
                await self._send_sketch(sketch, pool.pool, n)

    def _follow_policy(self) -> None:
        """Goes by the policy in force; one that drops this site ends its requests, not this worker's other sites."""
        policy = self._policy()
        if policy is not self._site.policy and self._site.name in policy.sites:
            self._site.adopt(policy)

    async def _send_sketch(self, sketch: Sketch, pool: str, n: int) -> None:
        name, cluster = self._site.name, self._kafka.cluster_id
        try:
            for chunk in sketch.chunks(site=name, pool=pool, cluster=cluster, epoch=self._claim.epoch, n=n):
                await self._kafka.send(SKETCH, name, [chunk], partition=0, key=f"{pool}/{chunk.part}")
        except KafkaAwayError as error:
            logger.warning("%s: the sketch of %s was not published: %s", name, pool, error)

    def _hear(self, record: Record[Any]) -> None:
        hear(self._site, record)
