"""Decide: answers for one site over gRPC, from tables in memory that Kafka keeps current.

Serves at once; is healthy when its tables have been read to their end; goes on from the last tables when Kafka or
PostgreSQL is away, and says how old they are.
"""

import asyncio
import logging
import secrets
from collections import Counter as CountOf
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import uvloop
from prometheus_client import Counter, Enum, Gauge, Histogram

from tokenfleet.adapters.batch_store import BatchStore
from tokenfleet.adapters.batch_tickets import LANE, SPOOL_BYTES_MAX, BatchTickets
from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.credentials import credentials_of
from tokenfleet.adapters.desk import Desk
from tokenfleet.adapters.gate_alarm import GateAlarm
from tokenfleet.adapters.grpc_server import GrpcServer
from tokenfleet.adapters.hearing import hear
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_follower import Follower
from tokenfleet.adapters.kafka_reading import BEGINNING, LAST, Record, ago
from tokenfleet.adapters.policy_file import load_policy
from tokenfleet.adapters.pool_shard import PoolShards
from tokenfleet.adapters.postgres import Postgres
from tokenfleet.adapters.running import run_process, watched
from tokenfleet.adapters.sender import Sender
from tokenfleet.adapters.services import SERVICE_NAMES, registers
from tokenfleet.adapters.settings import DecideSettings, secret_of
from tokenfleet.adapters.spool import Spool
from tokenfleet.adapters.status import Status
from tokenfleet.adapters.topics import (
    CAPACITY,
    CONTROL,
    DECISIONS,
    FEEDBACK,
    KVCACHE,
    OUTCOMES,
    PLACEMENTS,
    POLICY,
    SKETCH,
    SUMMARY,
)
from tokenfleet.core.compiled import COMPILED_FROM, load
from tokenfleet.core.credit import book_name
from tokenfleet.core.errors import SetupError
from tokenfleet.core.records import CapacityShard
from tokenfleet.core.shard.records import Holder
from tokenfleet.core.site import Site
from tokenfleet.core.site_books import SiteBooks
from tokenfleet.core.tokenpilot.rules import RULES

log = logging.getLogger(__name__)

ADVANCE_PERIOD_S: Final = 1.0
LOST_TOLD_S: Final = 60.0  # several looks of whoever watches; for good, it would keep one out that answers all
WRITTEN: Final = (PLACEMENTS, OUTCOMES, DECISIONS)

BLOCKS_INDEXED = Gauge("tokenfleet_kv_blocks_indexed", "Canonical (block, instance) pairs in the prefix index")
LEDGER_ENTRIES = Gauge("tokenfleet_ledger_entries", "Placements that have not ended")
ROWS_SEEN = Counter("tokenfleet_capacity_rows_seen_total", "New heartbeats that became visible to decisions")
RULE = Enum("tokenfleet_tokenpilot_rule", "How instances are chosen", states=["cost", *RULES])
VISIBLE = Histogram(
    "tokenfleet_row_visible_seconds",
    "Scrape to row visible to a decision, by wall clocks: exact on one host, else with their skew",
    buckets=(0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 2, 5, 10),
)


