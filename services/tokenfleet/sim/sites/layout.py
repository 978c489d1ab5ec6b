"""Layout: where the sites of a run are, what they have, and the policy that all of them follow."""

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.policy import Policy, Residency, SitePolicy, Tenant
from tokenfleet.sim.pilot import policy_of
from tokenfleet.sim.profiles import Profile

HERE = "here"  # the jurisdiction of the origins and of the existing site
FREE, PINNED = "free", "pinned"  # tenants: whose requests may go everywhere, and whose must stay in their jurisdiction
BYTES_PER_PROMPT_TOKEN = 4.0


class Place(Struct, frozen=True, kw_only=True):
    """A site with engines, as seen from every origin: the round trip in seconds and the way up in bytes a second."""

    name: str
    instances: int
    rtt_s: float
    bytes_per_s: float
    jurisdiction: str

    def upload_s(self, prompt_tokens: int) -> float:
        """What the prompt takes on its way up."""
        return prompt_tokens * BYTES_PER_PROMPT_TOKEN / self.bytes_per_s


# The reference layout: an origin without engines, a large site near it, and two that extend it.
PLACES = (
    Place(name="b", instances=4, rtt_s=0.005, bytes_per_s=10e9 / 8, jurisdiction=HERE),
    Place(name="c", instances=2, rtt_s=0.020, bytes_per_s=1e9 / 8, jurisdiction="there"),
    Place(name="d", instances=2, rtt_s=0.060, bytes_per_s=0.2e9 / 8, jurisdiction="there"),
)


def origin_names(count: int) -> tuple[str, ...]:
    """The names of so many origins: a, then a2 and so on."""
    return ("a", *(f"a{number}" for number in range(2, count + 1)))


def sites_policy(profile: Profile, origins: tuple[str, ...], places: tuple[Place, ...]) -> Policy:
    """The policy of a fleet of one pool, over several sites: rights and ways as the layout has them."""
    base = policy_of(profile)
    here = Residency(processing=(HERE,), cache=(HERE,), logs=(HERE,))
    sites = {name: SitePolicy(jurisdiction=HERE) for name in origins}
    for place in places:
        sites[place.name] = SitePolicy(
            jurisdiction=place.jurisdiction,
            rtt_s=dict.fromkeys(origins, place.rtt_s),
            bandwidth_bytes_per_s=dict.fromkeys(origins, place.bytes_per_s),
        )
    return replace(
        base,
        sites=sites,
        tenants={FREE: Tenant(), PINNED: Tenant(residency=PINNED)},
        residency={PINNED: here},
        products=replace(base.products, slomax=False),
    )
