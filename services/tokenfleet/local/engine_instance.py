"""One simulated instance over its lives: ports that stay, an engine that crashes, hangs and comes back."""

import asyncio
from collections.abc import Coroutine

import msgspec
import zmq
from aiohttp import web
from aiohttp.typedefs import Handler

from tokenfleet.local.engine_api import Fault
from tokenfleet.local.engine_config import InstanceConfig
from tokenfleet.local.engine_events import KvPublisher
from tokenfleet.local.engine_http import BODY_BYTES_MAX, EngineHttp, error
from tokenfleet.local.engine_live import LiveEngine
from tokenfleet.sim.profiles import profiles


class _Life:
    """What a crash takes away."""

    def __init__(self, engine: LiveEngine, runner: web.AppRunner) -> None:
        self.engine = engine
        self.runner = runner

    async def end(self) -> None:
        """Close the listening socket, drop the connections, forget everything."""
        for site in list(self.runner.sites):
            await site.stop()
        for connection in self.runner.server.connections if self.runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
        self.engine.close()
        await self.runner.cleanup()


class Instance:
    """Serves one instance; faults are applied here, whatever life it is in."""

    def __init__(self, config: InstanceConfig, context: zmq.Context[zmq.Socket[bytes]], *, host: str) -> None:
        self.config = config
        self._host = host
        self._context = context
        self._life: _Life | None = None
        self._refusing = False
        self._answering = asyncio.Event()
        self._answering.set()
        self._changing = asyncio.Lock()  # one life ends or begins at a time
        self._recovery: asyncio.Task[None] | None = None  # only while it may still be called off
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin a life: new engine, new counters, KV sequence from 0. Raises KeyError for an unknown profile."""
        config = self.config
        publisher = KvPublisher(self._context, topic=f"kv@{self._host}:{config.http_port}@{config.model}")
        profile = profiles()[config.profile].sized(block_size=config.block_size, kv_blocks=config.kv_blocks)
        engine = LiveEngine(model=config.model, profile=profile, publisher=publisher)
        app = web.Application(middlewares=[self._gate], client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/fault", self._fault)
        EngineHttp(engine, model=config.model, root=config.seed).add_routes(app)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        self._life = _Life(engine, runner)
        await publisher.start(self._host, port=config.kv_port, replay_port=config.kv_replay_port)
        await runner.setup()
        await web.TCPSite(runner, self._host, config.http_port).start()

    async def stop(self) -> None:
        self._call_off_recovery()
        async with self._changing:
            await self._crash()

    async def apply(self, fault: Fault) -> None:
        """End the fault that is, begin this one, and plan its end."""
        self._call_off_recovery()
        async with self._changing:
            await self._begin(fault)
        for_s = 0.0 if fault.kind == "restart" and fault.for_s is None else fault.for_s
        if for_s is not None and fault.kind != "none":
            self._recovery = self._spawn(self._recover_after(for_s))

    async def _begin(self, fault: Fault) -> None:
        self._heal()
        match fault.kind:
            case "crash" | "restart":
                await self._crash()
                if fault.block_size is not None:
                    self.config = msgspec.structs.replace(self.config, block_size=fault.block_size)
            case "hang" if self._life is not None:
                self._answering.clear()
                self._life.engine.freeze()
            case "slow" if self._life is not None:
                self._life.engine.slow_down(fault.factor)
            case "refuse":
                self._refusing = True
            case "none" if self._life is None:
                await self.start()
            case _:
                pass

    async def _recover_after(self, for_s: float) -> None:
        await asyncio.sleep(for_s)
        self._recovery = None
        async with self._changing:
            self._heal()
            if self._life is None:
                await self.start()

    def _call_off_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            self._recovery = None

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task

    def _heal(self) -> None:
        self._refusing = False
        self._answering.set()
        if self._life is not None:
            self._life.engine.thaw()
            self._life.engine.slow_down(1.0)

    async def _crash(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            await life.end()

    async def _fault(self, request: web.Request) -> web.StreamResponse:
        """POST /fault: a crash is answered before it happens."""
        try:
            fault = msgspec.json.decode(await request.read(), type=Fault)
        except msgspec.MsgspecError as wrong:
            return error(str(wrong), 400)
        response = web.Response(text="{}", content_type="application/json")
        if fault.kind not in ("crash", "restart"):
            await self.apply(fault)
            return response
        await response.prepare(request)
        await response.write_eof()
        self._spawn(self.apply(fault))
        return response

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/fault":
            await self._answering.wait()
            if self._refusing and request.path != "/metrics":
                return error("the engine refuses work", 503)
        return await handler(request)
