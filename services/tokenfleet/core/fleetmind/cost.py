"""Cost: what would it cost, in money, to serve the request at that site?

In money so that seconds, GPU time and traffic compare and can be tuned. The price of moving is not in it: that is the
gain which `dispatch` demands.
"""

from msgspec import Struct

from tokenfleet.core.fleetmind.demand import Demand
from tokenfleet.core.fleetmind.forecast import Forecast
from tokenfleet.core.known import known
from tokenfleet.core.records import PoolSummary

GIB_BYTES = 2**30
HOUR_S = 3600.0


class SiteCost(Struct, frozen=True, kw_only=True):
    """The terms of a site's cost, in money; `tpot_excess_s` is what output tokens take beyond the agreed pace."""

    latency: float
    gpu: float
    egress: float
    tpot_excess_s: float

    @property
    def total(self) -> float:
        return self.latency + self.gpu + self.egress


def cost(demand: Demand, site: str, pool: PoolSummary, seen: Forecast) -> SiteCost:
    """J = v·(network + wait + f·work + crowding + E[out]·max(0, TPOT − agreed)) + GPU seconds · price + egress.

    v is the class's money per second, f weighs work above waiting, for it also delays those behind.
    GPU seconds are what the request adds; those of ready but idle replicas are spent wherever it goes.
    """
    agreed_s = demand.terms.tpot_s
    excess_s = max(0.0, seen.tpot_s - agreed_s) * demand.output_q50 if agreed_s is not None else 0.0
    seconds = (
        seen.network_s + seen.wait_s + demand.policy.fleetmind.work_factor * seen.work_s + seen.crowding_s + excess_s
    )
    told_price = known(pool.price_per_hour)
    price = told_price if told_price is not None else demand.policy.site(site).price_per_instance_hour
    return SiteCost(
        latency=demand.terms.value_per_s * seconds,
        gpu=seen.gpu_s * price / HOUR_S,
        egress=_egress(demand, site),
        tpot_excess_s=excess_s,
    )


def _egress(demand: Demand, site: str) -> float:
    """What home charges for the prompt that leaves and the site for the answer that comes back."""
    if site == demand.home:
        return 0.0
    sites, answer_bytes = demand.policy.sites, demand.output_q50 * demand.policy.fleetmind.bytes_per_prompt_token
    out = sites[demand.home].egress_per_gib * demand.upload_bytes if demand.home in sites else 0.0
    return (out + sites[site].egress_per_gib * answer_bytes) / GIB_BYTES
