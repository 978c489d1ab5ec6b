"""The compose file, run without containers: each service's command and variables as a child on a loopback address.

A service NAME has an address 127.9.x.y of its own, which stands for its name and for 0.0.0.0; the files of
deploy/compose are changed in the same way. Kafka and PostgreSQL are the fixtures'.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import yaml

from tests.kafka_server import KafkaServer
from tokenfleet.adapters.settings import PROCESSES
from tokenfleet.client.calls import explain
from tokenfleet.client.gateway import Gateway
from tokenfleet.core.errors import NotFoundError
from tokenfleet.local.child import tied_to_this_process
from tokenfleet.wire.v1 import decision_pb2

ROOT = Path(__file__).resolve().parent.parent
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
READY_WAIT_MAX_S = 120.0  # some twenty seconds on an idle machine
ADDRESSES = {name: f"127.9.{os.getpid() % 250}.{number}" for number, name in enumerate(SERVICES, start=1)}
NAMES = ADDRESSES | {"decide-a": ADDRESSES["decide-a-0"]}  # the first replica stands for the site


class Place:
    """Where everything is in this run, instead of inside the compose network."""

    def __init__(self, folder: Path, *, kafka: str, database: str) -> None:
        self.folder = folder
        self._kafka = kafka
        self._database = database
        (folder / "files").mkdir()
        for file in (ROOT / "deploy" / "compose").iterdir():
            (folder / "files" / file.name).write_text(self.here("engines", file.read_text()))

    def here(self, service: str, text: str) -> str:
        text = text.replace("kafka:9092", self._kafka)
        text = re.sub(r'postgres://[^\s"]+', self._database, text)
        text = re.sub(r"([\w-]+)(:\d{4})\b", lambda found: NAMES.get(found[1], found[1]) + found[2], text)
        text = text.replace("0.0.0.0", ADDRESSES[service]).replace("/etc/tokenfleet", str(self.folder / "files"))
        return text.replace("/var/lib/tokenfleet", str(self.folder / "state" / service))

    def start(self, service: str) -> "subprocess.Popen[bytes]":
        described = SERVICES[service]
        entrypoint = described.get("entrypoint", ["python", "-m", "tokenfleet.cli"])
        command = [sys.executable, *entrypoint[1:], *described["command"]]
        told: Mapping[str, str] = described.get("environment", {})
        with self.log(service).open("wb") as log:
            return subprocess.Popen(
                [self.here(service, word) for word in command],
                env=os.environ | {key: self.here(service, value) for key, value in told.items()},
                stdout=log,
                stderr=log,
                preexec_fn=tied_to_this_process(None),
            )

    def log(self, service: str) -> Path:
        return self.folder / f"{service}.log"


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_the_composed_processes_decide_and_record(tmp_path: Path, kafka: KafkaServer, database: str) -> None:
    place = Place(tmp_path, kafka=kafka.bootstrap, database=database)
    for one_shot in ("topics", "migrate"):
        assert place.start(one_shot).wait(60.0) == 0, place.log(one_shot).read_text()
    ours = [name for name, described in SERVICES.items() if described.get("command", [""])[0] in PROCESSES]
    async with running(place, ["engines", *ours]), asyncio.timeout(READY_WAIT_MAX_S):
        for name in ours:
            await until_healthy(place, name)
        async with Gateway([f"{ADDRESSES['decide-a-0']}:7500"]) as gateway:
            request = decision_pb2.Request(
                id=f"composed-{os.getpid()}", model="small-chat", tenant="acme", prompt_tokens=10
            )
            admitted = await until_admitted(gateway, request)
        assert admitted.address.startswith(f"{ADDRESSES['engines']}:")
        while not await recorded(request.id):
            await asyncio.sleep(0.2)


@asynccontextmanager
async def running(place: Place, services: list[str]) -> AsyncGenerator[None]:
    children = {name: place.start(name) for name in services}
    try:
        yield
        assert {name: place.log(name).read_text() for name, child in children.items() if child.poll() is not None} == {}
    finally:
        for child in children.values():
            child.terminate()
        for child in children.values():
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(child.wait, 20.0)
            child.kill()
            child.wait()


async def until_healthy(place: Place, service: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            assert "Traceback" not in place.log(service).read_text(), place.log(service).read_text()
            with suppress(aiohttp.ClientError):
                async with session.get(f"http://{ADDRESSES[service]}:7410/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)


async def until_admitted(gateway: Gateway, request: decision_pb2.Request) -> decision_pb2.Decision:
    """The first admission; each try is an attempt of its own, for an attempt keeps its answer."""
    while True:
        with suppress(grpc.aio.AioRpcError):
            answer = await gateway.schedule(request)
            if answer.admitted:
                return answer.decision
        request.attempt += 5
        await asyncio.sleep(0.5)


async def recorded(request: str) -> bool:
    """Whether the audit service has the admission."""
    with suppress(NotFoundError):
        found = await explain(f"{ADDRESSES['audit']}:7600", request)
        return any(decision.verdict == decision_pb2.VERDICT_ADMIT for decision in found.decisions)
    return False
