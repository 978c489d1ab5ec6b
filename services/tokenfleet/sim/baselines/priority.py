"""Priority: class queues in the gateway, the more urgent class first, each request bound to an instance late.

What queueing alone does without a forecast of the time per token: chat goes before long before batch, first come first
served inside a class, and a request leaves its queue when an instance is within the bounds of its class. Work, waits
and KV use are accounts of the gateway's own dispatches under the engine's cost model (core/predict/work.py); outputs
are estimated by their class's mean.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.decision import Request
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.predict.work import prefill_work_s, prior_coefficients, uncached_tokens
from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.core.records import TERMINAL_KINDS, KvDelta, KvSnapshot, OutcomeEvent
from tokenfleet.sim.baselines.accounts import least
from tokenfleet.sim.pilot import model_of
from tokenfleet.sim.router import Answer, Record, Setup


class Bounds(Struct, frozen=True, kw_only=True):
    """Where a class may be sent: instances with at most so much work before it, so many of the class running, so many
    of them without a first token, and so great a share of the KV memory in use with it."""

    backlog_max_s: float
    running_max: int
    kv_share_max: float
    output_tokens: int
    prefilling_max: int


UNBOUNDED = 1_000_000
# The most urgent first; outputs are the means of the traces.
BOUNDS = {
    "chat": Bounds(backlog_max_s=0.6, running_max=200, kv_share_max=0.97, output_tokens=211, prefilling_max=UNBOUNDED),
    "long": Bounds(backlog_max_s=0.3, running_max=6, kv_share_max=0.90, output_tokens=343, prefilling_max=2),
    "batch": Bounds(backlog_max_s=0.05, running_max=24, kv_share_max=0.80, output_tokens=291, prefilling_max=UNBOUNDED),
}
# Where no chat runs, there is nothing that a number of requests would protect.
BOUNDS_WITHOUT_CHAT = {
    name: replace(bounds, running_max=UNBOUNDED, prefilling_max=UNBOUNDED) for name, bounds in BOUNDS.items()
}


class _Sent(Struct, frozen=True, kw_only=True):
    """One own request in flight: its work and what it holds of the instance."""

    instance: str
    request_class: str
    prompt_tokens: int
    kv_tokens: int
    work_s: float


@dataclass(slots=True)
class _Instance:
    """The gateway's account of one instance. `prefilling` have no first token yet, in the order of dispatch."""

    prefilling: dict[str, _Sent] = field(default_factory=dict[str, _Sent])
    head_began_s: float = 0.0
    kv_tokens: int = 0
    decoding: int = 0
    context_tokens: int = 0
    running: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0))
    first_tokens_due: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0))
    work_s: float = 0.0  # of all that is prefilling

    def backlog_s(self, now_s: float) -> float:
        """Work before a request that is sent now, less what the first in line has done of its own."""
        if not self.prefilling:
            return 0.0
        head = next(iter(self.prefilling.values()))
        return max(0.0, self.work_s - min(now_s - self.head_began_s, head.work_s))


