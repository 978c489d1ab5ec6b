"""Kafka admin: bring the brokers' topics to the table's shape, and say in words what that needs.

`create_topics` never raises for one topic: its errors stand in the response, so what exists is described afterwards
and compared.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Literal

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, for_code
from msgspec import Struct

from tokenfleet.adapters.kafka_link import no_broker
from tokenfleet.adapters.topics import RECORD_BYTES_MAX, TOPICS, Topic
from tokenfleet.core.errors import SetupError

TOPIC_EXISTS = 36  # kafka.apache.org/protocol, error codes
REQUEST_TIMEOUT_S = 15.0
GONE_WAIT_S = 10.0
SEEN_WAIT_S = 10.0
ASK_AGAIN_S = 0.1
MESSAGE_BYTES_MAX = RECORD_BYTES_MAX + 64 * 1024  # a batch's framing, keys and headers come on top of the record


class Applied(Struct, frozen=True, kw_only=True):
    """What became of one topic; `remedy` says what to do about a wrong one."""

    name: str
    state: Literal["created", "ok", "recreated", "wrong"]
    partitions: int
    problem: str = ""
    remedy: str = ""


async def apply(
    bootstrap: str,
    sites: Iterable[str],
    *,
    topics: Sequence[Topic[Struct]] = TOPICS,
    replication: int = 1,
    recreate_wrong: bool = False,
) -> tuple[Applied, ...]:
    """Create what is missing and compare what exists, one result a topic in the table's order.

    `recreate_wrong` deletes topics with another partition count and creates them anew, records lost: for the embedded
    broker, which makes up topics that clients ask for. Raises SetupError when the brokers don't answer.
    """
    wanted = {topic.at(site): topic for topic, site in placed(sites, topics)}
    try:
        async with _admin(bootstrap) as admin:
            refused = await _create(admin, wanted, replication)
            results = await _compare(admin, wanted, refused)
            wrong = [result.name for result in results if result.state == "wrong" and result.partitions]
            if recreate_wrong and wrong:
                await _delete(admin, wrong)
                again = await _create(admin, {name: wanted[name] for name in wrong}, replication)
                refused = {name: why for name, why in refused.items() if name not in wrong} | again
                results = await _compare(admin, wanted, refused)
                results = tuple(_renamed(result, wrong) for result in results)
            return results
    except (KafkaError, OSError, TimeoutError) as error:
        raise SetupError(no_broker(bootstrap, error)) from error


def placed(sites: Iterable[str], topics: Sequence[Topic[Struct]] = TOPICS) -> list[tuple[Topic[Struct], str]]:
    """Every topic that exists: each per-site one at each site, the others once with the site ''."""
    names = list(sites)
    return [(topic, site) for topic in topics for site in (names if topic.per_site else [""])]


def config_of(topic: Topic[Struct]) -> dict[str, str]:
    """The topic's settings on the brokers. Times of records are the brokers', so a writer's clock spoils nothing."""
    kept_ms = str(round(topic.retention_s * 1000))
    common = {"max.message.bytes": str(MESSAGE_BYTES_MAX), "message.timestamp.type": "LogAppendTime"}
    if topic.compacted:
        # The active segment is never compacted, so it is closed early; a reader needs the last batch only.
        roll_ms = str(round(min(topic.retention_s, 600.0) * 1000))
        return common | {
            "cleanup.policy": "compact",
            "segment.ms": roll_ms,
            "max.compaction.lag.ms": kept_ms,
            "min.cleanable.dirty.ratio": "0.1",
            "delete.retention.ms": kept_ms,
        }
    segment_ms = str(round(max(topic.retention_s / 4, 30.0) * 1000))
    return common | {"cleanup.policy": "delete", "retention.ms": kept_ms, "segment.ms": segment_ms}


@contextlib.asynccontextmanager
async def _admin(bootstrap: str) -> AsyncGenerator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=round(REQUEST_TIMEOUT_S * 1000))
    try:
        async with asyncio.timeout(2 * REQUEST_TIMEOUT_S):
            await admin.start()
            yield admin
    finally:
        await admin.close()


async def _create(admin: AIOKafkaAdminClient, wanted: dict[str, Topic[Struct]], replication: int) -> dict[str, str]:
    """Ask for all; the refusals by name, in words ('' where the topic exists already)."""
    new = [
        NewTopic(name, topic.partitions, replication, topic_configs=config_of(topic)) for name, topic in wanted.items()
    ]
    response = await admin.create_topics(new)
    refused: dict[str, str] = {}
    for name, code, *told in response.topic_errors:
        if code == TOPIC_EXISTS:
            refused[name] = ""
        elif code:
            refused[name] = f"{for_code(code).__name__}: {(told[0] if told else None) or 'no reason given'}"
    return refused


async def _delete(admin: AIOKafkaAdminClient, names: list[str]) -> None:
    """Delete and wait until they are gone. Raises TimeoutError."""
    await admin.delete_topics(names)
    async with asyncio.timeout(GONE_WAIT_S):
        while (await _counts(admin)).keys() & set(names):
            await asyncio.sleep(ASK_AGAIN_S)


async def _counts(admin: AIOKafkaAdminClient) -> dict[str, int]:
    found = await admin.describe_topics()
    return {str(topic["topic"]): len(topic["partitions"]) for topic in found if not topic["error_code"]}


async def _compare(
    admin: AIOKafkaAdminClient, wanted: dict[str, Topic[Struct]], refused: dict[str, str]
) -> tuple[Applied, ...]:
    created = wanted.keys() - refused.keys()
    counts = await _counts(admin)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SEEN_WAIT_S):
            while created - counts.keys():  # a broker learns of new topics a little after the controller
                await asyncio.sleep(ASK_AGAIN_S)
                counts = await _counts(admin)
    return tuple(
        _compared(name, topic, refused.get(name, ""), counts.get(name, 0), created=name in created)
        for name, topic in wanted.items()
    )


def _compared(name: str, topic: Topic[Struct], refusal: str, count: int, *, created: bool) -> Applied:
    if count == topic.partitions:
        return Applied(name=name, state="created" if created else "ok", partitions=topic.partitions)
    if not count:
        return Applied(
            name=name,
            state="wrong",
            partitions=0,
            problem=f"can't be created: {refusal or 'it does not appear'}",
            remedy="check replication against the number of brokers, and this user's right to create topics",
        )
    return Applied(
        name=name,
        state="wrong",
        partitions=count,
        problem=f"has {count} partitions, {topic.partitions} are wanted",
        remedy=f"apply with --partitions {topic.name}={count}, or stop everything, delete the topic and apply again",
    )


def _renamed(result: Applied, recreated: Sequence[str]) -> Applied:
    if result.name not in recreated or result.state == "wrong":
        return result
    return Applied(name=result.name, state="recreated", partitions=result.partitions)
