"""Batch work with a far deadline: deferred with a ticket, and run as any other in its turn."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ADMIT, ROUTE
from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.slomax.terms import BatchPolicy
from tokenfleet.core.slomax.tickets import Backlog, HandedIn, Used, bucket_of

FAR_S = 7_200.0


class BatchTown(Town):
    """A town whose batch work waits in PostgreSQL."""

    def __init__(self, *, small: int = 1, **terms: Any) -> None:
        super().__init__("b", small=small)
        policy = self.site.policy
        batch = BatchPolicy(enabled=True, **terms)
        self.site.policy = replace(policy, slomax=replace(policy.slomax, batch=batch))
        self.site.tickets.closed = ""
        self.site.tickets.secret = b"secret"

    def grant(self, *requests: str) -> None:
        self.site.tickets.heard_granted([("acme", name, 0) for name in requests])


def job(name: str = "job", **facts: Any) -> Request:
    return asked(name, **({"task": "batch", "stream": False, "deadline_s": FAR_S} | facts))


def shown(decision: Decision, **facts: Any) -> Request:
    assert decision.ticket is not None
    return job(decision.request, ticket=decision.ticket.token, **facts)


def test_it_is_deferred_with_a_token_and_its_row() -> None:
    town = BatchTown()
    decided = town.decide(job())
    decision, row = decided.decision, decided.ticket
    assert (decision.verdict, decision.reason) == ("defer", "")
    assert decision.ticket is not None
    assert decision.admission is not None
    assert decision.admission.not_before_s == pytest.approx(1.0, rel=0.2)
    assert isinstance(row, HandedIn)
    assert (row.request, row.model, row.site, row.left_s) == ("job", "small-chat", "b", FAR_S)
    assert row.gpu_s > 0.0
    assert row.kv_tokens > 1000


def test_who_shows_its_token_hands_nothing_in_again() -> None:
    town = BatchTown()
    first = town.decide(job()).decision
    again = town.decide(shown(first))
    assert (again.decision.verdict, again.ticket) == ("defer", None)
    assert town.site.tickets.backlog("small-chat").tickets == 1


@pytest.mark.parametrize(
    "other",
    [
        {"deadline_s": 300.0},
        {"wait_max_s": 5.0},
        {"task": "", "stream": True, "deadline_s": None},
        {"elapsed_s": FAR_S - 300.0},
    ],
)
def test_near_held_and_interactive_work_has_no_ticket(other: dict[str, Any]) -> None:
    decided = BatchTown().decide(job(**other))
    assert decided.decision.ticket is None
    assert decided.decision.verdict != "defer"


def test_what_could_never_run_is_refused_at_once() -> None:
    decision = BatchTown().decide(job(max_tokens=10**6, prompt_tokens=10**6)).decision
    assert (decision.verdict, decision.reason) == ("reject", "context_too_long")


def test_a_granted_one_runs_and_its_use_is_told() -> None:
    town = BatchTown()
    first = town.decide(job()).decision
    town.grant("job")
    assert town.decide(shown(first), steps=ADMIT).decision.verdict == "admit"
    decided = town.decide(shown(first))
    assert (decided.decision.verdict, decided.decision.target) == ("admit", "b-small-0")
    assert decided.ticket == Used(tenant="acme", request="job", attempt=0, decision=decided.decision.id)
    assert town.decide(shown(first)).decision.verdict == "defer"  # the grant is spent


def test_a_call_that_only_routes_uses_the_grant_too() -> None:
    town = BatchTown()
    town.decide(job())
    town.grant("job")
    assert isinstance(town.decide(job(), steps=ROUTE).ticket, Used)


def test_a_granted_one_without_room_keeps_its_grant_and_comes_again_soon() -> None:
    town = BatchTown()
    most = town.site.policy.classes["batch"].running_max_per_instance
    names = [f"job-{i}" for i in range(most + 1)]
    tokens = {name: town.decide(job(name)).decision for name in names}
    town.grant(*names)
    answers = [town.place(shown(tokens[name])) for name in names]
    assert [answer.verdict for answer in answers] == ["admit"] * most + ["defer"]
    last = answers[-1]
    assert last.ticket is not None
    assert last.ticket.granted
    assert last.admission is not None
    assert last.admission.not_before_s == pytest.approx(1.0, rel=0.2)


def test_the_more_goes_first_the_later_it_is_to_come_again_and_a_miss_is_told() -> None:
    town = BatchTown(poll_max_s=1e6)
    most = town.site.policy.classes["batch"].running_max_per_instance
    town.site.tickets.heard_backlogs({"small-chat": Backlog({bucket_of(1_000.0): 400.0 * most}, tickets=9)})
    decision = town.decide(job()).decision
    assert decision.admission is not None
    assert decision.admission.not_before_s == pytest.approx(200.0, rel=0.2)
    assert decision.ticket is not None
    assert not decision.ticket.will_miss
    town.site.tickets.rate("small-chat").per_s = 0.05
    late = town.decide(job("late")).decision
    assert late.ticket is not None
    assert late.ticket.will_miss
    assert "will miss its deadline" in late.sentence


def test_without_postgresql_batch_work_is_answered_as_if_there_were_no_tickets() -> None:
    town = BatchTown()
    first = town.decide(job()).decision
    town.site.tickets.closed = "postgres_away"
    decided = town.decide(shown(first))
    assert decided.decision.verdict == "admit"
    assert isinstance(decided.ticket, Used)  # its row learns of it when PostgreSQL is back
    assert town.decide(job("other")).ticket is None


def test_coming_again_with_its_token_is_no_retry_and_no_fresh_request() -> None:
    town = BatchTown()
    first = town.decide(job(attempt=1)).decision
    for _ in range(200):
        assert town.decide(shown(first, attempt=1)).decision.verdict == "defer"


def test_a_deferred_one_costs_no_quota() -> None:
    town = BatchTown()
    policy = town.site.policy
    tenants = {name: replace(terms, requests_per_minute_max=2) for name, terms in policy.tenants.items()}
    town.site.policy = replace(policy, tenants=tenants)
    assert {town.decide(job(f"job-{i}")).decision.verdict for i in range(10)} == {"defer"}


def test_a_dry_run_hands_nothing_in() -> None:
    town = BatchTown()
    decided = town.decide(job(dry_run=True))
    assert decided.decision.verdict == "defer"
    assert decided.ticket is None
    assert town.site.tickets.backlog("small-chat").tickets == 0


def test_a_granted_one_is_not_sent_elsewhere_though_there_is_room() -> None:
    """Its turn is one of this pool; at another site it would begin to wait anew."""
    town, other = BatchTown(), Town("c", small=4)
    town.hears_summary_of(other)
    most = town.site.policy.classes["batch"].running_max_per_instance
    first = town.decide(job("last")).decision
    town.grant(*(f"job-{i}" for i in range(most)), "last")
    assert {town.place(job(f"job-{i}")).site for i in range(most)} == {"b"}
    assert town.place(asked("held-back", declared_class="batch", deadline_s=300.0)).verdict == "redirect"
    assert town.place(shown(first)).verdict == "defer"