async def run(settings: DecideSettings) -> None:
    """Keep one site's tables current and answer until SIGTERM."""
    policy, policy_hash = load_policy(settings.policy)
    if settings.site not in policy.sites:
        raise SetupError(
            f"TOKENFLEET_SITE: no site {settings.site!r} in the policy; there is: {', '.join(policy.sites)}"
        )
    site = Site(settings.site, policy, policy_hash=policy_hash, replica=settings.replica)
    credentials = credentials_of(settings.credentials)
    counts: dict[str, int] = {}
    followers: list[Follower[Any]] = []
    status = Status("decide", host=settings.status_host, port=settings.status_port)
    kafka = Kafka(settings.kafka, client_id=f"decide-{site.name}-{settings.replica}")
    with (
        Spool(Path(settings.state_dir) / "spool", bytes_max=settings.spool_max_bytes) as spool,
        _batch_spool(settings) as batch_spool,
    ):
        sender = Sender(spool, kafka)
        desk = Desk(
            site,
            sender,
            start=spool.start_count,
            partitions=counts.__getitem__,
            ready=_once(
                lambda: (
                    _tables(followers)[0]
                    and bool(followers)
                    and _answered(site, shards)
                    and (desk.tickets is None or desk.tickets.asked)
                )
            ),
        )
        # Without a key of the site's, this life alone can read its tickets.
        key = secret_of(settings, "shard_secret") or secrets.token_bytes(32)
        site.returns.sign_with(key, issuer=f"{settings.replica}/{spool.start_count}")
        shards = _shards(kafka, site, desk, followers, start=spool.start_count, settings=settings)
        postgres = Postgres(settings.postgres)
        if batch_spool is not None:
            desk.tickets = _tickets(site, postgres, batch_spool, shards, start=spool.start_count, settings=settings)
        server = GrpcServer(
            settings.listen,
            registers=registers(desk),
            names=SERVICE_NAMES,
            reflect=settings.reflection,
            credentials=credentials,
        )
        async with status, server, kafka, postgres:
            for topic in WRITTEN:
                counts[topic.name] = await kafka.partitions(topic, site.name)
            followers += _followers(kafka, site)
            status.parts["tables"] = lambda: _tables(followers)
            status.parts["spool"] = _spool_state(spool)
            if desk.tickets is not None:
                status.parts["batch"] = desk.tickets.state
            status.parts["shard"] = lambda: _shard(site, shards)
            async with asyncio.TaskGroup() as tasks:
                for follower in followers:
                    watched(tasks, follower.run(), name=f"follow {follower.name}")
                if credentials is not None:
                    watched(tasks, credentials.follow(), name="follow credentials")
                watched(tasks, sender.run(), name="sender")
                watched(tasks, desk.holding.run(), name="holding")
                if desk.tickets is not None:
                    watched(tasks, desk.tickets.run(), name="batch")
                watched(tasks, _advance(site, followers, counts[PLACEMENTS.name]), name="advance")
                tasks.create_task(_compile(site), name="compile")
                await asyncio.gather(*(follower.until_caught_up() for follower in followers))
                if shards is not None:
                    desk.books = shards.states
                    watched(tasks, _share(site, shards), name="shard")
                    if site.policy.slomax.shard.enabled:
                        await shards.answered.wait()
                if desk.tickets is not None:
                    await desk.tickets.until_asked()
                await server.serving(True)
                log.info("decide %s/%s answers on %s", site.name, settings.replica, settings.listen)


def _shards(
    kafka: Kafka, site: Site, desk: Desk, followers: list[Follower[Any]], *, start: int, settings: DecideSettings
) -> PoolShards | None:
    """This replica's part of the site's books; None without a secret to sign tickets with.

    Raises SetupError when the policy wants books then.
    """
    secret = secret_of(settings, "shard_secret")
    if not secret:
        if site.policy.slomax.shard.enabled:
            raise SetupError("the policy has slomax.shard on: set TOKENFLEET_SHARD_SECRET_FILE, one for all replicas")
        return None
    return PoolShards(
        kafka,
        site.name,
        Holder(replica=settings.replica, start=str(start)),
        SiteBooks(site),
        secret=secret,
        envelopes=lambda: desk.envelopes,
        live=lambda: all(follower.caught_up for follower in followers if follower.topic is PLACEMENTS),
        runs=lambda decision: decision in site.ledger,
    )


def _batch_spool(settings: DecideSettings) -> AbstractContextManager[Spool | None]:
    """Where tickets of batch work are kept until PostgreSQL has them; None without one."""
    if not settings.postgres:
        return nullcontext()
    return Spool(Path(settings.state_dir) / "batch", bytes_max=SPOOL_BYTES_MAX, lanes=(LANE,))


def _tickets(
    site: Site, postgres: Postgres, spool: Spool, shards: PoolShards | None, *, start: int, settings: DecideSettings
) -> BatchTickets:
    """This replica's part in the site's batch tickets: it grants those of the books that it owns."""

    def owns(model: str) -> bool | None:
        if shards is None or not site.policy.slomax.shard.enabled:
            return None
        owner = shards.owner(book_name(model, site.name))
        return owner is not None and owner.active

    def queued(model: str) -> int:
        owner = shards.owner(book_name(model, site.name)) if shards is not None else None
        return len(owner.line) if owner is not None else 0

    # Another replica's tokens mean nothing without a common secret: their tickets are handed in again, to the same row.
    site.tickets.secret = secret_of(settings, "shard_secret") or secrets.token_bytes(32)
    store = BatchStore(postgres, site.name)
    return BatchTickets(site, store, spool, me=f"{settings.replica}-{start}", owns=owns, queued=queued)


async def _share(site: Site, shards: PoolShards) -> None:
    """Takes part in the site's books from when a policy wants them on."""
    while not site.policy.slomax.shard.enabled:
        await asyncio.sleep(ADVANCE_PERIOD_S)
    site.shares(shards.purse)
    await shards.run()


