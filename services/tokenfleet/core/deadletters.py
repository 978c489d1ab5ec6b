"""Dead letters: records that could not be used. The conventions are core.records'."""

from msgspec import Struct

from tokenfleet.core.records import Count, Name


class DeadLetter(Struct, frozen=True, kw_only=True, tag="deadletter"):
    """A record that could not be used: where it is and why. Never the payload."""

    topic: Name
    partition: Count
    offset: Count
    reason: str
    sha256: str
    size_bytes: Count
    by: str
    at_wall_s: float
