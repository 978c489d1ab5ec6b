"""Kafka: readers miss nothing, refuse bad records one by one, and come back after the broker's death."""

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from prometheus_client import REGISTRY

from tests import kafka_server
from tests.kafka_server import Can, KafkaServer, OwnKafka
from tokenfleet.adapters import kafka_admin
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_link import KafkaAwayError
from tokenfleet.adapters.kafka_reader import Reader
from tokenfleet.adapters.kafka_reading import BEGINNING, END, LAST, Record, ago
from tokenfleet.adapters.topics import CONTROL, DEADLETTER, OUTCOMES, PLACEMENTS, RECORD_BYTES_MAX, TOPICS, Topic
from tokenfleet.core.deadletters import DeadLetter
from tokenfleet.core.errors import BadRecordError, SetupError
from tokenfleet.core.records import Control, PlacementEnvelope
from tokenfleet.local.broker import DEATH_NOTICED_WITHIN_S

pytestmark = pytest.mark.integration
WAIT_MAX_S = 60.0  # far above what it takes: a machine under load must not fail the test
SMALL = (CONTROL, PLACEMENTS, DEADLETTER)


def envelope(n: int) -> PlacementEnvelope:
    return PlacementEnvelope(site="b", replica="r1", start="s", n=n, events=())


@contextlib.asynccontextmanager
async def reading(reader: Reader[PlacementEnvelope] | Reader[Control]) -> AsyncGenerator[None]:
    """The reader at work, caught up for the first time."""
    task = asyncio.create_task(reader.run())
    try:
        await until(lambda: reader.caught_up or task.done())
        if task.done():
            task.result()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_MAX_S):
        while not true():
            await asyncio.sleep(0.02)


@pytest.fixture
async def site(kafka: KafkaServer) -> str:
    """A site of this test's own, with its topics."""
    name = f"t{uuid.uuid4().hex[:10]}"
    await kafka_admin.apply(kafka.bootstrap, [name], topics=SMALL)
    return name


@pytest.fixture
async def client(kafka: KafkaServer) -> AsyncIterator[Kafka]:
    async with Kafka(kafka.bootstrap, client_id="test") as connected:
        yield connected


async def test_a_batch_arrives_in_order_and_is_live_only_after_the_gate(client: Kafka, site: str) -> None:
    first = await client.send(PLACEMENTS, site, [envelope(n) for n in range(5)], partition=1)
    seen: list[tuple[int, int, bool]] = []
    reader = client.follower(
        PLACEMENTS, site, lambda r: seen.append((r.partition, r.message.n, r.live)), start=BEGINNING
    )
    async with reading(reader):
        assert seen == [(1, n, False) for n in range(5)]
        assert await client.send(PLACEMENTS, site, [envelope(5)], partition=1) == first + 5
        await until(lambda: len(seen) == 6)
        assert seen[5] == (1, 5, True)
        assert reader.lag == 0
        assert reader.last_heard_s is not None


async def test_where_a_reader_begins(client: Kafka, site: str) -> None:
    await client.send(PLACEMENTS, site, [envelope(0), envelope(1)], partition=0)
    await client.send(PLACEMENTS, site, [envelope(2)], partition=0)

    async def seen_from(start: object) -> list[int]:
        seen: list[int] = []
        follower = client.follower(PLACEMENTS, site, lambda r: seen.append(r.message.n), start=start)  # pyright: ignore[reportArgumentType]
        async with reading(follower):
            return list(seen)

    assert await seen_from(BEGINNING) == [0, 1, 2]
    assert await seen_from(ago(900)) == [0, 1, 2]
    assert await seen_from(LAST) == [2]
    assert set(await seen_from(END)) <= {2}  # the embedded broker tells the last batch's base as the end


async def test_catching_up_misses_nothing_in_25_rounds(client: Kafka, site: str) -> None:
    """A reader that says caught up has every record that was confirmed before it began."""
    sent = 0
    for _ in range(25):
        await client.send(PLACEMENTS, site, [envelope(sent + i) for i in range(7)], partition=1)
        sent += 7
        seen: list[int] = []
        async with reading(client.follower(PLACEMENTS, site, lambda r, s=seen: s.append(r.message.n), start=BEGINNING)):
            assert seen == list(range(sent))


