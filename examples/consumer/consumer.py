"""Consumer: follows TokenFleet's decisions, outcomes and goodput on Kafka, and prints a running count.

    python consumer.py --kafka 127.0.0.1:9092

It knows TokenFleet by schemas/ alone: topics from asyncapi.yaml, each record checked against its JSON Schema. A
record that breaks its schema is named and passed over; fields that the schema does not know are ignored.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from contract import Channel, RefusedError, channels
from counts import Counts

SCHEMAS = Path(__file__).resolve().parent.parent.parent / "schemas"
NAMES = ("decisions", "outcomes", "goodput")
PRINT_PERIOD_S = 1.0
POLL_MS = 200


async def follow(
    kafka: str, known: dict[str, Channel], counts: Counts, *, from_beginning: bool, until_s: float
) -> None:
    """Counts until the monotonic time `until_s` or a signal. Reads every partition itself, without a group."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    partitions = await partitions_of(kafka, known)
    if not partitions:
        sys.exit(f"no topic of {', '.join(known)} there: is this TokenFleet's Kafka?")
    async with AIOKafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False) as consumer:
        consumer.assign(set(partitions))
        await (consumer.seek_to_beginning() if from_beginning else consumer.seek_to_end())
        print(f"following {len(partitions)} partitions", flush=True)
        printed_s = 0.0
        while not stop.is_set() and time.monotonic() < until_s:
            for partition, records in (await consumer.getmany(timeout_ms=POLL_MS)).items():
                for record in records:
                    take(record, partitions[partition], counts)
            if time.monotonic() - printed_s >= PRINT_PERIOD_S:
                printed_s = time.monotonic()
                print(counts.line(), flush=True)


async def partitions_of(kafka: str, known: dict[str, Channel]) -> dict[TopicPartition, Channel]:
    """All partitions of all topics of the channels that are there now."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        topics = await admin.describe_topics()
    finally:
        await admin.close()
    return {
        TopicPartition(topic["topic"], partition["partition"]): channel
        for channel in known.values()
        for topic in topics
        if channel.owns(topic["topic"])
        for partition in topic["partitions"]
    }


def take(record, channel: Channel, counts: Counts) -> None:
    try:
        counts.take(channel.name, channel.read(record.value, dict(record.headers)))
    except RefusedError as problem:
        counts.refused += 1
        print(f"refused {record.topic}/{record.partition} at {record.offset}: {problem}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Count what TokenFleet decides and what comes of it.")
    parser.add_argument("--kafka", required=True, help="HOST:PORT")
    parser.add_argument("--schemas", type=Path, default=SCHEMAS)
    parser.add_argument("--for", dest="for_s", type=float, default=float("inf"), help="seconds, then end")
    parser.add_argument("--from-beginning", action="store_true", help="all that the topics still hold")
    asked = parser.parse_args()
    known = channels(asked.schemas, NAMES)
    counts, until_s = Counts(), time.monotonic() + asked.for_s
    try:
        with contextlib.suppress(asyncio.CancelledError):  # aiokafka's stop() can raise one that nobody asked for
            asyncio.run(follow(asked.kafka, known, counts, from_beginning=asked.from_beginning, until_s=until_s))
    except KafkaError as error:
        sys.exit(f"{asked.kafka}: {error}")
    print(f"total: {counts.line()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
