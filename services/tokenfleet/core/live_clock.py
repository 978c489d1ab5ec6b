"""LiveClock: how long a partition has been read at its end.

Silence means something only while one listens: an outage of Kafka, a pause of this process or catching up must
not age what was heard before it.
"""


class LiveClock:
    """Seconds of listening, standing still while the partition is not read at its end."""

    def __init__(self) -> None:
        self.live_s = 0.0
        self._since_s: float | None = None

    @property
    def live(self) -> bool:
        """Whether the last word was that the partition is read at its end."""
        return self._since_s is not None

    def advance(self, now_s: float, *, live: bool) -> None:
        """Count the time since the last call if both it and this one are at the end and no pause lies between."""
        if live and self._since_s is not None and 0 < now_s - self._since_s <= PAUSE_MIN_S:
            self.live_s += now_s - self._since_s
        self._since_s = now_s if live else None


PAUSE_MIN_S = 1.5  # a longer gap between two calls is a pause of this process: it listened to nobody
