"""The servers that the fixtures start do what the tests rely on."""

import asyncio

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.kafka_server import Can, KafkaServer, OwnKafka, names_itself

pytestmark = pytest.mark.integration


async def create(bootstrap: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])
    finally:
        await admin.close()


async def write(bootstrap: str, topic: str, value: bytes) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        batch = producer.create_batch()
        batch.append(timestamp=None, key=None, value=value)
        await (await producer.send_batch(batch, topic, partition=0))
    finally:
        await producer.stop()


async def read(bootstrap: str, topic: str) -> list[bytes | None]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        read = await consumer.getmany(timeout_ms=20_000)
        return [record.value for records in read.values() for record in records]
    finally:
        await consumer.stop()


async def test_a_record_written_is_read(kafka: KafkaServer) -> None:
    await create(kafka.bootstrap, "servers.read")
    await write(kafka.bootstrap, "servers.read", b"seven")
    assert await read(kafka.bootstrap, "servers.read") == [b"seven"]


async def test_a_test_has_a_broker_of_its_own_to_kill_and_start_again(own_kafka: OwnKafka) -> None:
    own_kafka.needs(Can.KEEP)
    await create(own_kafka.bootstrap, "servers.kept")
    await write(own_kafka.bootstrap, "servers.kept", b"seven")
    own_kafka.kill9()
    assert not await names_itself(own_kafka.bootstrap)
    await own_kafka.start()
    assert await read(own_kafka.bootstrap, "servers.kept") == [b"seven"]


async def test_a_frozen_broker_is_silent_until_it_is_thawed(own_kafka: OwnKafka) -> None:
    own_kafka.freeze()
    assert not await names_itself(own_kafka.bootstrap)
    own_kafka.thaw()
    async with asyncio.timeout(60):  # its sessions ran out meanwhile: it comes to itself first
        while not await names_itself(own_kafka.bootstrap):
            await asyncio.sleep(0.1)


async def test_every_test_has_an_empty_database(database: str, postgres: str) -> None:
    assert database != postgres
    connection = await asyncpg.connect(database)
    try:
        tables = await connection.fetchval("select count(*) from pg_tables where schemaname = 'public'")
        assert tables == 0
    finally:
        await connection.close()
