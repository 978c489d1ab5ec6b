"""Sessions: which instance served each conversation last."""

from collections import OrderedDict

SESSIONS_MAX = 100_000  # conversations remembered, about 30 MB; the one unheard for longest goes first


class Sessions:
    """The last instance of each tenant's conversations."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], str] = OrderedDict()

    def served(self, tenant: str, session: str, *, instance: str) -> None:
        """The instance was given a request of the conversation; without an id it is none."""
        if not session:
            return
        self._last[tenant, session] = instance
        self._last.move_to_end((tenant, session))
        if len(self._last) > SESSIONS_MAX:
            self._last.popitem(last=False)

    def last(self, tenant: str, session: str) -> str:
        """The instance that served it last, empty if unknown."""
        return self._last.get((tenant, session), "")
