"""A live engine: the simulator's machine in real time, its events told to streams, metrics and KV subscribers."""

import asyncio
from itertools import count

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.local.engine_events import KvPublisher, Prompt, wire_event
from tokenfleet.local.engine_metrics import EngineMetrics
from tokenfleet.sim.engine.events import Admitted, Event, Finished, FirstToken, Job, Load, Stepped
from tokenfleet.sim.engine.machine import EngineMachine
from tokenfleet.sim.profiles import Profile

PULSE_S = 0.05  # streams get their decoded tokens 20 times a second, not once a step: the fleet must cost little CPU
WAITING_MAX = 4_096  # jobs in the queue; beyond it the engine rejects


class JobStream:
    """One job as its HTTP handler follows it: `changed` is set when there may be more to send."""

    def __init__(self, job: Job, prompt: Prompt, submitted_s: float) -> None:
        self.job = job
        self.prompt = prompt
        self.submitted_s = submitted_s
        self.admitted_s: float | None = None  # first admission
        self.first_token_s: float | None = None
        self.finished: Finished | None = None
        self.cached_tokens = 0
        self.changed = asyncio.Event()


class LiveEngine:
    """One life of an engine, from its start to its crash or end."""

    def __init__(self, *, model: str, profile: Profile, publisher: KvPublisher) -> None:
        self.profile = profile
        self.metrics = EngineMetrics(model=model, profile=profile, started_wall_s=wall_s())
        self._machine = EngineMachine(profile)
        self._publisher = publisher
        self._streams: dict[str, JobStream] = {}
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._pulsed_at_s = 0.0
        self._frozen_at_s: float | None = None
        self._frozen_for_s = 0.0

    def context_tokens_max(self) -> int:
        """The longest prompt plus output that fits."""
        return (self.profile.kv_blocks - self.profile.watermark_blocks) * self.profile.block_size

    def load(self) -> Load:
        self._catch_up()
        return self._machine.load()

    def submit(
        self, prompt: Prompt, *, hashes: tuple[int, ...], output_tokens: int, max_tokens: int
    ) -> JobStream | None:
        """Queue a prompt that fits in context_tokens_max; None if the queue is full."""
        now_s = self._catch_up()
        if self._machine.load().waiting >= WAITING_MAX:
            self.metrics.rejected["max_num_queued_reqs"] += 1
            return None
        job = Job(
            id=str(next(self._numbers)),
            prompt_tokens=len(prompt.token_ids),
            output_tokens=output_tokens,
            max_tokens=max_tokens,
            block_hashes=hashes,
        )
        stream = self._streams[job.id] = JobStream(job, prompt, now_s)
        self._machine.submit(job, now_s)
        self._run(now_s)
        return stream

    def generated_tokens(self, stream: JobStream) -> int:
        """Output tokens so far, as of the last pulse or event."""
        return stream.finished.output_tokens if stream.finished else self._machine.generated_tokens(stream.job.id)

    def cancel(self, stream: JobStream) -> None:
        """The caller left; nothing happens to a job that has ended."""
        now_s = self._catch_up()
        finished = self._machine.cancel(stream.job.id, now_s)
        if finished is not None:
            self._take([finished])
        self._run(now_s)

    def reset_prefix_cache(self) -> bool:
        """False while any job runs, as vLLM answers."""
        now_s = self._catch_up()
        cleared = self._machine.clear_cache(now_s)
        self._run(now_s)
        return cleared

    def slow_down(self, factor: float) -> None:
        """Steps take factor times as long; 1 is healthy."""
        now_s = self._catch_up()
        self._machine.slow_down(factor, now_s)
        self._run(now_s)

    def freeze(self) -> None:
        """Time stands still for this engine until thaw()."""
        self._catch_up()
        self._frozen_at_s = self._now_s()
        self._schedule(None)

    def thaw(self) -> None:
        if self._frozen_at_s is not None:
            frozen_at_s, self._frozen_at_s = self._frozen_at_s, None
            self._frozen_for_s += self._now_s() - frozen_at_s
            self._run(self._now_s())

    def close(self) -> None:
        self._schedule(None)
        self._publisher.close()

    def _now_s(self) -> float:
        """This engine's clock: the process's, less the time it stood still."""
        return self._frozen_at_s if self._frozen_at_s is not None else monotonic_s() - self._frozen_for_s

    def _catch_up(self) -> float:
        now_s = self._now_s()
        self._take(self._machine.advance(now_s))
        return now_s

    def _wake(self) -> None:
        now_s = self._catch_up()
        if now_s >= self._pulsed_at_s + PULSE_S:
            self._pulsed_at_s = now_s
            for stream in self._streams.values():
                if stream.first_token_s is not None:
                    stream.changed.set()
        self._run(now_s)

    def _run(self, now_s: float) -> None:
        """Start what can start now and wake at the next event, or pulse while streams are open."""
        self._take(self._machine.advance(now_s))
        due_s = self._machine.next_event_at_s()
        if due_s is not None and self._frozen_at_s is None:
            due_s = min(due_s, max(self._pulsed_at_s, now_s) + PULSE_S)
            self._schedule(max(0.0, due_s - now_s))
        else:
            self._schedule(None)

    def _schedule(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay_s is None else asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _take(self, events: list[Event]) -> None:
        """Tell what happened: metrics, streams, and one batch of KV events."""
        if not events:
            return
        wire = [wire_event(event, self._prompt_of, self.profile.block_size) for event in events]
        for event in events:
            match event:
                case Stepped():
                    self._count_steps(event)
                case Admitted():
                    self._admit(self._streams[event.job_id], event)
                case FirstToken():
                    self._start(self._streams[event.job_id], event)
                case Finished():
                    self._finish(self._streams.pop(event.job_id), event)
                case _:
                    pass
        told = [event for event in wire if event is not None]
        if told:
            self._publisher.publish(told, wall_s())

    def _prompt_of(self, job_id: str) -> Prompt:
        return self._streams[job_id].prompt

    def _count_steps(self, event: Stepped) -> None:
        self.metrics.observe("iteration_tokens_total", event.prefill_tokens + event.decodes, event.steps)
        if event.decodes:
            step_s = event.seconds / event.steps
            self.metrics.observe("inter_token_latency_seconds", step_s, event.decodes * event.steps)

    def _admit(self, stream: JobStream, event: Admitted) -> None:
        if stream.admitted_s is None:
            stream.admitted_s, stream.cached_tokens = event.at_s, event.cached_tokens

    def _start(self, stream: JobStream, event: FirstToken) -> None:
        stream.first_token_s = event.at_s
        stream.changed.set()
        self.metrics.observe("time_to_first_token_seconds", event.at_s - stream.submitted_s)

    def _finish(self, stream: JobStream, event: Finished) -> None:
        stream.finished = event
        stream.changed.set()
        self.metrics.count_finished(event.reason)
        if stream.first_token_s is None or stream.admitted_s is None:
            return
        decode_s = event.at_s - stream.first_token_s
        observed = {
            "e2e_request_latency_seconds": event.at_s - stream.submitted_s,
            "request_queue_time_seconds": stream.admitted_s - stream.submitted_s,
            "request_inference_time_seconds": event.at_s - stream.admitted_s,
            "request_prefill_time_seconds": stream.first_token_s - stream.admitted_s,
            "request_decode_time_seconds": decode_s,
            "request_time_per_output_token_seconds": decode_s / max(1, event.output_tokens - 1),
            "request_prompt_tokens": stream.job.prompt_tokens,
            "request_generation_tokens": event.output_tokens,
        }
        for name, value in observed.items():
            self.metrics.observe(name, value)
