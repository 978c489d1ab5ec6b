"""Served: one request of the trace in the simulated fleet, and what each side sees of it."""

from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from tokenfleet.core.decision import Request
from tokenfleet.core.policy import REQUIRED_CLASSES
from tokenfleet.core.records import OutcomeEvent, OutcomeKind
from tokenfleet.core.site import pool_name
from tokenfleet.sim.engine.events import Job
from tokenfleet.sim.telemetry import MODEL, SITE, TENANT, packed
from tokenfleet.sim.traces.rows import TraceRow

USUAL_CLASS = "chat"
OFFLINE_TASK = "batch"


@dataclass(slots=True)
class Served:
    """A row and what became of it; times in seconds since the run's start, None: never.

    `gateway` and `instance` are numbers, -1: none. `cached_tokens` are as of the engine's first admission. It was
    `refused` for a reason at `refused_s`, for good. `attempt` counts how often it came again, with the return `ticket`
    of the time before.
    """

    id: str
    row: TraceRow
    gateway: int = -1
    instance: int = -1
    decision: str = ""
    refused: str = ""
    refused_s: float | None = None
    dispatched_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    attempt: int = 0
    ticket: str = ""

    @property
    def model(self) -> str:
        """What its caller asks for: the row's model, else the fleet's only one."""
        return self.row.model or MODEL

    @property
    def pool(self) -> str:
        return pool_name(self.model, SITE)

    @property
    def request_class(self) -> str:
        """What its caller declares: the row's class if it is one of the classifier's, for traces have words of their
        own, else chat."""
        return self.row.request_class if self.row.request_class in REQUIRED_CLASSES else USUAL_CLASS

    @property
    def tenant(self) -> str:
        return self.row.tenant or TENANT

    def request(self, now_s: float | None = None) -> Request:
        """What its gateway gets to see, by default on arrival; no budget either, for it would tell of the output."""
        row = self.row
        return Request(
            id=self.id,
            attempt=self.attempt,
            model=self.model,
            tenant=self.tenant,
            origin=SITE,
            elapsed_s=0.0 if now_s is None else now_s - row.at_s,
            return_ticket=self.ticket,
            prompt_tokens=row.prompt_tokens,
            block_keys=packed(self._blocks()),
            block_tokens=row.block_tokens,
            stream=row.deadline_s is None,
            task="" if row.deadline_s is None else OFFLINE_TASK,
            declared_class=self.request_class,
            deadline_s=row.deadline_s,
            session=row.session,
        )

    def job(self) -> Job:
        """What its engine gets."""
        row = self.row
        return Job(
            id=self.id,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            max_tokens=row.output_tokens,
            block_hashes=self._blocks(),
        )

    def outcome(
        self, kind: Literal["first_token", "finished"], now_s: float, *, instance: str, gateway: str
    ) -> OutcomeEvent:
        """What its gateway reports now, on its own clock; the output's length only when it has ended."""
        assert self.dispatched_s is not None, "an engine tells of a request that it was never given"
        assert self.first_token_s is not None, "a request ends without a first token"
        row, finished = self.row, kind == "finished"
        decoded = row.output_tokens - 1
        return replace(
            self._told(kind, now_s, instance=instance),
            site=SITE,
            attempt_s=now_s - self.dispatched_s,
            ttft_s=self.first_token_s - row.at_s,
            tpot_s=(now_s - self.first_token_s) / decoded if finished and decoded else None,
            prompt_tokens=row.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=row.output_tokens if finished else None,
            stop="stop" if finished else "",
            clock=gateway,
            clock_s=now_s,
        )

    def without_tokens(self, kind: Literal["rejected", "timed_out"], at_s: float) -> OutcomeEvent:
        """What is told of it when it ends without any: it was refused, or given up where it waited or ran."""
        return self._told(kind, at_s, instance="" if self.instance < 0 else f"i{self.instance}")

    def _told(self, kind: OutcomeKind, at_s: float, *, instance: str) -> OutcomeEvent:
        return OutcomeEvent(
            request=self.id,
            attempt=self.attempt,
            kind=kind,
            decision=self.decision,
            tenant=self.tenant,
            request_class=self.request_class,
            model=self.model,
            origin=SITE,
            instance=instance,
            pool=self.pool,
            at_wall_s=at_s,
            elapsed_s=at_s - self.row.at_s,
        )

    def _blocks(self) -> tuple[int, ...]:
        """Ids of the prompt's full blocks; a trace may name the begun one too."""
        return self.row.hash_ids[: self.row.prompt_tokens // self.row.block_tokens]
