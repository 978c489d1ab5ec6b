"""Sender: what was put arrives, in each partition's order, however often Kafka refuses it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tokenfleet.adapters.codec import decode
from tokenfleet.adapters.kafka_link import KafkaAwayError
from tokenfleet.adapters.sender import Sender
from tokenfleet.adapters.spool import Spool
from tokenfleet.adapters.topics import DECISIONS, PLACEMENTS, Topic, partition_of
from tokenfleet.core.errors import BadRecordError, SetupError
from tokenfleet.core.records import DecisionEnvelope, PlacementEnvelope


class Broker:
    """Keeps what it is sent; `chance` of refusing, after having written it in half of the cases."""

    def __init__(self, chance: float = 0.0) -> None:
        self.logs: dict[tuple[str, int], list[bytes]] = {}
        self.batches = 0
        self.away = False
        self._chance, self._rng = chance, Random(7)

    async def partitions(self, topic: Topic[Any], site: str) -> int:
        if self.away:
            raise SetupError("away")
        return topic.partitions

    async def send_values(
        self, topic: Topic[Any], site: str, values: Sequence[bytes], *, partition: int | None = None
    ) -> int:
        await asyncio.sleep(0)
        assert partition is not None
        refuses = self.away or self._rng.random() < self._chance
        if not refuses or (not self.away and self._rng.random() < 0.5):
            self.batches += 1
            self.logs.setdefault((topic.at(site), partition), []).extend(values)
        if refuses:
            raise KafkaAwayError("away")
        return 0


def placement(n: int) -> PlacementEnvelope:
    return PlacementEnvelope(site="b", replica="r", start="1", n=n, events=())


@asynccontextmanager
async def sending(spool: Spool, broker: Broker) -> AsyncGenerator[Sender]:
    sender = Sender(spool, broker)
    task = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_records_share_batches_and_keep_their_order(tmp_path: Path) -> None:
    broker = Broker()
    with Spool(tmp_path) as spool:
        async with sending(spool, broker) as sender:
            for n in range(400):
                assert sender.put(PLACEMENTS, "b", placement(n), partition=n % 4)
            await sender.until_drained()
            assert sender.sent == 400
    for partition in range(4):
        values = broker.logs[(PLACEMENTS.at("b"), partition)]
        assert [decode(PLACEMENTS, value).n for value in values] == list(range(partition, 400, 4))
    assert broker.batches <= 40


async def test_a_key_finds_its_partition_when_kafka_is_back(tmp_path: Path) -> None:
    broker = Broker()
    broker.away = True
    with Spool(tmp_path) as spool:
        async with sending(spool, broker) as sender:
            sender.put(DECISIONS, "b", DecisionEnvelope(site="b", replica="r", decisions=()), key="r")
            await asyncio.sleep(0.1)
            assert (broker.logs, spool.records) == ({}, 1)
            broker.away = False
            await sender.until_drained()
    assert [*broker.logs] == [(DECISIONS.at("b"), partition_of("r", DECISIONS.partitions))]


async def test_refusals_may_double_a_record_and_never_lose_or_reorder_one(tmp_path: Path) -> None:
    broker = Broker(chance=0.3)
    with Spool(tmp_path) as spool:
        async with sending(spool, broker) as sender:
            for n in range(60):
                sender.put(PLACEMENTS, "b", placement(n), partition=n % 2)
                await asyncio.sleep(0.002)
            await sender.until_drained()
    for partition in range(2):
        first_seen = list(dict.fromkeys(decode(PLACEMENTS, v).n for v in broker.logs[(PLACEMENTS.at("b"), partition)]))
        assert first_seen == list(range(partition, 60, 2))


async def test_what_a_dead_process_left_is_sent_by_the_next(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        Sender(spool, Broker()).put(PLACEMENTS, "b", placement(7), partition=1)
    broker = Broker()
    with Spool(tmp_path) as spool:
        assert spool.recovered == 1
        async with sending(spool, broker) as sender:
            await sender.until_drained()
    assert [decode(PLACEMENTS, value).n for value in broker.logs[(PLACEMENTS.at("b"), 1)]] == [7]


def test_what_can_not_be_addressed_or_encoded_is_said_at_once(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        sender = Sender(spool, Broker())
        with pytest.raises(BadRecordError, match="partition or a key"):
            sender.put(PLACEMENTS, "b", placement(1))
        with pytest.raises(BadRecordError, match="can't be encoded"):
            sender.put(PLACEMENTS, "b", msgspec.structs.replace(placement(1), replica="\ud800"), partition=0)
        assert spool.records == 0
