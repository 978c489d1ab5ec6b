"""Writer: what an owner writes in its epoch, kept until it is read back in the log."""

from collections.abc import Hashable

from msgspec.structs import replace

from tokenfleet.core.records import Order
from tokenfleet.core.shard.records import Answer, Lease
from tokenfleet.core.shard.terms import WRITE_AGAIN_S


class Writer:
    """`epoch` is None while the owner may write nothing; its `n` is the number of the last record."""

    def __init__(self) -> None:
        self.epoch: Order | None = None
        self._outbox: list[Answer] = []
        self._unread: dict[Hashable, tuple[Answer, float]] = {}  # and when it was written

    def begin(self, cluster: str, claim: int, now_s: float) -> None:
        """A claim of ours was read. A copy of it makes void what was written under the one before: write it again."""
        self.epoch = Order(cluster=cluster, claim=claim, n=0 if self.epoch is None else self.epoch.n)
        self._outbox.clear()
        for answer, _ in list(self._unread.values()):
            self.write(answer, now_s)

    def end(self) -> list[Answer]:
        """Another's claim was read: what was not read back lies behind it, if anywhere, and is void."""
        void = [answer for answer, _ in self._unread.values()]
        self.epoch = None
        self._outbox.clear()
        self._unread.clear()
        return void

    def next(self) -> Order:
        """The order of one more record; the owner must be active."""
        assert self.epoch is not None
        self.epoch = replace(self.epoch, n=self.epoch.n + 1)
        return self.epoch

    def post(self, answer: Answer, now_s: float) -> None:
        """Write a record that has its order."""
        self._outbox.append(answer)
        self._unread[_key(answer)] = answer, now_s

    def write(self, answer: Answer, now_s: float) -> None:
        """Write it under the next order."""
        self.post(replace(answer, order=self.next()), now_s)

    def read_back(self, answer: Answer) -> None:
        """It, or a copy of it, stands in the log."""
        self._unread.pop(_key(answer), None)

    def take(self, now_s: float) -> tuple[Answer, ...]:
        """What to append now, with what was lost on the way."""
        for answer, written_s in list(self._unread.values()):
            if now_s - written_s > WRITE_AGAIN_S:
                self.write(answer, now_s)
        outbox, self._outbox = self._outbox, []
        return tuple(outbox)


def _key(answer: Answer) -> Hashable:
    """What one record and its later copies share."""
    if isinstance(answer, Lease):
        return type(answer), answer.holder, answer.n
    return type(answer), answer.ticket
