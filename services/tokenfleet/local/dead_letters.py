"""Dead letters: how many records this run could not use, read from their topic."""

import asyncio

from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_reading import Record, ago
from tokenfleet.adapters.topics import DEADLETTER
from tokenfleet.core.deadletters import DeadLetter
from tokenfleet.core.errors import SetupError

WAIT_MAX_S = 5.0
SLACK_S = 5.0  # read from a little earlier; the letters' own labels decide


async def count_dead_letters(kafka: str, *, since_wall_s: float) -> int | None:
    """None when the topic can't be read to its end."""
    letters: set[tuple[str, int, int]] = set()

    def take(record: Record[DeadLetter]) -> None:
        if record.message.at_wall_s >= since_wall_s:
            letters.add((record.message.topic, record.message.partition, record.message.offset))

    try:
        async with asyncio.timeout(WAIT_MAX_S), Kafka(kafka, client_id="up", wait_max_s=WAIT_MAX_S) as link:
            follower = link.follower(DEADLETTER, "", take, start=ago(wall_s() - since_wall_s + SLACK_S))
            await follower.read_to_end()
    except (TimeoutError, SetupError, OSError):
        return None
    return len(letters)