async def test_a_bad_record_in_a_batch_becomes_a_dead_letter_and_the_rest_goes_on(client: Kafka, site: str) -> None:
    good = [msgspec.msgpack.encode(envelope(n)) for n in range(2)]
    secret = b"\x81\xa6prompt\xc4\x06secret"
    base = await client.send_values(PLACEMENTS, site, [good[0], secret, good[1]], partition=1)
    seen: list[int] = []
    letters: list[DeadLetter] = []
    name = PLACEMENTS.at(site)
    dead = client.follower(DEADLETTER, "", lambda r: letters.append(r.message), start=BEGINNING)
    task = asyncio.create_task(dead.run())
    async with reading(client.follower(PLACEMENTS, site, lambda r: seen.append(r.message.n), start=BEGINNING)):
        assert seen == [0, 1]
    await until(lambda: any(letter.topic == name for letter in letters))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    [letter] = [letter for letter in letters if letter.topic == name]
    assert (letter.partition, letter.offset, letter.size_bytes) == (1, base + 1, len(secret))
    assert letter.sha256 == hashlib.sha256(secret).hexdigest()
    assert "secret" not in str(letter)


async def test_a_record_larger_than_the_limit_does_not_stop_its_partition(client: Kafka, site: str) -> None:
    small = msgspec.msgpack.encode(envelope(1))
    await client.send_values(PLACEMENTS, site, [b"\x00" * (RECORD_BYTES_MAX + 1)], partition=0)
    await client.send_values(PLACEMENTS, site, [small], partition=0)
    refused = client.dead_letters.refused
    seen: list[int] = []
    async with reading(client.follower(PLACEMENTS, site, lambda r: seen.append(r.message.n), start=BEGINNING)):
        assert seen == [1]
    assert client.dead_letters.refused == refused + 1
    assert REGISTRY.get_sample_value("tokenfleet_dead_letters_total", {"topic": PLACEMENTS.at(site)}) == 1


async def test_a_record_that_the_taker_can_not_bear_is_refused_and_the_next_is_taken(client: Kafka, site: str) -> None:
    await client.send(PLACEMENTS, site, [envelope(n) for n in range(2)], partition=0)
    refused = client.dead_letters.refused
    seen: list[int] = []

    def take(record: Record[PlacementEnvelope]) -> None:
        seen.append(1 // record.message.n)

    async with reading(client.follower(PLACEMENTS, site, take, start=BEGINNING)):
        assert seen == [1]
    assert client.dead_letters.refused == refused + 1


async def test_what_can_not_be_sent_says_why(client: Kafka, site: str) -> None:
    with pytest.raises(SetupError, match="topics apply"):
        await client.send(PLACEMENTS, "nowhere", [envelope(1)], partition=0)
    with pytest.raises(SetupError, match="no partition 9"):
        await client.send(PLACEMENTS, site, [envelope(1)], partition=9)
    with pytest.raises(BadRecordError, match="needs a key"):
        await client.send(CONTROL, site, [Control(instance="i")], partition=0)
    with pytest.raises(SetupError, match="topics apply"):
        await client.follower(OUTCOMES, site, lambda _: None).run()


async def test_a_lone_worker_goes_on_behind_what_it_committed(client: Kafka, site: str) -> None:
    seen: list[int] = []

    async def handle(records: Sequence[Record[PlacementEnvelope]]) -> None:
        seen.extend(r.message.n for r in records)

    await client.send(PLACEMENTS, site, [envelope(0), envelope(1)], partition=0)
    async with reading(client.lone_worker(PLACEMENTS, site, handle, group=site)):
        assert seen == [0, 1]
    await client.send(PLACEMENTS, site, [envelope(2), envelope(3)], partition=0)
    async with reading(client.lone_worker(PLACEMENTS, site, handle, group=site)):
        assert seen == [0, 1, 2, 3]
    async with reading(client.lone_worker(PLACEMENTS, site, handle, group=site)):
        assert seen == [0, 1, 2, 3]


async def test_a_worker_whose_database_is_away_gets_the_same_records_again(client: Kafka, site: str) -> None:
    await client.send(PLACEMENTS, site, [envelope(n) for n in range(3)], partition=0)
    tries: list[list[int]] = []

    async def handle(records: Sequence[Record[PlacementEnvelope]]) -> None:
        tries.append([r.message.n for r in records])
        if len(tries) == 1:
            raise ConnectionError("the database is away")

    async with reading(client.lone_worker(PLACEMENTS, site, handle, group=site)):
        assert tries == [[0, 1, 2], [0, 1, 2]]


class Member:
    """One worker of a shared group and what it was told."""

    def __init__(self, client: Kafka, site: str, seen: list[int]) -> None:
        self.gained: list[int] = []
        self.lost: list[int] = []
        self.settled: list[list[int]] = []
        self.seen = seen
        self.worker = client.shared_worker(
            PLACEMENTS,
            site,
            self.handle,
            group=site,
            on_assigned=self.gain,
            on_lost=self.lose,
            on_settled=self.settle,
        )

    async def handle(self, records: Sequence[Record[PlacementEnvelope]]) -> None:
        self.seen.extend(r.message.n for r in records)

    async def gain(self, partitions: Sequence[int]) -> None:
        self.gained.extend(partitions)

    async def lose(self, partitions: Sequence[int]) -> None:
        self.lost.extend(partitions)

    async def settle(self, partitions: Sequence[int]) -> None:
        self.settled.append(list(partitions))


async def test_a_rebalance_loses_no_record(client: Kafka, site: str) -> None:
    """Two share, one leaves: every record is seen by one of them at least, each partition has one owner."""
    seen: list[int] = []
    one, two = Member(client, site, seen), Member(client, site, seen)
    everything = tuple(range(PLACEMENTS.partitions))
    sent = 0

    async def send_round() -> None:
        nonlocal sent
        for partition in everything:
            await client.send(PLACEMENTS, site, [envelope(sent)], partition=partition)
            sent += 1

    first = asyncio.create_task(one.worker.run())
    await until(lambda: one.worker.partitions == everything)
    await send_round()
    second = asyncio.create_task(two.worker.run())
    while not two.worker.partitions:
        await send_round()
        await asyncio.sleep(0.1)
    await until(lambda: set(one.worker.partitions) | set(two.worker.partitions) == set(everything))
    await until(lambda: not set(one.worker.partitions) & set(two.worker.partitions))
    assert set(one.lost) == set(two.worker.partitions) == set(two.gained)
    assert [one.settled[0], one.settled[-1]] == [list(everything), list(one.worker.partitions)]  # what it kept, too
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await send_round()
    await until(lambda: two.worker.partitions == everything)
    await until(lambda: set(seen) == set(range(sent)))
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)


