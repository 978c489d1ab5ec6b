"""Watch: how much of a prompt was cached anywhere when it was placed, and how much where it went.

A watched router decides as it does unwatched. What is cached is read from the same KV events that gateways get, as late
as the first gateway gets them.
"""

from collections.abc import Sequence

from msgspec import Struct

from tokenfleet.core.decision import Request
from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.core.records import KvDelta, KvSnapshot, OutcomeEvent
from tokenfleet.sim.router import Answer, MakeRouter, Record, Router, Setup


class Reuse(Struct, frozen=True, kw_only=True):
    """Cached tokens of one prompt at its placement: on the instance that had most, and on the one it went to."""

    available_tokens: int
    captured_tokens: int


class Watch:
    """The reuse of all requests of one run, by request id."""

    def __init__(self) -> None:
        self.reuse: dict[str, Reuse] = {}
        self._cached = PrefixIndex()
        self._followed = ""

    def over(self, make: MakeRouter) -> MakeRouter:
        """Makes the same router, watched."""

        def watched(setup: Setup) -> Router:
            self._followed = self._followed or setup.gateway
            return _Watched(self, make(setup), setup)

        return watched

    def hear(self, record: Record, setup: Setup) -> None:
        """A record that reached a gateway; those of the one made first tell what is cached."""
        if setup.gateway == self._followed and isinstance(record, KvDelta | KvSnapshot):
            self._cached.apply(record)

    def placed(self, request: Request, instance: str) -> None:
        """The request goes to `instance` now."""
        hits = self._cached.hits(request.block_keys)
        self.reuse[request.id] = Reuse(
            available_tokens=max(hits.values(), default=0) * request.block_tokens,
            captured_tokens=hits.get(instance, 0) * request.block_tokens,
        )


class _Watched:
    """A Router around another."""

    def __init__(self, watch: Watch, router: Router, setup: Setup) -> None:
        self._watch = watch
        self._router = router
        self._setup = setup
        self._held: dict[str, Request] = {}

    def route(self, request: Request, now_s: float) -> Answer:
        answer = self._router.route(request, now_s)
        if answer.instance:
            self._watch.placed(request, answer.instance)
        elif not answer.refused:
            self._held[request.id] = request
        return answer

    def released(self, now_s: float) -> Sequence[Answer]:
        answers = self._router.released(now_s)
        for answer in answers:
            request = self._held.pop(answer.request, None)
            if request is not None and answer.instance:
                self._watch.placed(request, answer.instance)
        return answers

    @property
    def holding(self) -> int:
        return self._router.holding

    def heard(self, record: Record, now_s: float) -> None:
        self._watch.hear(record, self._setup)
        self._router.heard(record, now_s)

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        return self._router.settled(event, now_s)
