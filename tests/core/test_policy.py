"""Policy: a bad file fails when it is read, and says where."""

from importlib.resources import files

import pytest

from tokenfleet.core.errors import PolicyError
from tokenfleet.core.policy import newer_policy, parse_policy

SHIPPED = (files("tokenfleet.core") / "default_policy.toml").read_text()
SHARES = "slomax.controller.classes.chat.share = 0.8\nslomax.controller.classes.{}.share = {}"


def test_the_shipped_policy_is_good() -> None:
    policy = parse_policy(SHIPPED, source="shipped")
    assert {"chat", "long", "batch"} <= policy.classes.keys()
    assert policy.tenant("eu-bank").residency == "eu-only"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("revision = 1", "revision = "), "shipped: "),
        (("revision = 1", "revision = 0"), "revision"),
        (("revision = 1", "revision = 1\ncolour = 3"), "colour"),
        (("ttft_s = 2.0", "ttft_s = -1.0"), "ttft_s"),
        (("ttft_s = 2.0", "ttft_s = nan"), "ttft_s"),
        (("revision = 1", "revision = 1\n[tokenpilot]\nkv_lambda_s = inf"), "kv_lambda_s"),
        (
            ("revision = 1", 'revision = 1\n[tokenpilot]\nrule = "cheapest"'),
            "'cheapest' - at `$.tokenpilot.rule`; there is: 'cost', 'least_requests', 'power_of_two', 'random', ",
        ),
        (("revision = 1", 'revision = 1\n[shadows.a]\nrule = "cheapest"'), "; there is: 'cost', "),
        (('residency = "eu-only"', 'residency = "mars"'), "tenants.eu-bank.residency: no rule 'mars'"),
        (('classes = ["batch"]', 'classes = ["gold"]'), "tenants.archive.classes: no class 'gold'"),
        (("[classes.batch]", "[classes.bulk]"), "classes: 'batch' is missing"),
        (("{ a = 0.005,", "{ mars = 0.005,"), "no site 'mars'"),
        (("[sites.d]", '[sites."d/1"]'), "sites: 'd/1' is not"),
        (("[sites.d]", '[sites."d e"]'), "sites: 'd e' is not"),
        (("[tenants.globex]", '[tenants."glo\\u0000bex"]'), "tenants: "),
        (("[models.small-chat]", f'[models."{"m" * 257}"]'), "models: "),
        (("[tenants.acme]", "[tenants.acme]\nweight = 0"), "weight"),
        (("[tenants.acme]", '[tenants.acme]\nteam = "mars"'), "tenants.acme.team: no tenant 'mars'"),
        (("[tenants.acme]", '[tenants.acme]\nteam = "acme"'), "tenants.acme.team: no tenant 'acme' without"),
        (("revision = 1", "revision = 1\n" + SHARES.format("gold", 0.2)), "no class 'gold'"),
        (("revision = 1", "revision = 1\n" + SHARES.format("batch", 0.3)), "don't add up to 1"),
        (("revision = 1", "revision = 1\n" + SHARES.format("batch", 0.01)), "batch: the share is not between"),
    ],
)
def test_a_bad_file_is_refused_by_the_name_of_its_key(change: tuple[str, str], named: str) -> None:
    before, after = change
    assert before in SHIPPED
    with pytest.raises(PolicyError) as refused:
        parse_policy(SHIPPED.replace(before, after), source="shipped")
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_revision_comes_into_force_only_under_its_own_number_and_forwards() -> None:
    policy = parse_policy(SHIPPED, source="shipped")
    second = SHIPPED.replace("revision = 1", "revision = 2")
    newer = newer_policy(policy, revision=2, toml=second)
    assert newer is not None
    assert newer_policy(newer, revision=2, toml=second) is None
    assert newer_policy(newer, revision=1, toml=SHIPPED) is None
    with pytest.raises(PolicyError):
        newer_policy(policy, revision=3, toml=second)
