"""Sessions: which instance served each conversation last."""

from collections.abc import Callable

from tokenfleet.core.remembered import Remembered

SESSIONS_MAX = 100_000  # conversations remembered, about 30 MB; the one unheard for longest goes first


class Sessions:
    """The last instance of each tenant's conversations; `entry_of` gives the policy's entry that a tenant is under."""

    def __init__(self, entry_of: Callable[[str], str] = str) -> None:
        self._entry_of = entry_of
        self._last: Remembered[tuple[str, str], str] = Remembered(SESSIONS_MAX)

    def served(self, tenant: str, session: str, *, instance: str) -> None:
        """The instance was given a request of the conversation; without an id it is none."""
        if session:
            self._last.put(self._entry_of(tenant), (tenant, session), instance)

    def last(self, tenant: str, session: str) -> str:
        """The instance that served it last, empty if unknown."""
        return self._last.get(self._entry_of(tenant), (tenant, session)) or ""

    def __len__(self) -> int:
        return len(self._last)
