"""Capacity: keeps each site's capacity table current for everybody who decides.

A faust app that hosts a plain loop: telemetry is folded into shards and published; the worker that owns a site's
shard 0 also publishes the site's summary and sketches. A process serves one or several sites; workers share the shards.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tokenfleet.adapters.faust_app import run_processor
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_reading import BEGINNING
from tokenfleet.adapters.policy_file import revised
from tokenfleet.adapters.running import watched
from tokenfleet.adapters.settings import CapacitySettings
from tokenfleet.adapters.shards import SiteShards
from tokenfleet.adapters.site_face import publish_summaries
from tokenfleet.adapters.status import Status
from tokenfleet.adapters.topics import POLICY
from tokenfleet.core.errors import SetupError
from tokenfleet.core.policy import Policy
from tokenfleet.core.revisions import PolicyRecord


class Capacity:
    """One worker for its sites' shards. `run` works until cancelled."""

    def __init__(self, settings: CapacitySettings, policy: Policy) -> None:
        """Raises SetupError when no site, or one that the policy lacks, is to be served."""
        known = ", ".join(sorted(policy.sites))
        if not settings.sites:
            raise SetupError(f"TOKENFLEET_SITES: name the sites to serve, of {known}")
        if unknown := [site for site in settings.sites if site not in policy.sites]:
            raise SetupError(f"TOKENFLEET_SITES: no site {unknown[0]!r} in the policy; there is: {known}")
        self._settings = settings
        self._policy = policy

    def revise(self, heard: PolicyRecord) -> None:
        """Go by this policy from now on, if it is newer than ours and can be used."""
        self._policy = revised(self._policy, heard)

    async def run(self) -> None:
        settings = self._settings
        async with (
            Status("capacity", host=settings.status_host, port=settings.status_port) as status,
            Kafka(settings.kafka, client_id="capacity") as kafka,
            asyncio.TaskGroup() as tasks,
        ):
            # The app's group hands a revision to one worker only, and none from before: each follows it itself too.
            policies = kafka.follower(POLICY, "", lambda record: self.revise(record.message), start=BEGINNING)
            watched(tasks, policies.run(), name=f"follow {policies.name}")
            for site in settings.sites:
                face = _Face(site, tasks, partial(publish_summaries, kafka, site, lambda: self._policy, settings))
                shards = SiteShards(kafka, site, period_s=settings.snapshot_period_s, on_owned=face.follow)
                status.parts[site] = shards.state
                watched(tasks, shards.run(), name=f"telemetry of {site}")
                watched(tasks, shards.publish(), name=f"capacity of {site}")


class _Face:
    """Shows a site to the others as long as its shard 0 is ours."""

    def __init__(self, site: str, tasks: asyncio.TaskGroup, show: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._site = site
        self._tasks = tasks
        self._show = show
        self._showing: asyncio.Task[None] | None = None

    async def follow(self, owned: frozenset[int]) -> None:
        """Begin or end as shard 0 comes and goes."""
        if 0 in owned and self._showing is None:
            self._showing = watched(self._tasks, self._show(), name=f"face of {self._site}")
        elif 0 not in owned and self._showing is not None:
            showing, self._showing = self._showing, None
            showing.cancel()
            await asyncio.wait({showing})


def main() -> None:
    run_processor("capacity", CapacitySettings, Capacity)


if __name__ == "__main__":
    main()
