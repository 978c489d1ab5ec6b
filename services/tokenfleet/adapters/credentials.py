"""Credentials: the file that says who may call, by the SHA-256 of the bearer tokens; no token stands in it.

    [credentials.acme-gateway]
    token_sha256 = "…"        # 64 hexadecimal digits
    roles = ["gateway"]
    tenants = ["acme"]        # absent: all

`tokenfleet credentials new` makes a token and its entry. A file that changes is read again within FOLLOW_PERIOD_S; one
that can't be used changes nothing, and the log says why.
"""

import asyncio
import hashlib
import logging
import secrets
import unicodedata
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from tokenfleet.core.errors import SetupError, UnauthenticatedError
from tokenfleet.core.identity import ROLES, Caller, Role

FOLLOW_PERIOD_S: Final = 1.0
TOKEN_BYTES: Final = 32  # of chance: no dictionary finds it, so its hash needs no salt
TOKEN_PREFIX: Final = "tf_"  # what scanners for leaked secrets look for
TOKEN_MAX_CHARS: Final = 1024
SCHEME: Final = "bearer "

Stamp = tuple[int, int, int]

log = logging.getLogger(__name__)


class Credential(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file."""

    token_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    roles: Annotated[tuple[Role, ...], Meta(min_length=1)]
    tenants: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)] | None = None


class CredentialsFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    credentials: Annotated[dict[str, Credential], Meta(min_length=1)]


class Credentials:
    """The callers of the last good file at `path`. Raises SetupError when the first one can't be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._problem = ""
        self._stamp = _stamp(path)
        self._callers = read_callers(path)

    def caller(self, authorization: str) -> Caller:
        """The one whose token the metadata `authorization` shows. Raises UnauthenticatedError.

        It is looked up by its hash: how long that takes says nothing of any token in force.
        """
        if not authorization:
            raise UnauthenticatedError("no token: send the metadata `authorization: Bearer TOKEN`")
        token = authorization[len(SCHEME) :].strip()
        known = authorization[: len(SCHEME)].lower() == SCHEME and len(token) <= TOKEN_MAX_CHARS
        if not known or (found := self._callers.get(token_sha256(token))) is None:
            raise UnauthenticatedError("nobody is known by this token; ask the operator for a credential")
        return found

    async def follow(self) -> None:
        """Reads the file again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_PERIOD_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Reads the file if it has changed; a bad one leaves the callers of the last good one."""
        try:
            if (stamp := _stamp(self._path)) == self._stamp:
                return
            self._callers = read_callers(self._path)
        except SetupError as error:
            if str(error) != self._problem:
                log.error("%s; the %d credentials of the last good file stay in force", error, len(self._callers))
            self._problem = str(error)
            return
        self._stamp, self._problem = stamp, ""
        log.info("%d credentials are in force, by %s", len(self._callers), self._path)


def credentials_of(path: str) -> Credentials | None:
    """The credentials in the file that TOKENFLEET_CREDENTIALS names, None without one. Raises SetupError."""
    return Credentials(Path(path)) if path else None


def read_callers(path: Path) -> dict[str, Caller]:
    """The callers in the file, by the SHA-256 of their tokens. Raises SetupError, naming file, entry and remedy."""
    try:
        entries = msgspec.toml.decode(path.read_bytes(), type=CredentialsFile).credentials
    except OSError as error:
        raise SetupError(f"TOKENFLEET_CREDENTIALS: can't read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = str(error).replace("`", "")
        raise SetupError(f"credentials file {path}: {problem}; {REMEDY}") from error
    callers: dict[str, Caller] = {}
    for name, entry in entries.items():
        if (other := callers.get(entry.token_sha256)) is not None:
            problem = f"{other.name} and {name} have one token; give each its own"
            raise SetupError(f"credentials file {path}: {problem} (`tokenfleet credentials new`)")
        tenants = None if entry.tenants is None else frozenset(map(_normal, entry.tenants))
        callers[entry.token_sha256] = Caller(name=name, roles=frozenset(entry.roles), tenants=tenants)
    return callers


def new_token() -> str:
    """A token that nobody has yet."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def token_sha256(token: str) -> str:
    """What the file holds of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


REMEDY: Final = (
    f"an entry has token_sha256 (64 hexadecimal digits), roles (of {', '.join(ROLES)}) and perhaps tenants; "
    "`tokenfleet credentials new` prints one"
)


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError as error:
        raise SetupError(f"TOKENFLEET_CREDENTIALS: can't read {path}: {error.strerror}") from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _normal(tenant: str) -> str:
    """As requests' tenants are read."""
    return unicodedata.normalize("NFC", tenant)
