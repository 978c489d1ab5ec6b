"""Audit: all decisions, outcomes, policy revisions and changes of shares as rows of PostgreSQL; the Audit service.

The one writer reads by assignment and commits what is written. While PostgreSQL is away it neither reads on nor
commits: Kafka is the spool, for as long as it keeps the topics (7 days). Rows come twice after a kill; keys make that
a no-op.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import uvloop
from prometheus_client import Counter, Gauge

from tokenfleet.adapters.audit_rows import decision_items, goodput_items, outcome_items, revision_items, share_items
from tokenfleet.adapters.audit_service import SERVICE_NAME, AuditService, register
from tokenfleet.adapters.audit_store import AuditStore
from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.credentials import credentials_of
from tokenfleet.adapters.grpc_server import GrpcServer
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.adapters.kafka_workers import LoneWorker
from tokenfleet.adapters.postgres import Postgres, PostgresAwayError
from tokenfleet.adapters.running import run_process, watched
from tokenfleet.adapters.safe_text import day_of
from tokenfleet.adapters.settings import AuditSettings
from tokenfleet.adapters.status import Status
from tokenfleet.adapters.topics import DECISIONS, GOODPUT, OUTCOMES, POLICY
from tokenfleet.core.accounts import GoodputPartial
from tokenfleet.core.errors import SetupError
from tokenfleet.core.records import DecisionEnvelope, OutcomeEnvelope
from tokenfleet.core.revisions import PolicyRecord

GROUP: Final = "audit"
RETRY_FIRST_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
ASK_EVERY_S: Final = 1.0
DROP_EVERY_S: Final = 3600.0

ROWS = Counter("tokenfleet_audit_rows_total", "Rows written; rows that were there already count too", ["table"])
QUARANTINED = Gauge("tokenfleet_audit_quarantined_rows", "Rows that PostgreSQL refused since this process started")

log = logging.getLogger(__name__)


class Writer:
    """Writes batches; one that PostgreSQL is away for is tried again until it is written."""

    def __init__(self, store: AuditStore) -> None:
        self._store = store
        self._away_since_s: float | None = None
        self._away_because = ""

    async def decisions(self, records: Sequence[Record[DecisionEnvelope]]) -> None:
        items = decision_items(records)
        await self._write(lambda: self._store.add_decisions(items, today=day_of(wall_s())))
        ROWS.labels("decisions").inc(len(items))

    async def outcomes(self, records: Sequence[Record[OutcomeEnvelope]]) -> None:
        items = outcome_items(records)
        await self._write(lambda: self._store.add_outcomes(items, today=day_of(wall_s())))
        ROWS.labels("outcomes").inc(len(items))

    async def goodput(self, records: Sequence[Record[GoodputPartial]]) -> None:
        items = goodput_items(records)
        await self._write(lambda: self._store.add_goodput(items))
        ROWS.labels("goodput").inc(len(items))

    async def revisions(self, records: Sequence[Record[PolicyRecord]]) -> None:
        items = revision_items(records)
        await self._write(lambda: self._store.add_revisions(items))
        ROWS.labels("policy_revisions").inc(len(items))
        changes = share_items(records)
        await self._write(lambda: self._store.add_share_changes(changes))
        ROWS.labels("share_changes").inc(len(changes))

    def state(self) -> tuple[bool, str]:
        """For /health: not ready while PostgreSQL is away."""
        if self._away_since_s is not None:
            away_s = monotonic_s() - self._away_since_s
            return False, f"away for {away_s:.0f} s, nothing is lost while Kafka keeps it: {self._away_because}"
        quarantined = self._store.quarantined
        return True, f"{quarantined} rows quarantined" if quarantined else "answers"

    @property
    def answers(self) -> bool:
        return self._away_since_s is None

    async def ask(self) -> None:
        """Find out whether PostgreSQL answers."""
        try:
            await self._store.ask()
        except PostgresAwayError as error:
            self._away(error)
        else:
            self._back()

    async def _write(self, write: Callable[[], Awaitable[None]]) -> None:
        wait_s = RETRY_FIRST_S
        while True:
            try:
                await write()
            except PostgresAwayError as error:
                self._away(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
            else:
                self._back()
                QUARANTINED.set(self._store.quarantined)
                return

    def _away(self, error: PostgresAwayError) -> None:
        self._away_because = str(error)
        if self._away_since_s is None:
            self._away_since_s = monotonic_s()
            log.warning("PostgreSQL is away; reading stops until it is back: %s", error)

    def _back(self) -> None:
        if self._away_since_s is not None:
            log.warning("PostgreSQL is back after %.0f s", monotonic_s() - self._away_since_s)
            self._away_since_s = None


async def run(settings: AuditSettings) -> None:
    """Write and answer until SIGTERM. Raises SetupError without a site."""
    if not settings.sites:
        raise SetupError("TOKENFLEET_SITES: name the sites whose decisions and outcomes are kept")
    credentials = credentials_of(settings.credentials)
    status = Status("audit", host=settings.status_host, port=settings.status_port)
    async with Postgres(settings.postgres) as postgres:
        store = AuditStore(postgres)
        writer = Writer(store)
        server = GrpcServer(
            settings.listen,
            registers=[register(AuditService(store))],
            names=(SERVICE_NAME,),
            reflect=settings.reflection,
            credentials=credentials,
        )
        async with status, server, Kafka(settings.kafka, client_id="audit") as kafka:
            workers = _workers(kafka, writer, settings.sites)
            status.parts["postgres"] = writer.state
            status.parts["topics"] = lambda: _reading(workers)
            async with asyncio.TaskGroup() as tasks:
                if credentials is not None:
                    watched(tasks, credentials.follow(), name="follow credentials")
                for worker in workers:
                    watched(tasks, worker.run(), name=f"write {worker.name}")
                watched(tasks, _answer(writer, server), name="answer")
                watched(tasks, _drop_old(store, settings.retention_days), name="drop old days")


def _workers(kafka: Kafka, writer: Writer, sites: Sequence[str]) -> list[LoneWorker[Any]]:
    workers: list[LoneWorker[Any]] = [
        kafka.lone_worker(GOODPUT, "", writer.goodput, group=GROUP),
        kafka.lone_worker(POLICY, "", writer.revisions, group=GROUP),
    ]
    for site in sites:
        workers.append(kafka.lone_worker(DECISIONS, site, writer.decisions, group=GROUP))
        workers.append(kafka.lone_worker(OUTCOMES, site, writer.outcomes, group=GROUP))
    return workers


def _reading(workers: Sequence[LoneWorker[Any]]) -> tuple[bool, str]:
    """Being behind is no fault: it is what a spool is for."""
    return True, f"{sum(worker.lag for worker in workers)} records behind"


async def _answer(writer: Writer, server: GrpcServer) -> None:
    """The service is SERVING while PostgreSQL answers."""
    while True:
        await writer.ask()
        await server.serving(writer.answers)
        await asyncio.sleep(ASK_EVERY_S)


async def _drop_old(store: AuditStore, retention_days: int) -> None:
    while True:
        oldest = day_of(wall_s()) - timedelta(days=retention_days)
        try:
            if dropped := await store.drop_before(oldest):
                log.info("dropped %d partitions of days before %s", dropped, oldest)
        except PostgresAwayError:
            await asyncio.sleep(RETRY_MAX_S)
            continue
        await asyncio.sleep(DROP_EVERY_S)


def main() -> None:
    run_process("audit", AuditSettings, run, runner=uvloop.run)


if __name__ == "__main__":
    main()
