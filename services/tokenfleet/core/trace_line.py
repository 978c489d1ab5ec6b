"""TraceLine: one request of a trace in TokenFleet's own format; `sim export` writes it, the simulator reads it."""

import msgspec
from msgspec import Struct


class TraceLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request that ended, and what was measured of it; docs/traces.md is the format's page.

    `at_s` is the arrival since the trace's start. The prompt's blocks of `block_tokens` are named by `ids`, or by
    `keys`: u64, little-endian, packed, in base64. `ttft_s` runs from the arrival, `tpot_s` is the mean time of the
    tokens after the first; both and `cached_tokens` are of the engine `instance`.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    id: str = ""
    ids: tuple[int, ...] = ()
    keys: bytes = b""
    block_tokens: int = 512
    session: str = ""
    tenant: str = ""
    class_: str = msgspec.field(default="", name="class")
    model: str = ""
    instance: str = ""
    cached_tokens: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
