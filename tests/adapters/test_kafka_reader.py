"""Reader: what no broker shows at will: a stalled position, a leaked cancellation, an outage seen from inside."""

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from tokenfleet.adapters import kafka_reader
from tokenfleet.adapters.codec import encode, headers_of
from tokenfleet.adapters.deadletter import WAITING_MAX, DeadLetters
from tokenfleet.adapters.kafka_follower import Follower
from tokenfleet.adapters.kafka_link import KafkaAwayError, KafkaLink
from tokenfleet.adapters.kafka_reader import StalledError
from tokenfleet.adapters.kafka_reading import BEGINNING, Gate, Record
from tokenfleet.adapters.topics import PLACEMENTS, Topic
from tokenfleet.core.deadletters import DeadLetter
from tokenfleet.core.errors import BadRecordError
from tokenfleet.core.records import PlacementEnvelope


class ScriptedConsumer:
    """Hands out one log's records from where it is told to; each of `faults` is raised by one poll."""

    def __init__(self, log: list[bytes], faults: list[BaseException]) -> None:
        self.log, self.faults = log, faults
        self.at = 0
        self.stuck = False

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def assign(self, partitions: Iterable[TopicPartition]) -> None: ...

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.at = offset

    async def position(self, partition: TopicPartition) -> int:
        return self.at

    async def getmany(self, timeout_ms: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        await asyncio.sleep(0.001)
        if self.faults:
            raise self.faults.pop(0)
        new = [] if self.stuck else self.log[self.at :]
        tp = TopicPartition(PLACEMENTS.at("b"), 0)
        records = [record(offset, value) for offset, value in enumerate(new, self.at)]
        self.at += len(records)
        return {tp: records} if records else {}


def record(offset: int, value: bytes) -> ConsumerRecord:
    headers = list(headers_of(PLACEMENTS))
    return ConsumerRecord(PLACEMENTS.at("b"), 0, offset, 0, 0, None, value, None, 0, len(value), headers)  # pyright: ignore[reportCallIssue]


class ScriptedLink:
    """A link to one partition that is `away` when told so."""

    def __init__(self, log: list[bytes]) -> None:
        self.log = log
        self.cluster_id = "c1"
        self.away = False
        self.faults: list[BaseException] = []
        self.consumers: list[ScriptedConsumer] = []

    async def partitions(self, topic: Topic[PlacementEnvelope], site: str) -> int:
        return 1

    async def ends(self, name: str, partitions: Iterable[int]) -> dict[int, int]:
        if self.away:
            raise KafkaAwayError("away")
        return dict.fromkeys(partitions, len(self.log))

    async def begins(self, name: str, partitions: Iterable[int]) -> dict[int, int]:
        return dict.fromkeys(partitions, 0)

    def consumer(self, *, group: str = "", fetch_wait_s: float = 0.1) -> AIOKafkaConsumer:
        self.consumers.append(ScriptedConsumer(self.log, self.faults))
        return cast(AIOKafkaConsumer, self.consumers[-1])


def value(n: int) -> bytes:
    return encode(PLACEMENTS, PlacementEnvelope(site="b", replica="r", start="1", n=n, events=()))


class Table:
    """A follower on a scripted link, and what it was given."""

    def __init__(self, count: int) -> None:
        self.link = ScriptedLink([value(n) for n in range(count)])
        self.seen: list[tuple[int, bool]] = []
        self.read_at_s: list[float] = []
        self.on_first: Callable[[], None] = lambda: None  # called while the first record is taken in
        self.resets = self.readings = 0
        self.letters = DeadLetters(self._nowhere, by="t")
        self.follower = Follower(
            cast(KafkaLink, self.link),
            PLACEMENTS,
            "b",
            self._apply,
            start=BEGINNING,
            partitions=None,
            on_caught_up=self._caught_up,
            on_reset=self._reset,
            letters=self.letters,
        )
        self.task = asyncio.create_task(self.follower.run())

    def _apply(self, heard: Record[PlacementEnvelope]) -> None:
        if heard.message.n == 13:
            raise BadRecordError("unlucky")
        self.seen.append((heard.message.n, heard.live))
        self.read_at_s.append(heard.read_at_s)
        if len(self.seen) == 1:
            self.on_first()

    def _caught_up(self) -> None:
        self.readings += 1

    def _reset(self) -> None:
        self.resets += 1
        self.seen.clear()

    async def _nowhere(self, letters: list[DeadLetter]) -> None: ...

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCH_EVERY_S", "REBUILD_AFTER_S"):
        monkeypatch.setattr(kafka_reader, name, 0.01)


async def test_a_cancellation_that_aiokafka_leaks_does_not_end_the_reader() -> None:
    table = Table(3)
    table.link.faults.append(asyncio.CancelledError())
    await table.follower.until_caught_up()
    assert [n for n, _ in table.seen] == [0, 1, 2]
    assert len(table.link.consumers) == 2
    assert not table.task.done()
    await table.stop()
    assert table.task.cancelled()


async def test_after_an_error_it_reads_on_from_where_it_was() -> None:
    table = Table(3)
    await table.follower.until_caught_up()
    table.link.faults.append(ConnectionError("gone"))
    table.link.log.append(value(3))
    while len(table.seen) < 4:
        await asyncio.sleep(0.01)
    assert ([n for n, _ in table.seen], table.resets) == ([0, 1, 2, 3], 0)
    await table.stop()


async def test_an_outage_shuts_the_gate_until_the_end_is_known_again() -> None:
    table = Table(1)
    await table.follower.until_caught_up()
    table.link.away = True
    while table.follower.caught_up:
        await asyncio.sleep(0.01)
    table.link.log.append(value(1))
    while len(table.seen) < 2:
        await asyncio.sleep(0.01)
    assert table.seen[1] == (1, False)
    table.link.away = False
    await table.follower.until_caught_up()
    table.link.log.append(value(2))
    while len(table.seen) < 3:
        await asyncio.sleep(0.01)
    assert (table.seen[2], table.readings) == ((2, True), 2)
    await table.stop()


@pytest.mark.parametrize("how", ["shorter", "other cluster"])
async def test_another_log_is_read_anew(how: str) -> None:
    table = Table(5)
    await table.follower.until_caught_up()
    if how == "shorter":
        table.link.log[:] = [value(7)]
    else:
        table.link.log[:] = [value(7)] * 9
        table.link.cluster_id = "c2"
    while not table.resets or not table.seen:
        await asyncio.sleep(0.01)
    assert {n for n, _ in table.seen} == {7}
    await table.stop()


async def test_a_position_that_does_not_move_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_reader, "STALL_MAX_S", 0.05)
    table = Table(2)
    await table.follower.until_caught_up()
    await asyncio.sleep(0.1)
    assert not table.task.done(), "at the end of the log nothing moves, and nothing is stalled"
    table.link.consumers[-1].stuck = True
    table.link.log.append(value(2))
    with pytest.raises(StalledError, match="1 records behind"):
        await asyncio.wait_for(table.task, 10)


