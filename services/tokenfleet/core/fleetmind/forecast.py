"""Forecast: what would happen to the request at that site, from its summary and what was sent there since?"""

from msgspec import Struct

from tokenfleet.core.accounts import Coefficients
from tokenfleet.core.fleetmind.demand import Demand
from tokenfleet.core.fleetmind.sends import Replay, Sends, site_wait_s
from tokenfleet.core.known import known
from tokenfleet.core.predict.rate import prefill_tokens_per_s
from tokenfleet.core.predict.work import decode_iteration_s, prefill_work_s, prior_coefficients, uncached_tokens
from tokenfleet.core.records import PoolSummary
from tokenfleet.core.view import PeerView

SPEED_MAX = 10.0  # how much faster or slower than the policy's prior a site's told rate may make it


class Forecast(Struct, frozen=True, kw_only=True):
    """Seconds of the request at one site, and how full that site would be.

    `network_s` is one round trip and the upload, `work_s` the prefill behind the cached prefix, `tpot_s` the time of an
    output token with this request added, `end_s` the predicted end with the cautious output estimate. `gpu_s` is what
    it adds to the instance's computing, `crowding_s` what that costs the decodes there. `utilisation` is the largest
    of the three ratios of capacity, that of `bottleneck`; `headroom_tokens_per_s` is the prefill rate that it leaves.
    """

    network_s: float
    wait_s: float
    work_s: float
    tpot_s: float
    end_s: float
    gpu_s: float
    crowding_s: float
    utilisation: float
    bottleneck: str
    headroom_tokens_per_s: float
    hit_tokens: int
    uncached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.network_s + self.wait_s + self.work_s


def forecast(demand: Demand, peer: PeerView, pool: PoolSummary, sends: Sends) -> Forecast:
    """Of one request at `pool` of `peer`'s site. Numbers of the summary that can't be are taken as unknown."""
    age_s = known(peer.age_s) or 0.0
    serving = max(1, pool.ready or pool.suspect)
    since = _replay(demand, peer, pool, sends, age_s=age_s, serving=serving)
    coefficients = _coefficients(demand, pool, serving=serving)
    decoding, context_tokens = known(pool.decoding) or 0.0, known(pool.context_tokens) or 0.0
    hit = min(peer.hit_tokens, demand.request.prompt_tokens)
    uncached = uncached_tokens(demand.request.prompt_tokens, hit)
    network_s = _network_s(demand, peer)
    wait_s = site_wait_s(since.waits_s(now_s=demand.now_s), min_share=demand.policy.fleetmind.wait_min_share)
    work_s = prefill_work_s(
        uncached,
        hit,
        decoding=decoding,
        context_tokens=context_tokens,
        coefficients=coefficients,
        budget_tokens=demand.model.budget_tokens,
    )
    tpot_s = decode_iteration_s(
        decoding=decoding + 1,
        context_tokens=context_tokens + demand.request.prompt_tokens,
        coefficients=coefficients,
    )
    uses = _uses(demand, pool, since, age_s=age_s, uncached=uncached)
    bottleneck = max(uses, key=lambda name: uses[name])
    return Forecast(
        network_s=network_s,
        wait_s=wait_s,
        work_s=work_s,
        tpot_s=tpot_s,
        end_s=network_s + wait_s + work_s + demand.output_q90 * tpot_s,
        # An output token adds one token and one read of its context to an iteration that runs anyway.
        gpu_s=work_s + demand.output_q50 * (coefficients.a_s + coefficients.d_s * demand.request.prompt_tokens),
        crowding_s=demand.policy.fleetmind.decode_crowding
        * (coefficients.a_s * decoding + coefficients.d_s * context_tokens),
        utilisation=uses[bottleneck],
        bottleneck=bottleneck,
        headroom_tokens_per_s=(known(pool.prefill.capacity) or 0.0) * max(0.0, 1.0 - uses[bottleneck]),
        hit_tokens=hit,
        uncached_tokens=uncached,
    )


def _coefficients(demand: Demand, pool: PoolSummary, *, serving: int) -> Coefficients:
    """The policy's prior for the model, scaled so that its prefill rate is the one that the site tells.

    The rate is what the site has learned; its accelerators may differ from those here.
    """
    prior = prior_coefficients(demand.model, factor=1.0)
    prior_rate = prefill_tokens_per_s(prior, budget_tokens=demand.model.budget_tokens)
    told_rate = (known(pool.prefill.capacity) or 0.0) / serving
    slower = min(max(prior_rate / told_rate, 1.0 / SPEED_MAX), SPEED_MAX) if told_rate else 1.0
    return prior_coefficients(demand.model, factor=slower)


def _network_s(demand: Demand, peer: PeerView) -> float:
    """One round trip and the upload of the prompt; nothing at home."""
    if peer.site == demand.home:
        return 0.0
    site = demand.policy.site(peer.site)
    measured_s = known(peer.rtt_s)
    rtt_s = measured_s if measured_s is not None else site.rtt_s.get(demand.home, site.rtt_default_s)
    bytes_per_s = site.bandwidth_bytes_per_s.get(demand.home, site.bandwidth_default_bytes_per_s)
    return rtt_s + demand.upload_bytes / bytes_per_s


def _replay(demand: Demand, peer: PeerView, pool: PoolSummary, sends: Sends, *, age_s: float, serving: int) -> Replay:
    """Over the waits that the summary tells; where it tells none, over the queue spread evenly.

    A summary of age 0 is home's, made from the tables for this decision: nothing was sent since.
    """
    waits_s = [wait_s for each in pool.waits_s if (wait_s := known(each)) is not None]
    if not waits_s:
        queued, rate = known(pool.prefill.queued) or 0.0, known(pool.prefill.capacity)
        waits_s = [queued / rate if rate else 0.0]
    if age_s == 0.0:
        return Replay(waits_s, stamp_s=demand.now_s, instances=serving)
    told = peer.summary
    summary = (told.cluster, told.epoch, told.n, pool.model_digest) if told is not None else ("", 0, 0, "")
    stamp_s = demand.now_s - age_s
    return sends.since(peer.site, pool.model, summary, waits_s, stamp_s=stamp_s, instances=serving)


def _uses(demand: Demand, pool: PoolSummary, since: Replay, *, age_s: float, uncached: int) -> dict[str, float]:
    """Share of each capacity in use once the request is there; a capacity that is not known limits nothing.

    Prefill is measured in seconds of work against the wait that the class may be sent into.
    """
    rate = known(pool.prefill.capacity) or 0.0
    queued = max(0.0, (known(pool.prefill.queued) or 0.0) + since.uncached_tokens - rate * age_s)
    kv_used = (known(pool.kv.used) or 0.0) + since.kv_tokens
    seats_used = (known(pool.seats.used) or 0.0) + (known(pool.seats.queued) or 0.0) + since.sends
    wanted = {
        "prefill": (queued + uncached, rate * demand.terms.backlog_max_s),
        "kv": (kv_used + demand.kv_need_tokens, known(pool.kv.capacity)),
        "seats": (seats_used + 1, known(pool.seats.capacity)),
    }
    return {name: used / capacity if capacity else 0.0 for name, (used, capacity) in wanted.items()}