async def apply_anew(own: OwnKafka, site: str) -> None:
    await kafka_admin.apply(own.bootstrap, [site], topics=SMALL, recreate_wrong=True)


async def test_a_log_that_began_anew_is_read_anew(own_kafka: OwnKafka) -> None:
    """The embedded broker forgets everything with its death: the table is told, and filled from the new log."""
    if own_kafka.server.kind != "tansu":
        pytest.skip("only the embedded broker forgets its log")
    await apply_anew(own_kafka, "b")
    table: list[int] = []
    async with Kafka(own_kafka.bootstrap, client_id="t") as client:
        cluster = client.cluster_id
        for _ in range(3):
            await client.send(PLACEMENTS, "b", [envelope(1)], partition=0)
        follower = client.follower(
            PLACEMENTS, "b", lambda r: table.append(r.message.n), start=BEGINNING, on_reset=table.clear
        )
        async with reading(follower):
            assert table == [1, 1, 1]
            own_kafka.kill9()
            with pytest.raises(KafkaAwayError):
                await client.send(PLACEMENTS, "b", [envelope(2)], partition=0, timeout_s=0.5)
            await own_kafka.start()
            await apply_anew(own_kafka, "b")
            await until_sent(lambda: client.send(PLACEMENTS, "b", [envelope(3)], partition=0))
            await until(lambda: 3 in table)
            assert 1 not in table
            await until(lambda: follower.caught_up)
            assert client.cluster_id != cluster


async def test_a_frozen_broker_shuts_the_gate_and_what_comes_then_is_live_again(own_kafka: OwnKafka) -> None:
    await apply_anew(own_kafka, "b")
    seen: list[tuple[int, bool]] = []
    async with Kafka(own_kafka.bootstrap, client_id="t") as client:
        follower = client.follower(PLACEMENTS, "b", lambda r: seen.append((r.message.n, r.live)))
        async with reading(follower):
            own_kafka.freeze()
            await until(lambda: not follower.caught_up)
            own_kafka.thaw()
            await until(lambda: follower.caught_up)
            await until_sent(lambda: client.send(PLACEMENTS, "b", [envelope(1)], partition=0))
            await until(lambda: (1, True) in seen)


async def test_a_broker_killed_and_back_loses_nothing_that_it_confirmed(own_kafka: OwnKafka) -> None:
    own_kafka.needs(Can.KEEP)
    await apply_anew(own_kafka, "b")
    seen: list[int] = []
    async with Kafka(own_kafka.bootstrap, client_id="t") as client:
        await client.send(PLACEMENTS, "b", [envelope(n) for n in range(10)], partition=0)
        async with reading(client.follower(PLACEMENTS, "b", lambda r: seen.append(r.message.n), start=BEGINNING)):
            own_kafka.kill9()
            await own_kafka.start()
            await until_sent(lambda: client.send(PLACEMENTS, "b", [envelope(10)], partition=0))
            await until(lambda: 10 in seen)
            assert seen[:11] == list(range(11))  # read on, not anew


