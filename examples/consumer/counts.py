"""Counts: what has been decided, how requests ended, and goodput from its partial sums."""

from collections import Counter
from typing import Any


class Counts:
    """Everything heard so far."""

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.refused = 0
        self._goodput: dict[tuple[Any, ...], dict[str, Any]] = {}

    def take(self, channel: str, record: dict[str, Any]) -> None:
        if channel == "decisions":
            self.verdicts.update(decision["verdict"] for decision in record["decisions"])
        elif channel == "outcomes":
            self.outcomes.update(event["kind"] for event in record["events"])
        elif channel == "goodput":
            self._take_goodput(record)

    def _take_goodput(self, partial: dict[str, Any]) -> None:
        """A row replaces its older version; rows of different partitions and clusters add up."""
        source = (partial.get("cluster", ""), partial["site"], partial["partition"])
        for row in partial["rows"]:
            key = (*source, row["start_s"], row["width_s"], row["request_class"], row["tenant"], row["pool"])
            if row["version"] >= self._goodput.get(key, row)["version"]:
                self._goodput[key] = row

    def goodput(self, field: str) -> int:
        """The sum of a field whose default is 0. Windows of each width cover all requests: the narrowest are added."""
        width_s = min((row["width_s"] for row in self._goodput.values()), default=0.0)
        return sum(row.get(field, 0) for row in self._goodput.values() if row["width_s"] == width_s)

    def line(self) -> str:
        """All counts on one line."""
        parts = [
            f"decisions {self.verdicts.total()}{_each(self.verdicts)}",
            f"outcomes {self.outcomes.total()}{_each(self.outcomes)}",
            f"goodput {self.goodput('goodput_tokens')} tokens of {self.goodput('met')} requests"
            f" ({self.goodput('missed')} missed, {self.goodput('rejected')} rejected)",
        ]
        return "; ".join(parts) + f"; refused records {self.refused}"


def _each(counter: Counter[str]) -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in sorted(counter.items()))})" if counter else ""
