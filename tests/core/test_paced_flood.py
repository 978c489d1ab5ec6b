"""One tenant's flood: others go before what is beyond its share, and it has no more claim than filling work."""

from msgspec.structs import replace

from tests.core.fleets import Town
from tests.core.paced_towns import PACED, answers, ask, decodes, release, ticks, town


def floods(b: Town, tenant: str, seconds: float = 500.0) -> None:
    """The tenant has used far more than its share of the pool, another has used a little."""
    queues = b.site.queues("small-chat")
    for name, its in ((tenant, seconds), ("globex", 30.0)):
        queues._usage.spent(name, its, b.site.policy.slomax.fair, b.now_s)
    b.now_s += 1.0
    b.hears_telemetry()


def test_a_flooding_tenants_requests_go_behind_all_others_whatever_their_class() -> None:
    b = town(small=1)
    first = ask(b, "first", prompt_tokens=20_000, tenant="globex")
    floods(b, "acme")
    ask(b, "flood", "chat", 100)
    ask(b, "batch", "batch", 100, tenant="globex")
    ask(b, "chat", "chat", 100, tenant="globex")
    b.hears_outcome(first, "first_token", ttft_s=1.6)
    assert [name for name, _ in answers(b)] == ["chat", "batch", "flood"]


def test_others_requests_go_at_once_past_a_flood_that_waits() -> None:
    b = town(small=1)
    ask(b, "first", prompt_tokens=6_000, tenant="globex")  # about .4 s of work: within chat's bound, not filling work's
    floods(b, "acme")
    assert ask(b, "more", prompt_tokens=6_000, tenant="globex").verdict == "admit"
    assert ask(b, "flood", "chat", 100).verdict == "queue"
    assert ask(b, "chat", "chat", 100, tenant="globex").verdict == "admit"


def test_a_flood_is_gated_as_filling_work_is() -> None:
    for tenant, verdict in (("acme", "queue"), ("globex", "admit")):
        b = town(small=1)
        decodes(b, "chat")
        floods(b, "acme")
        ticks(b, 20, over_s=1.0)
        assert ask(b, "r", "chat", 8_000, tenant=tenant).verdict == verdict, tenant


def test_what_of_a_flood_has_waited_as_long_as_it_can_is_refused_while_nothing_is_open() -> None:
    for tenant, answer in (("acme", ("r", "reject")), ("globex", ("r", "admit"))):
        b = town(small=1)
        ask(b, "first", prompt_tokens=100_000, tenant="globex")
        floods(b, "acme")
        assert ask(b, "r", "batch", wait_max_s=2.0, tenant=tenant).verdict == "queue"
        b.now_s += 2.1
        [decision] = list(release(b))
        assert (decision.request, decision.verdict) == answer, tenant
        if decision.verdict == "reject":
            assert decision.reason == "all_busy"
            assert decision.admission is not None
            assert decision.admission.retry_after_s is not None


def test_the_misses_of_a_flood_take_nothing_from_reserving_work() -> None:
    shares: list[float] = []
    for tenant in ("acme", "globex"):
        b = town(small=1)
        sent = [ask(b, f"r{n}", prompt_tokens=10, tenant=tenant) for n in range(30)]
        floods(b, "acme")
        for decision in sent:
            b.hears_outcome(decision, "first_token", ttft_s=30.0)
            b.hears_outcome(decision, "finished", ttft_s=30.0, tpot_s=1.0, output_tokens=20)
        allowance, terms = b.site.queues("small-chat").allowance, b.site.policy.slomax.pacing
        allowance.advance(terms, b.now_s)
        allowance.advance(terms, b.now_s + terms.allowance_period_s)
        shares.append(allowance.share)
    assert shares[0] > shares[1]


def test_a_full_line_takes_who_has_less_than_an_even_part_of_it() -> None:
    b = town(small=1, pacing=replace(PACED, waiting_max=4))
    ask(b, "first", prompt_tokens=100_000)
    assert [ask(b, f"flood-{n}").verdict for n in range(5)] == ["queue"] * 4 + ["reject"]
    assert [ask(b, f"r-{n}", tenant="globex").verdict for n in range(3)] == ["queue"] * 2 + ["reject"]
    assert ask(b, "flood-5").reason == "all_busy"


def test_a_tenant_that_left_the_policy_while_it_flooded_is_no_fault() -> None:
    b = town(small=1)
    floods(b, "acme")
    policy = b.site.policy
    tenants = {name: terms for name, terms in policy.tenants.items() if name != "acme"}
    b.site.adopt(replace(policy, tenants=tenants, revision=policy.revision + 1))
    assert ask(b, "r", tenant="globex").verdict == "admit"


def test_a_flood_goes_nowhere_while_others_reserving_requests_wait() -> None:
    for tenant, goes in (("globex", False), ("acme", True)):
        b = town(small=2)
        for n in range(2):
            decodes(b, f"chat-{n}", tenant="globex")
        floods(b, "acme")
        ticks(b, 20, over_s=1.0)  # 50 ms a token: too slow for a long prompt, not for ten tokens
        assert ask(b, "long", "long", 16_000, tenant=tenant).verdict == "queue"
        assert ask(b, "flood", "chat", 10, tenant="acme").verdict == "queue"
        assert (("flood", "admit") in answers(b)) == goes, tenant


def test_no_instance_is_kept_free_for_the_large_prompts_of_a_flood() -> None:
    for tenant, verdict in (("globex", "queue"), ("acme", "admit")):
        b = town(small=2)
        for n in range(2):
            decodes(b, f"chat-{n}", tenant="globex")
        floods(b, "acme")
        b.hears_telemetry(iterations_total=0)
        b.now_s += 1.0
        b.changes("b-small-0", iterations_total=30)  # 33 ms a token: too slow for a long prompt, and nearest to a gap
        b.changes("b-small-1", iterations_total=14)  # 71 ms: closed
        b.hears_telemetry()
        assert ask(b, "long", "long", 16_000, tenant=tenant).verdict == "queue"
        assert ask(b, "batch", "batch", 10, tenant="globex").verdict == verdict, tenant