class Priority:
    """A Router of one gateway."""

    def __init__(self, setup: Setup, bounds: Mapping[str, Bounds] = MappingProxyType(BOUNDS)) -> None:
        self._bounds = bounds
        self._profile = setup.profile
        self._coefficients = prior_coefficients(model_of(setup.profile), factor=1.0)
        self._rng = setup.rng
        self._instances = {name: _Instance() for name in setup.instances}
        self._queues: dict[str, deque[Request]] = {name: deque() for name in BOUNDS}
        self._sent: dict[str, _Sent] = {}
        self._cached = PrefixIndex()

    @property
    def holding(self) -> int:
        return sum(map(len, self._queues.values()))

    def route(self, request: Request, now_s: float) -> Answer:
        """Held: the fleet asks for what goes out at once."""
        self._queues[request.declared_class].append(request)
        return Answer(request=request.id)

    def released(self, now_s: float) -> Sequence[Answer]:
        answers: list[Answer] = []
        for name, queue in self._queues.items():
            while queue and (target := self._target(name, queue[0], now_s)):
                answers.append(self._send(queue.popleft(), name, target, now_s))
        return answers

    def heard(self, record: Record, now_s: float) -> None:
        if isinstance(record, KvDelta | KvSnapshot):
            self._cached.apply(record)

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        sent = self._sent.get(event.request)
        if sent is None:
            return event
        instance = self._instances[sent.instance]
        if event.kind == "first_token":
            self._prefilled(event.request, sent, instance, now_s)
        elif event.kind in TERMINAL_KINDS:
            self._prefilled(event.request, sent, instance, now_s)
            del self._sent[event.request]
            instance.decoding -= 1
            instance.context_tokens -= sent.prompt_tokens
            instance.kv_tokens -= sent.kv_tokens
            instance.running[sent.request_class] -= 1
        return event

    def _prefilled(self, request: str, sent: _Sent, instance: _Instance, now_s: float) -> None:
        if request not in instance.prefilling:
            return
        if next(iter(instance.prefilling)) == request:
            instance.head_began_s = now_s
        del instance.prefilling[request]
        instance.first_tokens_due[sent.request_class] -= 1
        instance.work_s = instance.work_s - sent.work_s if instance.prefilling else 0.0
        instance.decoding += 1
        instance.context_tokens += sent.prompt_tokens

    def _target(self, name: str, request: Request, now_s: float) -> str:
        """The open instance with the least backlog, empty if none is."""
        bounds = self._bounds[name]
        kv_max = bounds.kv_share_max * self._profile.kv_tokens - request.prompt_tokens - bounds.output_tokens
        backlogs = {
            target: backlog_s
            for target, instance in self._instances.items()
            if instance.running[name] < bounds.running_max
            and instance.first_tokens_due[name] < bounds.prefilling_max
            and instance.kv_tokens <= kv_max
            and (backlog_s := instance.backlog_s(now_s)) <= bounds.backlog_max_s
        }
        return least(backlogs, self._rng) if backlogs else ""

    def _send(self, request: Request, name: str, target: str, now_s: float) -> Answer:
        instance = self._instances[target]
        hits = self._cached.hits(request.block_keys) if request.block_keys else {}
        hit_tokens = hits.get(target, 0) * request.block_tokens
        sent = _Sent(
            instance=target,
            request_class=name,
            prompt_tokens=request.prompt_tokens,
            kv_tokens=request.prompt_tokens + self._bounds[name].output_tokens,
            work_s=prefill_work_s(
                uncached_tokens(request.prompt_tokens, hit_tokens),
                hit_tokens,
                decoding=instance.decoding,
                context_tokens=instance.context_tokens,
                coefficients=self._coefficients,
                budget_tokens=self._profile.token_budget,
            ),
        )
        if not instance.prefilling:
            instance.head_began_s = now_s
        self._sent[request.id] = instance.prefilling[request.id] = sent
        instance.work_s += sent.work_s
        instance.kv_tokens += sent.kv_tokens
        instance.running[name] += 1
        instance.first_tokens_due[name] += 1
        return Answer(request=request.id, instance=target)


class Pools:
    """A Router over two halves of the fleet, each with queues by priority: chat has one, long and batch the other."""

    def __init__(self, setup: Setup) -> None:
        """Raises PolicyError for a fleet that can't be halved."""
        if len(setup.instances) < 2:
            raise PolicyError("design pools: its two pools need 2 instances or more")
        half = len(setup.instances) // 2
        chat, others = setup.instances[:half], setup.instances[half:]
        self._chat = Priority(replace(setup, instances=chat))
        self._others = Priority(replace(setup, instances=others), BOUNDS_WITHOUT_CHAT)

    @property
    def holding(self) -> int:
        return self._chat.holding + self._others.holding

    def route(self, request: Request, now_s: float) -> Answer:
        return (self._chat if request.declared_class == "chat" else self._others).route(request, now_s)

    def released(self, now_s: float) -> Sequence[Answer]:
        return [*self._chat.released(now_s), *self._others.released(now_s)]

    def heard(self, record: Record, now_s: float) -> None:
        self._chat.heard(record, now_s)
        self._others.heard(record, now_s)

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        return (self._chat if event.request_class == "chat" else self._others).settled(event, now_s)