async def test_what_the_table_refuses_is_a_dead_letter() -> None:
    table = Table(15)
    await table.follower.until_caught_up()
    assert [n for n, _ in table.seen] == [*range(13), 14]
    assert table.letters.refused == 1
    await table.stop()


async def test_an_own_gap_makes_what_comes_next_of_unknown_age(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(1)
    await table.follower.until_caught_up()
    real = kafka_reader.monotonic_s
    monkeypatch.setattr(kafka_reader, "monotonic_s", lambda: real() + 30.0)  # the process slept for 30 s
    table.link.log.append(value(1))
    while len(table.seen) < 2:
        await asyncio.sleep(0.01)
    assert table.seen[1] == (1, False)
    await table.follower.until_caught_up()
    await table.stop()


async def test_a_pause_of_this_process_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(1)
    await table.follower.until_caught_up()
    table.link.consumers[-1].stuck = True
    table.link.log.append(value(1))  # written while we slept
    real = kafka_reader.monotonic_s
    monkeypatch.setattr(kafka_reader, "monotonic_s", lambda: real() + 2 * kafka_reader.STALL_MAX_S)
    await asyncio.sleep(0.2)
    assert not table.task.done()
    table.link.consumers[-1].stuck = False
    while len(table.seen) < 2:
        await asyncio.sleep(0.01)
    assert table.seen[1] == (1, False)
    await table.stop()


async def test_a_record_is_as_old_as_its_reading_when_a_pause_lies_before_its_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table(0)
    await table.follower.until_caught_up()
    real = kafka_reader.monotonic_s
    table.on_first = lambda: monkeypatch.setattr(kafka_reader, "monotonic_s", lambda: real() + 30.0)
    table.link.log += [value(0), value(1)]
    while len(table.seen) < 2:
        await asyncio.sleep(0.01)
    assert max(table.read_at_s) <= real()
    await table.stop()


def test_a_gate_opens_at_the_end_it_was_aimed_at() -> None:
    gate = Gate()
    gate.shut([0, 1])
    assert gate.unknown
    gate.reach(0, 100)
    gate.aim({0: 5, 1: 0, 2: 7})
    assert not gate.unknown
    gate.reach(1, 0)
    gate.reach(0, 4)
    assert (gate.is_open(0), gate.is_open(1), gate.is_open(2)) == (False, True, True)
    gate.aim({0: 50})  # later records do not move the end
    gate.reach(0, 5)
    assert gate.all_open


async def test_dead_letters_are_bounded_counted_and_sent_when_that_is_possible() -> None:
    sent: list[DeadLetter] = []
    refusals = [ConnectionError("away")]

    async def send(letters: list[DeadLetter]) -> None:
        if refusals:
            raise refusals.pop()
        sent.extend(letters)

    letters = DeadLetters(send, by="t")
    for offset in range(WAITING_MAX + 5):
        letters.offer("topic", partition=0, offset=offset, reason="why " * 200, value=b"payload")
    assert (letters.waiting, letters.refused, letters.lost) == (WAITING_MAX, WAITING_MAX + 5, 5)
    task = asyncio.create_task(letters.run())
    while letters.waiting:
        await asyncio.sleep(0.05)
    task.cancel()
    assert [letter.offset for letter in sent] == list(range(WAITING_MAX))
    assert all(len(letter.reason) <= 300 and "payload" not in str(letter) for letter in sent[:3])
