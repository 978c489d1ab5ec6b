"""Pool: what a decision sees of all instances of one model at one site, in one snapshot.

`core.site` assembles it from the tables; TokenPilot, SLOMax, FleetMind and the site summary read it.
"""

from functools import cached_property

from msgspec import Struct

from tokenfleet.core.accounts import Coefficients, PoolCalibration
from tokenfleet.core.columns import Columns
from tokenfleet.core.view import InstanceView


class PoolView(Struct, frozen=True, kw_only=True, dict=True):
    """All instances of one model at one site, in the order of their names, and how the pool computes.

    `columns` are those instances as arrays, `instances` the same one by one, made when first asked for.
    `calibration` holds the learned (or prior) engine coefficients; `budget_tokens` are the tokens of an iteration.
    `age_s` is the age of the youngest telemetry of the site, None before any. `turn` counts this replica's own
    placements in the pool.
    """

    site: str
    pool: str
    model: str
    columns: Columns
    calibration: PoolCalibration
    budget_tokens: int
    seats_max: int
    age_s: float | None
    turn: int = 0

    @property
    def coefficients(self) -> Coefficients:
        return self.calibration.coefficients

    @cached_property
    def instances(self) -> tuple[InstanceView, ...]:
        return self.columns.views()

    def __len__(self) -> int:
        return len(self.columns)
