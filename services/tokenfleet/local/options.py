"""Options: what the user of `tokenfleet up` asked for."""

from pathlib import Path

from msgspec import Struct

PORT_BASE = 7400


class UpOptions(Struct, frozen=True, kw_only=True):
    """`for_s` None runs until a signal. `kafka` (HOST:PORT) and `postgres` (DSN) replace the embedded ones when set.

    `engines` is a discovery file of real engines, which replace the simulated ones. `copies` of the trace override the
    fleet's own. `policy` is a name in policy_rule.NAMES, empty for what the fleet has anyway; `design` is one in
    designs.DESIGNS and brings its own cluster and load, empty for the whole fleet.
    """

    for_s: float | None = None
    json: bool = False
    state_dir: Path = Path(".tokenfleet")
    port_base: int = PORT_BASE
    kafka: str = ""
    postgres: str = ""
    engines: Path | None = None
    no_load: bool = False
    copies: int | None = None
    seed: int = 1
    policy: str = ""
    design: str = ""
