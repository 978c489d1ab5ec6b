"""Policy rule: `up --policy NAME` as a change of the fleet's policy, so that a load shows what a rule does."""

import re

from msgspec.structs import replace

from tokenfleet.core.errors import BadRequestError, PolicyError
from tokenfleet.core.policy import Rule, parse_policy
from tokenfleet.core.tokenpilot.rules import RULES
from tokenfleet.local.policy_change import PolicyChange

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


def rule_change(name: str) -> PolicyChange:
    """The rule that people call `name`. Raises BadRequestError with the list of what exists."""
    rule = rule_of(name)
    return PolicyChange(reason=f"up --policy {name}", of=lambda toml: with_rule(toml, rule))


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