async def until_sent(send: Callable[[], Awaitable[int]]) -> None:
    async with asyncio.timeout(WAIT_MAX_S):
        while True:
            try:
                await send()
                return
            except (KafkaAwayError, SetupError):
                await asyncio.sleep(0.1)


async def test_apply_creates_compares_and_says_the_remedy(kafka: KafkaServer) -> None:
    site = f"t{uuid.uuid4().hex[:10]}"
    created = await kafka_admin.apply(kafka.bootstrap, [site])
    assert len(created) == len(TOPICS)
    assert {result.state for result in created if site in result.name} == {"created"}
    assert {result.state for result in await kafka_admin.apply(kafka.bootstrap, [site])} == {"ok"}
    wider: Topic[PlacementEnvelope] = msgspec.structs.replace(PLACEMENTS, partitions=6)
    [wrong] = await kafka_admin.apply(kafka.bootstrap, [site], topics=[wider])
    assert (wrong.state, wrong.partitions) == ("wrong", PLACEMENTS.partitions)
    assert f"--partitions placements={PLACEMENTS.partitions}" in wrong.remedy
    [again] = await kafka_admin.apply(kafka.bootstrap, [site], topics=[wider], recreate_wrong=True)
    assert again.state == "recreated"
    assert [result.state for result in await kafka_admin.apply(kafka.bootstrap, [site], topics=[wider])] == ["ok"]


async def test_a_broker_that_lost_its_topics_gets_no_record_before_they_are_back(tmp_path: Path) -> None:
    broker = kafka_server.tansu(tmp_path)  # it takes records of topics that it lacks, and is broken by them
    await broker.start()
    try:
        await kafka_admin.apply(broker.bootstrap, ["b"], topics=SMALL)
        async with Kafka(broker.bootstrap, client_id="writes") as client:
            await client.send(PLACEMENTS, "b", [envelope(1)], partition=0)
            broker.kill9()
            with pytest.raises(KafkaAwayError):
                await client.send(PLACEMENTS, "b", [envelope(2)], partition=0)
            await asyncio.sleep(DEATH_NOTICED_WITHIN_S)
            await broker.start()
            with pytest.raises(KafkaAwayError):
                await client.send(PLACEMENTS, "b", [envelope(3)], partition=0)
            await kafka_admin.apply(broker.bootstrap, ["b"], topics=SMALL)
            await client.send(PLACEMENTS, "b", [envelope(4)], partition=0, timeout_s=WAIT_MAX_S)
            seen: list[int] = []
            follower = client.follower(PLACEMENTS, "b", lambda record: seen.append(record.message.n), start=BEGINNING)
            async with reading(follower):
                assert seen == [4]
    finally:
        await broker.stop()


async def test_asking_for_a_topic_does_not_create_it(tmp_path: Path) -> None:
    broker = kafka_server.tansu(tmp_path)  # it creates what clients ask for, if they let it
    await broker.start()
    try:
        async with Kafka(broker.bootstrap, client_id="asks") as client:
            consumer = client.consumer()
            await consumer.start()
            consumer.assign([TopicPartition("tokenfleet.nowhere.v1", 0)])
            await consumer.getmany(timeout_ms=300)
            await consumer.stop()
        applied = await kafka_admin.apply(broker.bootstrap, ["nowhere"], topics=SMALL)
        assert {each.state for each in applied} == {"created"}
        admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
        await admin.start()
        assert "tokenfleet.nowhere.v1" not in {each["topic"] for each in await admin.describe_topics()}
        await admin.close()
    finally:
        await broker.stop()


async def test_apply_without_a_broker_says_so(unused_tcp_port: int) -> None:
    with pytest.raises(SetupError, match=str(unused_tcp_port)):
        await kafka_admin.apply(f"127.0.0.1:{unused_tcp_port}", ["b"])


async def test_a_client_without_a_broker_says_so(unused_tcp_port: int) -> None:
    with pytest.raises(SetupError, match=str(unused_tcp_port)):
        async with Kafka(f"127.0.0.1:{unused_tcp_port}", client_id="t", wait_max_s=0.3):
            raise AssertionError("nobody is there")


async def test_leaving_while_the_broker_is_dead_takes_no_longer_than_its_budget(own_kafka: OwnKafka) -> None:
    await apply_anew(own_kafka, "b")
    client = await Kafka(own_kafka.bootstrap, client_id="t").__aenter__()
    async with reading(client.follower(PLACEMENTS, "b", lambda _: None)):
        own_kafka.kill9()
        with pytest.raises(KafkaAwayError):
            await client.send(PLACEMENTS, "b", [envelope(1)], partition=0, timeout_s=0.5)
    async with asyncio.timeout(WAIT_MAX_S / 2):
        await client.__aexit__(None, None, None)