def _followers(kafka: Kafka, site: Site) -> list[Follower[Any]]:
    """The readers of all that a decision of `site` rests on.

    A log that was started anew needs no reset: its records' orders name another cluster and replace what is known.
    """
    hear = _Hearing(site)
    followers: list[Follower[Any]] = [
        kafka.follower(CAPACITY, site.name, hear, start=LAST),
        kafka.follower(KVCACHE, site.name, hear, start=BEGINNING),
        kafka.follower(
            PLACEMENTS,
            site.name,
            hear,
            start=ago(site.policy.ledger.read_back_s),
            on_caught_up=site.envelopes.caught_up,
            on_reset=site.envelopes.begins_anew,
        ),
        kafka.follower(CONTROL, site.name, hear, start=BEGINNING),
        kafka.follower(POLICY, "", hear, start=BEGINNING),
        kafka.follower(FEEDBACK, "", hear, start=LAST),
    ]
    for other in site.policy.sites:
        followers.append(kafka.follower(SUMMARY, other, hear, start=LAST))
        followers.append(kafka.follower(SKETCH, other, hear, start=BEGINNING))
    return followers


class _Hearing:
    """Hands each record to the site, and measures how soon rows become visible."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._seen: dict[int, dict[str, float]] = {}  # by shard: when each row's values were scraped

    def __call__(self, record: Record[Any]) -> None:
        hear(self._site, record)
        if record.live and isinstance(record.message, CapacityShard):
            self._measure(record.message)

    def _measure(self, shard: CapacityShard) -> None:
        now_wall_s = wall_s()
        before = self._seen.get(shard.shard, {})
        seen = self._seen[shard.shard] = {row.beat.instance: row.beat.scraped_wall_s for row in shard.rows}
        for instance, scraped_s in seen.items():
            if scraped_s > before.get(instance, 0.0):
                VISIBLE.observe(max(0.0, now_wall_s - scraped_s))
                ROWS_SEEN.inc()


async def _advance(site: Site, followers: list[Follower[Any]], partitions: int) -> None:
    """Lets time pass in the ledger, partition by partition, only while it is read at its end."""
    placements = next(follower for follower in followers if follower.topic is PLACEMENTS)
    alarm = GateAlarm(site)
    while True:
        await asyncio.sleep(ADVANCE_PERIOD_S)
        alarm.look()
        now_s = monotonic_s()
        for partition in range(partitions):
            site.advance(partition, now_s, live=placements.caught_up)
        BLOCKS_INDEXED.set(site.prefix.blocks_total)
        LEDGER_ENTRIES.set(len(site.ledger))
        RULE.state(site.policy.tokenpilot.rule)


async def _compile(site: Site) -> None:
    """Once a pool is large, compiles the loops over it beside the decisions. Without numba the arrays go on serving."""
    while max(CountOf(row.beat.model for row in site.capacity.rows()).values(), default=0) < COMPILED_FROM:
        await asyncio.sleep(ADVANCE_PERIOD_S)
    try:
        loaded = await asyncio.to_thread(load)
    except Exception:  # a compiler's fault costs speed and no decision
        log.exception("a large pool is not served by compiled loops")
    else:
        log.info("a large pool is served by %s", "compiled loops" if loaded else "arrays: numba isn't installed")


def _tables(followers: list[Follower[Any]]) -> tuple[bool, str]:
    behind = [f"{follower.name} {follower.lag} behind" for follower in followers if not follower.caught_up]
    return not behind, "; ".join(behind) or "all read to their end"


def _spool_state(spool: Spool, *, clock: Callable[[], float] = monotonic_s) -> Callable[[], tuple[bool, str]]:
    """For /health: not ready when any record was lost since the last look, nor for LOST_TOLD_S after that."""
    seen, seen_s = 0, float("-inf")

    def look() -> tuple[bool, str]:
        nonlocal seen, seen_s
        lost = sum(spool.lost.values())
        if lost > seen:
            seen, seen_s = lost, clock()
        told = f", {lost} were lost for want of room" if lost else ""
        return clock() - seen_s >= LOST_TOLD_S, f"{spool.records} records wait{told}"

    return look


def _shard(site: Site, shards: PoolShards | None) -> tuple[bool, str]:
    if not site.policy.slomax.shard.enabled:
        return True, "off: each replica counts for itself"
    if shards is None:
        return True, "the policy wants it, TOKENFLEET_SHARD_SECRET_FILE is not set"
    return True, "; ".join(each.words() for each in shards.told) or "no pool has a book"


def _answered(site: Site, shards: PoolShards | None) -> bool:
    """Whether this replica may spend, if that takes an owner's word."""
    return shards is None or not site.policy.slomax.shard.enabled or shards.answered.is_set()


def _once(ready: Callable[[], bool]) -> Callable[[], bool]:
    """True for ever after `ready` was true once: tables that fall behind later are old, not absent."""
    been: list[bool] = []

    def check() -> bool:
        if not been and ready():
            been.append(True)
        return bool(been)

    return check


def main() -> None:
    run_process("decide", DecideSettings, run, runner=uvloop.run)


if __name__ == "__main__":
    main()
