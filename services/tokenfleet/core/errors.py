"""Errors: what can go wrong, in one tree.

A refusal (no room, not permitted, over quota) is a value, a `Decision` with a verdict and a reason.
An exception here means that there was no decision at all, or that a file or record can't be used.
`adapters.grpc_server` maps each leaf to a gRPC status in one table.

    TokenFleetError
    ├── BadRequestError           a field of the caller's request can't be used
    │   ├── UnknownModelError
    │   ├── UnknownTenantError
    │   ├── UnknownSiteError
    │   └── ForeignTenantError    the caller may not speak for the tenant that it names
    ├── UnauthenticatedError      nobody is known by what the caller shows
    ├── NotAllowedError           the caller has no role that may ask this
    ├── TableNotReadyError        the tables have not been read to their end yet
    ├── NotKeptError              the disk takes no more, so a report can't be kept here
    ├── NotFoundError             nothing is known under that id
    ├── BadRecordError            a record on a topic can't be read
    ├── PolicyError               a policy, fleet or engine file can't be used
    └── SetupError                something outside is missing or taken: broker, database, port, topic, schema
"""

from collections.abc import Iterable


class TokenFleetError(Exception):
    """Base of all errors of this package. `str(error)` is one line that a user can act on."""


class BadRequestError(TokenFleetError):
    """A field of the request can't be used. `field` is its path in the request message."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def listed(known: Iterable[str]) -> str:
    """What there is, in order: at most KNOWN_NAMES_SHOWN names, each cut to its beginning."""
    names = sorted(known)
    shown = ", ".join(name[:NAME_SHOWN_CHARS] for name in names[:KNOWN_NAMES_SHOWN]) or "none"
    return shown + (f" and {len(names) - KNOWN_NAMES_SHOWN} more" if len(names) > KNOWN_NAMES_SHOWN else "")


KNOWN_NAMES_SHOWN = 20
NAME_SHOWN_CHARS = 40  # about 1 KiB in all: a status carries the text twice, and gRPC has 8 KiB of metadata


class UnknownModelError(BadRequestError):
    """No model of that name is in the policy."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        super().__init__("model", f"no model {model[:NAME_SHOWN_CHARS]!r}; there is: {listed(known)}")


class UnknownTenantError(BadRequestError):
    """No tenant of that name is in the policy, and the policy has no default tenant."""

    def __init__(self, tenant: str, known: Iterable[str]) -> None:
        super().__init__("tenant", f"no tenant {tenant[:NAME_SHOWN_CHARS]!r}; there is: {listed(known)}")


class UnknownSiteError(BadRequestError):
    """No site of that name is in the policy: the request can't have arrived there."""

    def __init__(self, site: str, known: Iterable[str]) -> None:
        super().__init__("origin", f"no site {site[:NAME_SHOWN_CHARS]!r}; there is: {listed(known)}")


class ForeignTenantError(BadRequestError):
    """The caller may not speak for the tenant that it names, or names none of several."""

    def __init__(self, problem: str) -> None:
        super().__init__("tenant", problem)


class UnauthenticatedError(TokenFleetError):
    """The caller shows no token, or one that nobody is known by."""


class NotAllowedError(TokenFleetError):
    """The caller is known and has no role that may ask this."""


class TableNotReadyError(TokenFleetError):
    """The tables have not been read to their end, so there can be no decision yet."""


class NotKeptError(TokenFleetError):
    """A report was not kept: this replica's disk takes no more. The one who sent it still has it."""


class NotFoundError(TokenFleetError):
    """Nothing is known under the id that was asked for."""


class BadRecordError(TokenFleetError):
    """A record on a topic can't be read; the message says why, without the payload."""


class PolicyError(TokenFleetError):
    """A policy, fleet or engine file can't be used; the message names file and key."""


class SetupError(TokenFleetError):
    """Something outside is missing or taken; the message says what, where and the remedy."""
