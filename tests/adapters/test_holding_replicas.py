"""Holding with two replicas of a site on one broker: only one that is alone holds anything."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.adapters.desks import request
from tests.core.fleets import Town
from tests.kafka_server import OwnKafka
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.desk import Desk
from tokenfleet.adapters.hearing import hear
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_admin import apply
from tokenfleet.adapters.kafka_reading import BEGINNING
from tokenfleet.adapters.sender import Sender
from tokenfleet.adapters.spool import Spool
from tokenfleet.adapters.topics import PLACEMENTS
from tokenfleet.core.asked import ROUTE
from tokenfleet.core.tokenpilot import held

ALONE_AFTER_S = 1.0


class Replica:
    """One of site b: it decides, tells the broker and hears what the others placed."""

    def __init__(self, name: str, sender: Sender, partitions: int) -> None:
        town = Town("b", small=1)
        town.now_s = monotonic_s()
        town.hears_telemetry()
        self.site = town.site
        self.site.replica = name
        self.desk = Desk(self.site, sender, start=1, partitions=lambda _: partitions, ready=lambda: True)

    def asks(self, name: str, prompt_tokens: int = 3000) -> str:
        """The verdict on a request that could be held."""
        asked = request(name, prompt_tokens=prompt_tokens, wait_max_s=60.0)
        return self.desk.decide(asked, ROUTE, dry_run=False).verdict

    def why_not(self) -> str:
        """Why it holds nothing, empty if it may."""
        return self.site.held.off(self.site.policy.tokenpilot, monotonic_s())


@asynccontextmanager
async def replica(name: str, bootstrap: str, folder: Path) -> AsyncGenerator[Replica]:
    async with Kafka(bootstrap, client_id=name) as kafka:
        with Spool(folder / name) as spool:
            sender = Sender(spool, kafka)
            one = Replica(name, sender, await kafka.partitions(PLACEMENTS, "b"))
            follower = kafka.follower(PLACEMENTS, "b", partial(hear, one.site), start=BEGINNING)
            tasks = [asyncio.create_task(work) for work in (sender.run(), follower.run(), one.desk.holding.run())]
            await follower.until_caught_up()
            try:
                yield one
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not true():
            await asyncio.sleep(0.01)


async def test_holding_ends_when_another_replica_places_and_begins_again_when_it_is_silent(
    own_kafka: OwnKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "OTHERS_HEARD_S", ALONE_AFTER_S)
    await apply(own_kafka.bootstrap, ("b",))
    async with (
        replica("one", own_kafka.bootstrap, tmp_path) as one,
        replica("two", own_kafka.bootstrap, tmp_path) as two,
    ):
        assert one.asks("running", prompt_tokens=120_000) == "admit"
        assert one.asks("alone") == "queue"
        await until(lambda: bool(two.why_not()))  # it has heard of `running`
        assert "another replica places too" in two.why_not()
        assert two.asks("elsewhere") == "admit"
        await until(lambda: bool(one.why_not()))
        assert one.asks("together") == "admit"
        assert len(one.desk.holding) == 1  # what it holds already keeps its place
        await until(lambda: not one.why_not())
        assert one.asks("alone again") == "queue"
        assert len(one.desk.holding) == 2
