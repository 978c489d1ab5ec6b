"""Parts: broker, database and processes of a fleet, started in the order in which they need one another.

Broker and PostgreSQL start side by side, then topics and migrations. The imports of all processes are 15 s of processor
time, so those that a first decision needs come first: one decide replica a site, engines, agent, capacity. The other
replicas, goodput and audit follow one by one when requests are answered; what was decided waits for them in Kafka.
"""

import asyncio
from collections.abc import Awaitable, Callable

from tokenfleet.adapters.kafka_admin import Applied, apply
from tokenfleet.adapters.policy_file import load_policy
from tokenfleet.adapters.postgres import migrate
from tokenfleet.core.errors import PolicyError, SetupError
from tokenfleet.local import broker, postgres, programs
from tokenfleet.local.child import Exit, Program
from tokenfleet.local.children import Supervisor
from tokenfleet.local.configs import Configs
from tokenfleet.local.fleet import Fleet
from tokenfleet.local.http_get import NoAnswerError, get
from tokenfleet.local.layout import HOST, Layout
from tokenfleet.local.policy_change import PolicyChange, put_into_force

BROKER, POSTGRES, LOAD = "broker", "postgres", "load"
SERVING_WAIT_MAX_S = 120.0  # a machine under heavy load
ONE_BY_ONE_MAX_S = 5.0
ASK_AGAIN_S = 0.2
APPLY_AGAIN_MAX = 5  # clients of a restarted broker make up topics while they are being corrected


class Parts:
    """What runs. `start` returns when all processes are started, `until_serving` when requests can be answered."""

    def __init__(
        self,
        fleet: Fleet,
        layout: Layout,
        configs: Configs,
        supervisor: Supervisor,
        *,
        change: PolicyChange | None,
        say: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._layout = layout
        self._configs = configs
        self._supervisor = supervisor
        self._change = change
        self._say = say
        self._broker_ended = asyncio.Event()

    async def start(self, *, loaded: bool) -> None:
        """What a first decision needs, with the load, which waits until it is served.

        Raises SetupError when a part does not come up, PolicyError when the change can't be put into force.
        """
        first = programs.needed_first(self._layout, self._configs)
        if loaded:
            first.append(programs.load(self._configs))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._start_database())
            tasks.create_task(self._start_broker_and(first))

    async def start_rest(self) -> None:
        """One after the other: six imports at once would starve the replicas that answer already."""
        for program in programs.needed_later(self._layout, self._configs):
            await self._supervisor.start(program)
            try:
                async with asyncio.timeout(ONE_BY_ONE_MAX_S):
                    while not await healthy(self._layout.status_ports[program.name]):
                        await asyncio.sleep(ASK_AGAIN_S)
            except TimeoutError:
                continue

    async def until_serving(self) -> None:
        """Some decision replica of each ingress site is healthy. Raises SetupError when that takes too long."""
        try:
            async with asyncio.timeout(SERVING_WAIT_MAX_S):
                await asyncio.gather(*(self._site_serves(site) for site in self._fleet.ingress))
        except TimeoutError:
            raise SetupError(
                f"no decision service of every site is ready after {SERVING_WAIT_MAX_S:.0f} s; "
                "the logs of decide-* in the state folder say why"
            ) from None

    def ended(self, end: Exit) -> None:
        """A child ended unasked."""
        if end.name == BROKER:
            self._broker_ended.set()

    async def keep_topics(self) -> None:
        """The embedded broker forgets its topics when it dies: apply them again each time. Runs until cancelled."""
        port = self._layout.kafka_port
        while port is not None:
            await self._broker_ended.wait()
            self._broker_ended.clear()
            try:
                await broker.until_ready(port=port)
                await self._apply_topics()
                await self._put_change_into_force()
                self._say("the broker was restarted; its topics are there again, what they held is gone")
            except (TimeoutError, SetupError, PolicyError) as error:
                self._say(f"the broker was restarted, its topics could not be applied: {error}")
                self._broker_ended.set()
                await asyncio.sleep(1.0)

    async def _start_database(self) -> None:
        if (port := self._layout.postgres_port) is None:
            await postgres.reachable(self._layout.postgres)
        else:
            data_dir = self._configs.folder.parent / "postgres"
            await postgres.initialise(data_dir)
            await self._supervisor.start(
                postgres.program(data_dir, port=port, name=POSTGRES, stop_wave=programs.STORES_WAVE)
            )
            await _within(postgres.until_ready(self._layout.postgres), "PostgreSQL")
        await migrate(self._layout.postgres)

    async def _start_broker_and(self, next_ones: list[Program]) -> None:
        if (port := self._layout.kafka_port) is not None:
            await self._supervisor.start(broker.program(port=port, name=BROKER, stop_wave=programs.STORES_WAVE))
            await _within(broker.until_ready(port=port), "the broker")
        await self._apply_topics()
        await self._put_change_into_force()
        for program in next_ones:
            await self._supervisor.start(program)

    async def _apply_topics(self) -> None:
        """Raises SetupError with the remedy for a topic of another shape on a real broker."""
        embedded = self._layout.kafka_port is not None
        sites = sorted(
            self._fleet.sites.keys() | load_policy()[0].sites.keys()
        )  # a replica reads the summaries of them all
        wrong: list[Applied] = []
        for _ in range(APPLY_AGAIN_MAX if embedded else 1):
            applied = await apply(self._layout.kafka, sites, recreate_wrong=embedded)
            if not (wrong := [each for each in applied if each.state == "wrong"]):
                return
        raise SetupError(f"topic {wrong[0].name} {wrong[0].problem}: {wrong[0].remedy}")

    async def _put_change_into_force(self) -> None:
        """What the policy topic says is gone with an embedded broker, so it is said to each of its lives."""
        if self._change is not None:
            await put_into_force(self._layout.kafka, self._change)

    async def _site_serves(self, site: str) -> None:
        places = [place for place in self._layout.decides if place.site == site]
        while not any([await healthy(place.status_port) for place in places]):
            await asyncio.sleep(ASK_AGAIN_S)


async def healthy(port: int) -> bool:
    """Whether the process behind this status port says that all its parts are ready."""
    try:
        status, _ = await get(HOST, port, "/health")
    except NoAnswerError:
        return False
    return status == 200


async def _within(ready: Awaitable[None], what: str) -> None:
    try:
        await ready
    except TimeoutError:
        raise SetupError(f"{what} does not answer; its log in the state folder says why") from None
