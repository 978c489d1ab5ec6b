"""Gateway client: ask TokenFleet for each request, follow its redirects, report how it went.

    async with Gateway(["127.0.0.1:7500", "127.0.0.1:7501"]) as fleet:
        answer = await fleet.schedule(request)
        if answer.admitted: ...send the request to answer.decision.address, and on the way:
        fleet.report(event, answer.gateways)

A request that is refused for want of room is given a return ticket and a time. Within `patience_s` the client comes
again by itself and shows it; else set `return_ticket` of the next attempt (client/coming_again.py).

`route` asks for an instance of this site alone; concurrent calls share one stream (client/coalesce.py). A request with
`wait_max_s` above 0 may be held so long before its answer comes; `dry_run` tells at once whether it would be.

Retries are the published gRPC service config (SERVICE_CONFIG) plus two rules: when a replica says nothing in time, each
replica is asked by name; a site that can't take a request it was sent is named in `sites_tried` and the origin is asked
again.
"""

import asyncio
import contextlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any, Final

import grpc
import grpc.aio
from msgspec import Struct

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.client.coalesce import Coalescer, Targets
from tokenfleet.client.coming_again import come_again, wait_s
from tokenfleet.client.held_call import Queued, schedule_held
from tokenfleet.client.token import shown
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, outcomes_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

