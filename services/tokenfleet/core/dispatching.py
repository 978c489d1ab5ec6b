"""Dispatching: FleetMind asked at one site, with all that the site knows of the others and of itself."""

from msgspec.structs import replace

from tokenfleet.core.asked import Asked
from tokenfleet.core.fleetmind.dispatch import Dispatch, dispatch
from tokenfleet.core.records import SiteSummary
from tokenfleet.core.site import Site, pool_name
from tokenfleet.core.summary import pool_summaries
from tokenfleet.core.view import PeerView


def dispatched(site: Site, asked: Asked, *, without: tuple[str, ...]) -> Dispatch:
    """FleetMind's answer, the sites in `without` left out beside those that were tried before."""
    request = replace(asked.request, sites_tried=(*asked.request.sites_tried, *without))
    return dispatch(
        request,
        asked.classified.request_class,
        _peers(site, asked),
        asked.policy,
        site.sends,
        home=site.name,
        output_q50=asked.output_q50,
        output_q90=asked.output_q90,
        now_s=asked.now_s,
        now_wall_s=asked.ids.now_wall_s,
        rng=asked.rng,
    )


def _peers(site: Site, asked: Asked) -> list[PeerView]:
    """All sites of the policy as seen from here; home from the tables at hand."""
    request = asked.request
    others = [
        site.peers.view(
            name,
            pool=pool_name(request.model, name),
            block_keys=request.block_keys,
            block_tokens=request.block_tokens,
            now_s=asked.now_s,
        )
        for name in asked.policy.sites
        if name != site.name
    ]
    price_per_hour = asked.policy.site(site.name).price_per_instance_hour
    own = SiteSummary(
        site=site.name,
        cluster="",
        epoch=0,
        n=0,
        period_s=0.0,
        age_s=asked.pool.age_s,
        gateways=(),
        pools=tuple(pool_summaries(asked.pool, price_per_hour=price_per_hour)) if len(asked.pool) else (),
    )
    hit = asked.pool.columns.most_hit_tokens
    return [PeerView(site=site.name, summary=own, age_s=0.0, hit_tokens=hit), *others]
