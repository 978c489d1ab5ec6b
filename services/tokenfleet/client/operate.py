"""Operate: an operator's words to a running fleet, written to its topics."""

import getpass
from collections.abc import Mapping, Sequence

from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.topics import CONTROL
from tokenfleet.client import calls
from tokenfleet.core.errors import NotFoundError
from tokenfleet.core.records import Control


async def site_of(instance: str, gateways: Mapping[str, Sequence[str]]) -> str:
    """The site that knows `instance`. Raises NotFoundError with the instances there are."""
    known: list[str] = []
    for site, targets in gateways.items():
        seen = await calls.sites(targets)
        names = [i.instance for s in seen.sites if s.name == site for pool in s.pools for i in pool.instances]
        if instance in names:
            return site
        known += names
    raise NotFoundError(f"no instance {instance!r}; there is: {', '.join(sorted(known)) or 'none'}")


async def site_serving(model: str, gateways: Mapping[str, Sequence[str]]) -> str:
    """The first site with an instance of `model`. Raises NotFoundError with the models there are."""
    known: set[str] = set()
    for site, targets in gateways.items():
        seen = await calls.sites(targets)
        served = {pool.model for s in seen.sites if s.name == site for pool in s.pools if pool.endpoints}
        if model in served:
            return site
        known |= served
    raise NotFoundError(f"no site serves {model!r}; there is: {', '.join(sorted(known)) or 'none'}")


async def drain_instance(bootstrap: str, site: str, instance: str, *, undo: bool, reason: str) -> None:
    """Writes the operator's word on `instance` to the site's control topic."""
    word = Control(
        instance=instance,
        state="ready" if undo else "draining",
        by=getpass.getuser(),
        reason=reason,
        at_wall_s=wall_s(),
    )
    async with Kafka(bootstrap, client_id="tokenfleet-cli", wait_max_s=10.0) as kafka:
        await kafka.send(CONTROL, site, [word], key=instance)