SERVICE_CONFIG: Final[dict[str, Any]] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [
                {"service": f"tokenfleet.wire.v1.{service}"} for service in ("Scheduler", "TokenPilot", "FleetMind")
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
CHANNEL_OPTIONS: Final = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
# Of each try. Not in the service config: grpcio 1.85 ends a call 1 to 2 s earlier than the config's `timeout` says.
TRY_TIMEOUT_S: Final = 1.0
SILENT_CODES: Final = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
ROUTE_TIMEOUT_S: Final = 3.0  # two silent replicas and an answer
ATTEMPTS_MAX: Final = 3
REPORT_PERIOD_S: Final = 0.05
REPORT_BATCH_MAX: Final = 256
REPORTS_WAITING_MAX: Final = 20_000  # ~ 5 MB; what doesn't fit is counted in `reports_lost`
REPORT_RETRY_S: Final = 0.5


class Answer(Struct, frozen=True, kw_only=True):
    """The last decision, all decisions on the way to it, and the gateways of the site that made it."""

    decision: decision_pb2.Decision
    trail: tuple[decision_pb2.Decision, ...]
    gateways: Targets

    @property
    def admitted(self) -> bool:
        return self.decision.verdict == decision_pb2.VERDICT_ADMIT


class Gateway:
    """Asks the decision service at `targets` (HOST:PORT of its replicas, one site).

    `on_acknowledged` is told each outcome event that a site has taken for good. `token` is shown with each call, by
    default that of TOKENFLEET_TOKEN or TOKENFLEET_TOKEN_FILE.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        on_acknowledged: Callable[[outcomes_pb2.OutcomeEvent], None] | None = None,
        token: str | None = None,
    ) -> None:
        self.targets: Targets = tuple(targets)
        self._shown = shown(token)
        self.reports_lost = 0
        self._acknowledged: Callable[[outcomes_pb2.OutcomeEvent], None] = on_acknowledged or _ignore
        self._channels: dict[Targets, grpc.aio.Channel] = {}
        self._waiting: dict[Targets, list[outcomes_pb2.OutcomeEvent]] = defaultdict(list)
        self._sending: dict[Targets, asyncio.Task[None]] = {}
        self._coalescer: Coalescer | None = None

    async def __aenter__(self) -> "Gateway":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._coalescer is not None:
            await self._coalescer.close()
        for task in self._sending.values():
            task.cancel()
        for task in self._sending.values():
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for channel in self._channels.values():
            await channel.close()

    async def schedule(
        self,
        request: decision_pb2.Request,
        *,
        dry_run: bool = False,
        queued: Queued | None = None,
        patience_s: float = 0.0,
    ) -> Answer:
        """The decision for `request`, after redirects and after it was held, with the `queue` decision in the trail.

        `queued` is told that it waits, and where it stands in line as that changes. Who is refused for want of room
        comes again when told to, if that is within `patience_s` from now. Cancelling withdraws it at once.
        Raises grpc.aio.AioRpcError when the origin can't answer.
        """
        began_s, asked = monotonic_s(), request
        trail: list[decision_pb2.Decision] = []
        while True:
            answer = await self._scheduled(asked, dry_run=dry_run, queued=queued)
            trail += answer.trail
            again_s = wait_s(answer.decision)
            if again_s is None or monotonic_s() + again_s - began_s > patience_s:
                return Answer(decision=answer.decision, trail=tuple(trail), gateways=answer.gateways)
            await asyncio.sleep(again_s)
            asked = decision_pb2.Request()
            asked.CopyFrom(request)
            come_again(asked, answer.decision, elapsed_s=request.elapsed_s + monotonic_s() - began_s)

    async def _scheduled(self, request: decision_pb2.Request, *, dry_run: bool, queued: Queued | None) -> Answer:
        """One attempt, and its way through other sites."""
        trail: list[decision_pb2.Decision] = []
        asked = decision_pb2.Request()
        asked.CopyFrom(request)
        began_s = monotonic_s()
        while True:
            _spend(asked, request, monotonic_s() - began_s)
            trail += await self._ask(self.targets, asked, dry_run=dry_run, queued=queued)
            decision = trail[-1]
            if decision.verdict != decision_pb2.VERDICT_REDIRECT:
                return Answer(decision=decision, trail=tuple(trail), gateways=self.targets)
            there = tuple(decision.gateways)
            _spend(asked, request, monotonic_s() - began_s)
            told = await self._ask_site(there, asked, decision.lease, dry_run=dry_run, queued=queued)
            trail += told
            if told:
                taken = told[-1]
                if taken.verdict != decision_pb2.VERDICT_REJECT or len(asked.sites_tried) + 1 >= ATTEMPTS_MAX:
                    return Answer(decision=taken, trail=tuple(trail), gateways=there)
            elif len(asked.sites_tried) + 1 >= ATTEMPTS_MAX:
                return Answer(decision=decision, trail=tuple(trail), gateways=self.targets)
            asked.sites_tried.append(decision.site)
            asked.attempt += 1

    async def route(
        self, request: decision_pb2.Request, *, dry_run: bool = False, timeout_s: float | None = None
    ) -> decision_pb2.Decision:
        """The decision on an instance of this very site, for many callers at once at the price of a batch.

        Raises RouteError, a grpc.aio.AioRpcError: the service's own, or DEADLINE_EXCEEDED after `timeout_s`, by default
        ROUTE_TIMEOUT_S and the longest wait of `request`.
        """
        if self._coalescer is None:
            self._channel(self.targets)  # raises ValueError for targets that make none
            self._coalescer = Coalescer(self._channel, self.targets, shown=self._shown)
        timeout_s = ROUTE_TIMEOUT_S + request.wait_max_s if timeout_s is None else timeout_s
        return await self._coalescer.route(request, dry_run=dry_run, timeout_s=timeout_s)

    def report(self, event: outcomes_pb2.OutcomeEvent, gateways: Targets = ()) -> None:
        """Queues `event` for the site that admitted the request; sent within REPORT_PERIOD_S, retried until taken."""
        targets = gateways or self.targets
        waiting = self._waiting[targets]
        if len(waiting) >= REPORTS_WAITING_MAX:
            self.reports_lost += 1
            return
        waiting.append(event)
        sending = self._sending.get(targets)
        if sending is None or sending.done():  # done: it failed unforeseen, which its callback has logged
            self._sending[targets] = sending = asyncio.create_task(self._send_reports(targets))
            sending.add_done_callback(_log_failure)

    async def drained(self) -> None:
        """Returns when every queued report has been taken."""
        while any(self._waiting.values()):
            await asyncio.sleep(REPORT_PERIOD_S)

    async def _ask(
        self, targets: Targets, request: decision_pb2.Request, *, dry_run: bool, queued: Queued | None
    ) -> list[decision_pb2.Decision]:
        """The decision of whichever replica's turn it is; when none comes, of the first that gives one when named.

        It comes after a `queue` decision if the request was held.

        A replica that is frozen keeps its connection, so gRPC would give it its turn again. A decision that comes too
        late is void: the outcome names the one that was used. Raises grpc.aio.AioRpcError when no replica answers.
        """
        message = scheduler_pb2.ScheduleRequest(request=request, dry_run=dry_run)
        silence: grpc.aio.AioRpcError | None = None
        for asked in (targets, *((target,) for target in targets)):
            stub: Any = scheduler_pb2_grpc.SchedulerStub(self._channel(asked))
            try:
                if request.wait_max_s > 0.0:
                    patience_s, shown = TRY_TIMEOUT_S, self._shown
                    return await schedule_held(stub, message, patience_s=patience_s, queued=queued, shown=shown)
                return [(await stub.Schedule(message, timeout=TRY_TIMEOUT_S, metadata=self._shown)).decision]
            except grpc.aio.AioRpcError as error:
                if error.code() not in SILENT_CODES:
                    raise
                silence = error
        assert silence is not None  # no try gave an answer
        raise silence

    async def _ask_site(
        self,
        targets: Targets,
        request: decision_pb2.Request,
        lease: str,
        *,
        dry_run: bool,
        queued: Queued | None,
    ) -> list[decision_pb2.Decision]:
        """What the site redirected to says, its decision last; nothing when it can't be reached."""
        sent = decision_pb2.Request()
        sent.CopyFrom(request)
        sent.hop = 1
        sent.lease = lease
        try:
            return await self._ask(targets, sent, dry_run=dry_run, queued=queued)
        except ValueError as error:
            log.error("no way to the site behind %s (%s); asking the origin again", targets, error)
            return []
        except grpc.aio.AioRpcError as error:
            if error.code() not in SILENT_CODES:
                raise
            log.warning("site behind %s can't be reached (%s); asking the origin again", targets, error.code().name)
            return []

    def _channel(self, targets: Targets) -> grpc.aio.Channel:
        if targets not in self._channels:
            self._channels[targets] = grpc.aio.insecure_channel(target_of(targets), options=CHANNEL_OPTIONS)
        return self._channels[targets]

    async def _send_reports(self, targets: Targets) -> None:
        stub: Any = outcomes_pb2_grpc.OutcomesStub(self._channel(targets))
        waiting = self._waiting[targets]
        while True:
            await asyncio.sleep(REPORT_PERIOD_S)
            while waiting:
                batch = waiting[:REPORT_BATCH_MAX]
                try:
                    events = iter([outcomes_pb2.ReportRequest(events=batch)])
                    response = await stub.Report(events, timeout=5.0, metadata=self._shown)
                except grpc.aio.AioRpcError as error:
                    log.warning("report to %s failed (%s); again in %s s", targets, error.code().name, REPORT_RETRY_S)
                    await asyncio.sleep(REPORT_RETRY_S)
                    continue
                refused = {r.index for r in response.refused}
                for problem in response.refused:
                    log.error("report refused: %s", problem.problem)
                for index, event in enumerate(batch):
                    if index not in refused:
                        self._acknowledged(event)
                del waiting[: len(batch)]


def _spend(asked: decision_pb2.Request, request: decision_pb2.Request, spent_s: float) -> None:
    """What earlier tries of `request` took has passed when it is `asked` again, and can't be waited again."""
    asked.elapsed_s = request.elapsed_s + spent_s
    asked.wait_max_s = max(0.0, request.wait_max_s - spent_s)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("sending reports failed unforeseen; the next report begins anew", exc_info=error)


def _ignore(event: outcomes_pb2.OutcomeEvent) -> None:
    """Nobody asked."""


def target_of(targets: Targets) -> str:
    """One gRPC target for several HOST:PORT: an `ipv4:` or `ipv6:` list, or one name that DNS resolves to all replicas.

    Raises ValueError for several that are not addresses of one family: gRPC takes no list of names.
    """
    families = {_family(target) for target in targets}
    if families in ({"ipv4"}, {"ipv6"}):
        return f"{families.pop()}:{','.join(targets)}"
    if len(targets) == 1:
        return targets[0]
    raise ValueError(f"{', '.join(targets)}: give addresses of one family, or one name that stands for all replicas")


def _family(target: str) -> str:
    host = target.rpartition(":")[0]
    with contextlib.suppress(ValueError):
        return f"ipv{ip_address(host.removeprefix('[').removesuffix(']')).version}"
    return "name"
