"""Policy rule: `up --policy NAME` as the next revision of the fleet's policy, so that a load shows what a rule does."""

import re

from msgspec.structs import replace

from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.client.policies import publish, read_log
from tokenfleet.core.errors import BadRequestError, PolicyError
from tokenfleet.core.policy import Rule, parse_policy, policy_hash
from tokenfleet.core.revisions import PolicyRevision, renumbered
from tokenfleet.core.tokenpilot.rules import RULES

TOKENPILOT = "tokenpilot"
NAMES: dict[str, Rule] = {TOKENPILOT: "cost", **{name: name for name in RULES}}


def rule_of(name: str) -> Rule:
    """The rule of the policy that people call `name`. Raises BadRequestError with the list of what exists."""
    if (rule := NAMES.get(name)) is None:
        raise BadRequestError("--policy", f"no policy {name!r}; there is: {', '.join(NAMES)}")
    return rule


def name_of(rule: str) -> str:
    """What people call the rule."""
    return TOKENPILOT if rule == "cost" else rule


async def put_into_force(bootstrap: str, rule: Rule) -> None:
    """Publishes what is in force, or the shipped policy, with another rule, unless it has that rule.

    Raises PolicyError for a policy in force that can't be changed by machine, and beside an open canary.
    """
    log = await read_log(bootstrap)
    text = log.in_force.toml if log.in_force is not None else policy_text()
    before = parse_policy(text, source="the policy in force")
    if before.tokenpilot.rule == rule:
        return
    revision = max(log.greatest, before.revision) + 1
    toml = with_rule(renumbered(text, revision), rule)
    reason = f"up --policy {name_of(rule)}"
    await publish(
        bootstrap,
        PolicyRevision(
            revision=revision, toml=toml, sha256=policy_hash(toml), by="up", at_wall_s=wall_s(), reason=reason
        ),
    )


def with_rule(toml: str, rule: Rule) -> str:
    """The policy file with TokenPilot's rule. Raises PolicyError for a file that it can't be put into."""
    line = f'rule = "{rule}"'
    bare = _RULE.sub("", toml)
    text = _TABLE.sub(rf"\g<0>\n{line}", bare, count=1) if _TABLE.search(bare) else f"{bare}\n[tokenpilot]\n{line}\n"
    before, after = (
        parse_policy(toml, source="the policy in force"),
        parse_policy(text, source="the policy with a rule"),
    )
    if replace(before, tokenpilot=replace(before.tokenpilot, rule=rule)) != after:
        raise PolicyError(f"the policy in force has no place where {line} could be put; apply one by hand")
    return text


_TABLE = re.compile(r"^\[tokenpilot\][ \t]*(#.*)?$", re.MULTILINE)
_RULE = re.compile(r'^rule *= *"[a-z_]*"[ \t]*\n', re.MULTILINE)
