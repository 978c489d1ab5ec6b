"""Dead letters: where a record that can't be used lies, and why; sent aside so that its partition goes on."""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from prometheus_client import Counter

from tokenfleet.adapters.clock import wall_s
from tokenfleet.core.deadletters import DeadLetter

WAITING_MAX = 10_000  # ~5 MiB; a broken writer at 1,000 records/s fills it in 10 s of an outage
SENT_AT_ONCE = 500
RETRY_S = 1.0
REASON_SHOWN_MAX = 300

REFUSED = Counter("tokenfleet_dead_letters_total", "Records that could not be used", ["topic"])
LOST = Counter("tokenfleet_dead_letters_lost_total", "Dead letters that found no room while Kafka was away")

logger = logging.getLogger(__name__)


class DeadLetters:
    """Letters waiting to be sent, oldest first. `refused` counts all, `lost` those that found no room."""

    def __init__(self, send: Callable[[list[DeadLetter]], Awaitable[object]], *, by: str) -> None:
        self.refused = 0
        self.lost = 0
        self._send, self._by = send, by
        self._waiting: deque[DeadLetter] = deque()
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def offer(self, topic: str, *, partition: int, offset: int, reason: str, value: bytes | None) -> None:
        """Note a record. Never waits and never raises; the payload leaves nothing but its digest and size."""
        self.refused += 1
        REFUSED.labels(topic).inc()
        if len(self._waiting) >= WAITING_MAX:
            self.lost += 1
            LOST.inc()
            return
        payload = value or b""
        letter = DeadLetter(
            topic=topic,
            partition=partition,
            offset=offset,
            reason=reason[:REASON_SHOWN_MAX],
            sha256=hashlib.sha256(payload).hexdigest(),
            size_bytes=len(payload),
            by=self._by,
            at_wall_s=wall_s(),
        )
        logger.warning("%s[%d]@%d refused: %s", topic, partition, offset, letter.reason)
        self._waiting.append(letter)
        self._wake.set()

    async def run(self) -> None:
        """Send letters until cancelled; what can't be sent is tried again for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                letters = [self._waiting[i] for i in range(min(SENT_AT_ONCE, len(self._waiting)))]
                try:
                    await self._send(letters)
                except Exception as error:  # whatever it is, the letters wait
                    logger.warning("%d dead letters wait: %r", len(self._waiting), error)
                    await asyncio.sleep(RETRY_S)
                    continue
                for _ in letters:
                    self._waiting.popleft()
