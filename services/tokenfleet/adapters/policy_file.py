"""Policy file: the policy that a process starts with, its own file or the shipped one, and the one that follows it."""

import logging
from importlib.resources import files
from pathlib import Path

from tokenfleet.core.errors import PolicyError
from tokenfleet.core.policy import Policy, newer_policy, parse_policy, policy_hash
from tokenfleet.core.revisions import PolicyRecord, PolicyRevision

log = logging.getLogger(__name__)


def load_policy(path: str = "") -> tuple[Policy, str]:
    """The policy in the file at `path`, the shipped default for an empty one, and the SHA-256 of its text.

    Raises PolicyError when the file can't be read or used.
    """
    text = policy_text(path)
    return parse_policy(text, source=path or "the shipped policy"), policy_hash(text)


def policy_text(path: str = "") -> str:
    """The text of the policy file. Raises PolicyError when it can't be read."""
    if not path:
        return files("tokenfleet.core").joinpath("default_policy.toml").read_text(encoding="utf-8")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"policy file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"policy file {path}: not UTF-8 at byte {error.start}") from error


def revised(policy: Policy, heard: PolicyRecord) -> Policy:
    """The policy in force once `heard` is: its own if it is newer and can be used, which the log says.

    A canary is not in force, and a report on one changes nothing.
    """
    if not isinstance(heard, PolicyRevision) or heard.is_canary:
        return policy
    try:
        return newer_policy(policy, revision=heard.revision, toml=heard.toml) or policy
    except PolicyError as error:
        log.error("policy revision %d is not used: %s", heard.revision, error)
        return policy
