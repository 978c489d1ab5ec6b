"""Holding: the calls whose requests one replica holds, who waits for each, and when they get their final answers.

A caller waits on a future of its own and leaves by cancelling it; when the last one has left, the request is held no
longer and nothing is placed for it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Gauge, Histogram

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.core.asked import Decided, Ids, Steps
from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.paced import standing, words
from tokenfleet.core.schedule import let_go, released, withdrawn
from tokenfleet.core.site import Site
from tokenfleet.core.tokenpilot.explain import ms
from tokenfleet.core.tokenpilot.held import PERIOD_S

log = logging.getLogger(__name__)

TOLD_PERIOD_S: Final = 1.0  # between two words on places in line
MARGIN_S: Final = 0.25  # before a caller's deadline, so that the final answer still reaches it

HELD_NOW = Gauge("tokenfleet_held_requests", "Requests that wait at their gateways for an instance")
HELD_FOR = Histogram(
    "tokenfleet_held_seconds",
    "Time from `queue` to the final decision; tokenfleet_decision_seconds leaves it out",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)

Settle = Callable[[Request, Steps, Decided], None]
Moved = Callable[[Decision], None]


class HeldCall(Struct, kw_only=True):
    """One held request, the `queue` decision that it waits by with its last told place, and all who wait; the `joined`
    among them asked for it under another id, as duplicates, the `watching` are told how its place changes."""

    request: Request
    steps: Steps
    queue: Decision
    since_s: float
    callers: list["asyncio.Future[Decision]"]
    joined: list["asyncio.Future[Decision]"]
    watching: "dict[asyncio.Future[Decision], Moved]"

    @property
    def call(self) -> tuple[str, int]:
        """What core.tokenpilot.held knows it by."""
        return self.request.id, self.request.attempt


class Holding:
    """The held calls of `site`. `settle` places and records a final decision, `write` hands on what was recorded.

    It holds nothing before `run` runs, nor after.
    """

    def __init__(self, site: Site, *, next_ids: Callable[[], Ids], settle: Settle, write: Callable[[], None]) -> None:
        self._site = site
        self._next_ids = next_ids
        self._settle = settle
        self._write = write
        self._calls: dict[tuple[str, int], HeldCall] = {}
        self._by_decision: dict[str, HeldCall] = {}
        self._some = asyncio.Event()
        self._runs = False
        self._told_s = 0.0
        self._releases_soon = False

    def __len__(self) -> int:
        return len(self._calls)

    async def run(self) -> None:
        """Releases each PERIOD_S while anything is held, and each TOLD_PERIOD_S says how places have changed. When this
        ends, all that is held goes out by cost."""
        self._runs = True
        try:
            while True:
                await self._some.wait()
                await asyncio.sleep(PERIOD_S)
                self.release()
                self._tell_places()
        finally:
            self._runs = False
            self.let_all_go()

    def holdable(self, request: Request, *, left_s: float | None) -> Request:
        """`request` with the wait that it can be held for here: within the `left_s` of its caller's deadline, and none
        when another call has its id or this replica ends."""
        if request.wait_max_s <= 0.0:
            return request
        wait_max_s = request.wait_max_s if left_s is None else min(request.wait_max_s, left_s - MARGIN_S)
        if not self._runs or (request.id, request.attempt) in self._calls:
            wait_max_s = 0.0
        return replace(request, wait_max_s=max(wait_max_s, 0.0))

    def begins(self, request: Request, steps: Steps, queue: Decision, *, now_s: float) -> None:
        """The site holds the request from now on, by the decision `queue`."""
        held = HeldCall(request=request, steps=steps, queue=queue, since_s=now_s, callers=[], joined=[], watching={})
        self._calls[held.call] = self._by_decision[queue.id] = held
        self._site.repeats.waits(request, steps, queue, now_s=now_s)
        self._counted()
        # The order may have changed by it, and its own turn be now; first its callers must have asked for the answer.
        self.release_soon()

    def answer_to(self, queue: Decision, moved: Moved | None = None) -> "asyncio.Future[Decision]":
        """The final decision on what is held by the decision `queue`, for one caller; cancel it to leave.

        `moved` is told `queue` again whenever its place in line has changed, without its evidence.
        """
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        held = self._by_decision[queue.id]
        held.callers.append(answer)
        if queue.duplicate:
            held.joined.append(answer)
        if moved is not None:
            held.watching[answer] = moved
        answer.add_done_callback(partial(self._left, held))
        return answer

    def release_soon(self) -> None:
        """Releases once, when all that has come by now is taken in."""
        if self._calls and not self._releases_soon:
            self._releases_soon = True
            asyncio.get_running_loop().call_soon(self.release)

    def release(self) -> None:
        """Gives their final answers to those whose turn it is."""
        self._releases_soon = False
        if not self._calls:
            return
        for model in self._site.held.models():
            now_s = began_s = monotonic_s()
            try:
                for waiting, answer in released(self._site, model, now_s, self._next_ids):
                    self._finish(self._calls[waiting.call], answer, now_s=now_s, began_s=began_s)
                    began_s = monotonic_s()
            except Exception:  # as its model is gone
                log.exception("no turn can be given to the held requests for %s; they go out at once", model)
                self._let_go([held for held in self._calls.values() if held.request.model == model])
        self._write()

    def _tell_places(self) -> None:
        now_s = monotonic_s()
        if now_s - self._told_s < TOLD_PERIOD_S:
            return
        self._told_s = now_s
        for held in self._calls.values():
            before = held.queue.place
            if before is None or not held.watching:
                continue
            place = standing(self._site, held.request.model, held.call, now_s)
            if place is None or place.position == before.position:
                continue
            sentence = f"held: {words(place, held.queue.request_class)}"
            held.queue = replace(held.queue, place=place, sentence=sentence, candidates=(), sites=(), shadows=())
            for moved in tuple(held.watching.values()):
                moved(held.queue)

    def let_all_go(self) -> None:
        """Gives all their final answers, whatever the backlog."""
        self._let_go(tuple(self._calls.values()))
        self._write()

    def _let_go(self, calls: Sequence[HeldCall]) -> None:
        for held in calls:
            now_s = monotonic_s()
            try:
                answer = let_go(self._site, held.call, self._next_ids(), now_s=now_s)
            except Exception as error:
                log.exception("held request %s can't be decided", held.request.id)
                answer = error
            if answer is not None:
                self._finish(held, answer, now_s=now_s, began_s=now_s)

    def _finish(self, held: HeldCall, answer: Decided | Exception, *, now_s: float, began_s: float) -> None:
        self._forget(held)
        if all(caller.done() for caller in held.callers):  # the last one is leaving just now
            return
        if isinstance(answer, Exception):
            self._tell(held, lambda caller: caller.set_exception(answer))
            return
        waited_s = now_s - held.since_s
        decision = replace(
            answer.decision,
            sentence=f"held {ms(waited_s)}; {answer.decision.sentence}",
            took_s=monotonic_s() - began_s,
        )
        HELD_FOR.observe(waited_s)
        try:
            self._settle(held.request, held.steps, replace(answer, decision=decision))
        except Exception as error:
            log.exception("the answer to held request %s can't be given", held.request.id)
            self._tell(held, lambda caller, error=error: caller.set_exception(error))
        else:
            waiting = [caller for caller in held.callers if not caller.done()]
            if all(caller in held.joined for caller in waiting):  # who asked first has left: another one runs it
                held.joined.remove(waiting[0])
            again = replace(decision, duplicate=True)
            self._tell(held, lambda caller: caller.set_result(again if caller in held.joined else decision))

    def _tell(self, held: HeldCall, say: Callable[["asyncio.Future[Decision]"], Any]) -> None:
        for caller in held.callers:
            if not caller.done():
                say(caller)

    def _left(self, held: HeldCall, answer: "asyncio.Future[Decision]") -> None:
        """A caller has its answer or has left."""
        held.callers.remove(answer)
        held.watching.pop(answer, None)
        if not held.callers and held.queue.id in self._by_decision:
            withdrawn(self._site, held.call, monotonic_s())
            self._forget(held)

    def _forget(self, held: HeldCall) -> None:
        self._calls.pop(held.call, None)
        self._by_decision.pop(held.queue.id, None)
        self._site.repeats.leaves(held.request, held.steps)
        self._counted()

    def _counted(self) -> None:
        HELD_NOW.set(len(self._calls))
        if self._calls:
            self._some.set()
        else:
            self._some.clear()
