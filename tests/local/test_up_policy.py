"""Up's policy: which rule `--policy NAME` puts into force, and how the fleet says which one is."""

import pytest
from msgspec.structs import replace

from tests.kafka_server import OwnKafka
from tokenfleet.adapters.kafka_admin import apply
from tokenfleet.adapters.policy_file import load_policy, policy_text
from tokenfleet.client.policies import read_log
from tokenfleet.core.errors import BadRequestError, PolicyError
from tokenfleet.core.policy import Rule, parse_policy
from tokenfleet.core.tokenpilot.rules import RULES
from tokenfleet.local.metrics import FleetMetrics
from tokenfleet.local.options import UpOptions
from tokenfleet.local.policy_change import put_into_force
from tokenfleet.local.policy_rule import NAMES, name_of, rule_change, rule_of, with_rule
from tokenfleet.local.up import EXIT_FAILED, run_up


def test_each_policy_has_a_name_and_another_is_refused_with_the_list_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(NAMES) == ["tokenpilot", *RULES]
    assert {name_of(rule_of(name)) for name in NAMES} == set(NAMES)
    with pytest.raises(
        BadRequestError, match="there is: tokenpilot, power_of_two, least_requests, round_robin, random"
    ):
        rule_of("cost")
    assert run_up(UpOptions(policy="magic")) == EXIT_FAILED
    assert "no policy 'magic'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "toml",
    [
        policy_text(),
        policy_text() + "\n[tokenpilot]\nreuse_max = 4.0\n",
        policy_text()
        + '\n[tokenpilot]  # weights\nrule = "random"\nreuse_max = 4.0\n\n[tokenpilot.late]\nenabled = false\n',
        policy_text() + "\n[tokenpilot.late]\nenabled = false\n",
    ],
    ids=["shipped", "weights", "a rule", "late alone"],
)
def test_a_rule_is_put_into_any_policy_and_nothing_else_changes(toml: str) -> None:
    before = parse_policy(toml, source="before")
    for rule in NAMES.values():
        after = parse_policy(with_rule(toml, rule), source="after")
        assert after.tokenpilot.rule == rule
        assert replace(after, tokenpilot=before.tokenpilot) == before
        assert after.tokenpilot == replace(before.tokenpilot, rule=rule)


def test_a_policy_with_no_place_for_a_rule_is_refused() -> None:
    toml = "tokenpilot = { reuse_max = 4.0 }\n" + policy_text()
    with pytest.raises(PolicyError):
        with_rule(toml, "random")


async def test_the_rule_is_the_next_revision_on_the_topic_and_is_published_once(own_kafka: OwnKafka) -> None:
    await apply(own_kafka.bootstrap, ("a",))
    shipped, _ = load_policy()
    await put_into_force(own_kafka.bootstrap, rule_change("tokenpilot"))
    assert (await read_log(own_kafka.bootstrap)).in_force is None  # it is what the fleet has anyway
    steps: list[tuple[Rule, int]] = [("round_robin", 1), ("round_robin", 1), ("cost", 2)]
    for rule, revision in steps:
        await put_into_force(own_kafka.bootstrap, rule_change(name_of(rule)))
        told = (await read_log(own_kafka.bootstrap)).in_force
        assert told is not None
        assert told.revision == shipped.revision + revision
        policy = parse_policy(told.toml, source="published")
        assert (policy.revision, policy.tokenpilot.rule) == (told.revision, rule)


def test_the_state_of_a_process_is_read_from_its_page() -> None:
    metrics = FleetMetrics({"decide-a-0": 0})
    assert metrics.state("tokenfleet_tokenpilot_rule", "decide-a-0") is None
    page = (
        b'tokenfleet_tokenpilot_rule{tokenfleet_tokenpilot_rule="cost"} 0.0\n'
        b'tokenfleet_tokenpilot_rule{tokenfleet_tokenpilot_rule="random"} 1.0\n'
    )
    metrics.take("decide-a-0", page)
    assert metrics.state("tokenfleet_tokenpilot_rule", "decide-a-0") == "random"
