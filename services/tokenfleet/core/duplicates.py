"""Duplicates: is this logical request, under its caller's own key, one that runs, waits or has completed here already?

The attempts of one logical request bear one id and are never duplicates of each other. What was answered counts for as
long as it lives: waits at its gateway, runs by the ledger, or was handed on just now. Whoever it lives with no longer,
without a success that this replica was told of, has given its key back.
"""

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.core.repeats import ANSWERS_KEPT_S
from tokenfleet.core.slomax.idempotency import Keys
from tokenfleet.core.slomax.quota import entry_of
from tokenfleet.core.tokenpilot.held import Held

Logical = tuple[str, str]  # tenant and request


class Original(Struct, frozen=True, kw_only=True):
    """The last answer to the logical request that uses a key, as its duplicates get it: marked, and without what is
    large. `entry` is its tenant's."""

    decision: Decision
    entry: str
    key: str
    at_s: float


class Duplicates:
    """The keys in use at one replica; bounded as `Keys` are."""

    def __init__(self, held: Held, ledger: Ledger) -> None:
        self._held = held
        self._ledger = ledger
        self._keys = Keys()
        self._originals: dict[Logical, Original] = {}

    def find(self, request: Request, policy: Policy, *, now_s: float) -> Decision | str | None:
        """The answer that the request is a duplicate of; in words, why it can't be one (another body: "conflict") or
        need not run (it has completed: "done"); None: it is new, or has no key."""
        if not request.idempotency_key:
            return None
        entry = entry_of(request.tenant, policy)
        asked = self._keys.ask(entry, request.tenant, request.idempotency_key, body_of(request), now_s=now_s)
        if asked.known == "new" or asked.known == "done":
            return "done" if asked.known == "done" else None
        original = self._originals.get((request.tenant, asked.ticket))
        if original is not None and not self._lives(original, now_s):
            self._give_back((request.tenant, asked.ticket), original)
            return None
        if asked.known == "conflict":
            return "conflict"
        if original is None or asked.ticket == request.id:
            return None
        return original.decision

    def answered(self, request: Request, decision: Decision, policy: Policy, *, now_s: float) -> None:
        """The request was answered so; one that is admitted, waits or goes elsewhere has its key from now on."""
        logical = (request.tenant, request.id)
        if decision.verdict in ("reject", "defer"):
            self.given_up(request)
            return
        entry, key = entry_of(request.tenant, policy), request.idempotency_key
        if self._keys.opened(entry, request.tenant, key, body_of(request), ticket=request.id, now_s=now_s):
            light = replace(decision, candidates=(), sites=(), shadows=(), block_keys=b"", tables={}, duplicate=True)
            self._originals[logical] = Original(decision=light, entry=entry, key=key, at_s=now_s)

    def given_up(self, request: Request) -> None:
        """This attempt of the request is not to run: nobody waits for it, or it was refused."""
        self._ended((request.tenant, request.id), request.attempt)

    def settled(self, event: OutcomeEvent, *, now_s: float) -> None:
        """An attempt has ended."""
        logical = (event.tenant, event.request)
        if event.kind != "finished":
            self._ended(logical, event.attempt)
        elif (original := self._originals.pop(logical, None)) is not None:
            self._keys.done(original.entry, event.tenant, original.key, now_s=now_s)

    def follow(self, policy: Policy) -> None:
        """Another policy is in force; tenants that it lacks are forgotten."""
        self._keys.retain(frozenset(policy.tenants))
        self._originals = {name: each for name, each in self._originals.items() if each.entry in policy.tenants}

    def __len__(self) -> int:
        return len(self._keys)

    def _ended(self, logical: Logical, attempt: int) -> None:
        """Without success. A later attempt that runs keeps the key."""
        original = self._originals.get(logical)
        if original is not None and attempt >= original.decision.attempt:
            self._give_back(logical, original)

    def _give_back(self, logical: Logical, original: Original) -> None:
        del self._originals[logical]
        self._keys.released(original.entry, logical[0], original.key)

    def _lives(self, original: Original, now_s: float) -> bool:
        decision = original.decision
        if decision.verdict == "queue":
            return (decision.request, decision.attempt) in self._held
        if decision.target:
            return decision.id in self._ledger
        return now_s - original.at_s <= ANSWERS_KEPT_S  # another site or a call of its own goes on with it


def body_of(request: Request) -> int:
    """64 bits that tell two requests under one key apart: the caller's own hash, else one of what it said."""
    if request.body_hash:
        return request.body_hash
    said = f"{request.model}\0{request.prompt_tokens}\0{request.max_tokens}\0".encode()
    return xxhash.xxh3_64_intdigest(said + request.block_keys)
