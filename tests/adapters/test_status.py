"""Status: health and metrics of a process over real HTTP."""

import asyncio
import json
import socket
import urllib.error
import urllib.request

import pytest

from tokenfleet.adapters.status import Status
from tokenfleet.core.errors import SetupError


async def get(status: Status, path: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{status.port}{path}", timeout=30.0) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


def broken() -> tuple[bool, str]:
    raise RuntimeError("no word")


async def test_a_part_that_is_not_ready_or_can_not_answer_makes_503_and_is_named() -> None:
    async with Status("agent", host="127.0.0.1", port=0) as status:
        status.parts["kafka"] = lambda: (True, "lag 0")
        assert (await get(status, "/health"))[0] == 200
        status.parts["spool"] = lambda: (False, "full")
        status.parts["table"] = broken
        code, body = await get(status, "/health")
        parts = json.loads(body)["parts"]
        assert (code, parts["kafka"]["ready"], parts["spool"]["state"]) == (503, True, "full")
        assert parts["table"] == {"ready": False, "state": "RuntimeError: no word"}
        assert (await get(status, "/nonsense"))[0] == 404
        assert "tokenfleet_event_loop_lag_seconds" in (await get(status, "/metrics"))[1]


async def test_a_taken_port_is_one_line_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1:{port} .* set TOKENFLEET_STATUS_PORT"):
            async with Status("agent", host="127.0.0.1", port=port):
                raise AssertionError("the port is taken")
