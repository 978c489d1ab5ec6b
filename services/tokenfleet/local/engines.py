"""Simulated engines: many instances in one process, each with its own HTTP and ZMQ ports, on loopback by default.

    python -m tokenfleet.local.engines --config engines.json

Each instance answers like vLLM 0.32: OpenAI completions, /metrics, KV events with replay. POST /fault on an
instance breaks it; a crashed one has no port left, so the control port takes POST /instances/ID/fault for all.
"""

import argparse
import asyncio
import signal
from pathlib import Path

import msgspec
import uvloop
import zmq
from aiohttp import web

from tokenfleet.local.engine_api import Fault
from tokenfleet.local.engine_config import EnginesConfig
from tokenfleet.local.engine_http import error
from tokenfleet.local.engine_instance import Instance


class Engines:
    """The instances of one process and their control port."""

    def __init__(self, config: EnginesConfig) -> None:
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.instances = {each.id: Instance(each, self._context, host=config.host) for each in config.instances}
        self._control: web.AppRunner | None = None

    async def start(self) -> None:
        for instance in self.instances.values():
            await instance.start()
        if self._config.control_port is not None:
            app = web.Application()
            app.router.add_post("/instances/{id}/fault", self._fault)
            self._control = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await self._control.setup()
            await web.TCPSite(self._control, self._config.host, self._config.control_port).start()

    async def stop(self) -> None:
        for instance in self.instances.values():
            await instance.stop()
        if self._control is not None:
            await self._control.cleanup()
        self._context.destroy(linger=0)

    async def _fault(self, request: web.Request) -> web.Response:
        instance = self.instances.get(request.match_info["id"])
        if instance is None:
            return error("no such instance", 404)
        try:
            fault = msgspec.json.decode(await request.read(), type=Fault)
        except msgspec.MsgspecError as wrong:
            return error(str(wrong), 400)
        await instance.apply(fault)
        return web.Response(text="{}", content_type="application/json")


async def serve(config: EnginesConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    ended = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, ended.set)
    engines = Engines(config)
    try:
        await engines.start()
        ports = ", ".join(f"{each.id} {config.host}:{each.http_port}" for each in config.instances)
        print(f"engines listening: {ports}", flush=True)
        await ended.wait()
    finally:
        await engines.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tokenfleet.local.engines", description="Simulated engines.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file of EnginesConfig")
    config = msgspec.json.decode(parser.parse_args().config.read_bytes(), type=EnginesConfig)
    uvloop.run(serve(config))


if __name__ == "__main__":
    main()
