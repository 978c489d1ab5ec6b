"""Policy change: what `up` is asked to try, as the next revision of the fleet's policy."""

import tomllib
from collections.abc import Callable, Mapping
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.client.policies import publish, read_log
from tokenfleet.core.policy import parse_policy, policy_hash
from tokenfleet.core.revisions import PolicyRevision, renumbered
from tokenfleet.local.configs import toml_value


class PolicyChange(Struct, frozen=True, kw_only=True):
    """`of` gives the text of a policy file as it is to be, or raises PolicyError; `reason` is why."""

    reason: str
    of: Callable[[str], str]


async def put_into_force(bootstrap: str, change: PolicyChange) -> None:
    """Publishes what is in force, or the shipped policy, changed; nothing if that changes nothing.

    Raises PolicyError for a policy in force that can't be changed by machine, and beside an open canary.
    """
    log = await read_log(bootstrap)
    text = log.in_force.toml if log.in_force is not None else policy_text()
    before = parse_policy(text, source="the policy in force")
    changed = change.of(text)
    if replace(parse_policy(changed, source=change.reason), revision=before.revision) == before:
        return
    revision = max(log.greatest, before.revision) + 1
    toml = renumbered(changed, revision)
    await publish(
        bootstrap,
        PolicyRevision(
            revision=revision, toml=toml, sha256=policy_hash(toml), by="up", at_wall_s=wall_s(), reason=change.reason
        ),
    )


def merged(toml: str, changes: Mapping[str, Any]) -> str:
    """The policy file with other values, table by table; its comments are not kept."""
    values = _merged(tomllib.loads(toml), changes)
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in values.items())


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for key, change in changes.items():
        known = found.get(key)
        if isinstance(change, Mapping) and isinstance(known, Mapping):
            found[key] = _merged(cast(Mapping[str, Any], known), cast(Mapping[str, Any], change))
        else:
            found[key] = change
    return found
