"""Identity: who calls, what that one may ask, and for which tenants it speaks. A field of a request never says so."""

from typing import Final, Literal, get_args

from msgspec import Struct

from tokenfleet.core.errors import NAME_SHOWN_CHARS, ForeignTenantError, listed

Role = Literal["gateway", "operator", "auditor"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


class Caller(Struct, frozen=True, kw_only=True):
    """One who calls, by the `name` of its credential. `tenants` are those that it may speak for, None: all."""

    name: str
    roles: frozenset[Role]
    tenants: frozenset[str] | None = None

    def tenant(self, named: str) -> str:
        """The tenant that a request is of which names `named`; who may speak for one alone need name none.

        Raises ForeignTenantError for another's, and for none where there are several.
        """
        if self.tenants is None or named in self.tenants:
            return named
        if not named and len(self.tenants) == 1:
            return next(iter(self.tenants))
        problem = f"{named[:NAME_SHOWN_CHARS]!r} is not among them" if named else "name one of them"
        raise ForeignTenantError(f"{self.name} speaks for: {listed(self.tenants)}; {problem}")

    def speaks_for(self, tenant: str) -> bool:
        """Whether what is `tenant`'s may be told to it, and by it."""
        return self.tenants is None or tenant in self.tenants


ANYONE: Final = Caller(name="anyone", roles=frozenset(ROLES))  # where nobody needs a credential
