"""Kafka starts: at which offset a reader without a position of its own begins."""

from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.kafka_link import KafkaLink
from tokenfleet.adapters.kafka_reading import Start

PROBE_WAIT_S = 1.0  # for the newest record, when `ago` asks how old the log is
POLL_S = 0.2


async def offsets_for(
    start: Start, link: KafkaLink, consumer: AIOKafkaConsumer, name: str, ends: Mapping[int, int]
) -> dict[int, int]:
    """Where to begin in each partition of `ends`. The consumer must have them assigned. Raises KafkaAwayError."""
    if start.kind == "end" or not ends:
        return dict(ends)
    begins = await link.begins(name, ends)
    if start.kind == "beginning":
        return begins
    last = {p: max(begins[p], ends[p] - 1) for p in ends}
    if start.kind == "last":
        return last
    newest = await newest_records(consumer, name, {p: at for p, at in last.items() if ends[p] > begins[p]})
    asked = {p: max(0, raw.timestamp - round(start.seconds * 1000)) for p, raw in newest.items()}
    found = await link.offsets_at(name, asked) if asked else {}
    return begins | {p: begins[p] if at is None else at for p, at in found.items()}


async def newest_records(consumer: AIOKafkaConsumer, name: str, last: Mapping[int, int]) -> dict[int, ConsumerRecord]:
    """The newest record of each partition, found from the offsets `end - 1`; absent when it can't be had in time."""
    for partition, offset in last.items():
        consumer.seek(TopicPartition(name, partition), offset)
    newest: dict[int, ConsumerRecord] = {}
    give_up_s = monotonic_s() + PROBE_WAIT_S
    while newest.keys() < last.keys() and monotonic_s() < give_up_s:
        missing = [TopicPartition(name, p) for p in last if p not in newest]
        for tp, batch in (await consumer.getmany(*missing, timeout_ms=round(POLL_S * 1000))).items():
            newest[tp.partition] = batch[-1]
    return newest
