"""Policy change: what `up` is asked to try, as the next revision of the fleet's policy."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.client.policies import publish, read_log
from tokenfleet.core.policy import parse_policy, policy_hash
from tokenfleet.core.revisions import PolicyRevision, renumbered
from tokenfleet.local.configs import toml_table, toml_value

BARE: Final = re.compile(r"[A-Za-z0-9_-]+")  # a key that TOML takes without quotes


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
    """The policy file with other values, table by table; its comments are not kept. No table is in one line with
    another, or nobody could add to it: neither the controller of shares nor who edits what is in force."""
    return "\n".join(_tables("", _merged(tomllib.loads(toml), changes)))


def _tables(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """The table of that name, then those in it."""
    own = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if own or (name and not values):
        yield toml_table(name, own) if name else "".join(f"{key} = {toml_value(own[key])}\n" for key in own)
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = key if BARE.fullmatch(key) else json.dumps(key)
            yield from _tables(f"{name}.{inner}" if name else inner, cast(Mapping[str, Any], value))


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for key, change in changes.items():
        known = found.get(key)
        if isinstance(change, Mapping) and isinstance(known, Mapping):
            found[key] = _merged(cast(Mapping[str, Any], known), cast(Mapping[str, Any], change))
        else:
            found[key] = change
    return found
