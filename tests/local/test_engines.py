"""Simulated engines over real HTTP and ZMQ on loopback."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from tokenfleet.local import engine_events
from tokenfleet.local.engine_instance import InstanceConfig
from tokenfleet.local.engine_tokens import output_text, tokenize
from tokenfleet.local.engines import Engines, EnginesConfig

WAIT_S = 10.0  # bound on anything awaited; a healthy engine needs milliseconds
BLOCK = 16

pytestmark = pytest.mark.asyncio


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Client:
    """An HTTP and ZMQ client of one engine."""

    def __init__(self, config: EnginesConfig, session: aiohttp.ClientSession, sockets: zmq.asyncio.Context) -> None:
        self.instance = config.instances[0]
        self.base = f"http://127.0.0.1:{self.instance.http_port}"
        self.control = f"http://127.0.0.1:{config.control_port}/instances/{self.instance.id}/fault"
        self.session = session
        self.sockets = sockets

    async def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        async with self.session.post(self.base + path, json=body or {}) as response:
            return response.status, await response.json()

    async def complete(self, prompt: str | list[int], out: int = 4, **more: Any) -> dict[str, Any]:
        ask = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "tokenfleet_output_tokens": out, **more}
        status, body = await self.post("/v1/completions", ask)
        assert status == 200, body
        return body

    async def fault(self, **fault: Any) -> None:
        async with self.session.post(self.control, json=fault) as response:
            assert response.status == 200, await response.text()

    async def metrics(self) -> dict[str, float]:
        """Every sample by name, those of one name added up."""
        async with self.session.get(self.base + "/metrics") as response:
            page = await response.text()
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        return samples

    async def metric_is(self, name: str, value: float) -> None:
        while (await self.metrics())[name] != value:
            await asyncio.sleep(0.01)

    async def replay(self, start: int) -> list[tuple[int, list[Any]]]:
        """Batches from the replay socket, until its end marker."""
        dealer = self.sockets.socket(zmq.DEALER)
        try:
            dealer.connect(f"tcp://127.0.0.1:{self.instance.kv_replay_port}")
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            batches: list[tuple[int, list[Any]]] = []
            while True:
                _, topic, sequence, payload = await asyncio.wait_for(dealer.recv_multipart(), WAIT_S)
                if sequence == b"\xff" * 8:
                    assert (topic, payload) == (b"", b"")
                    return batches
                batches.append((int.from_bytes(sequence, "big"), msgpack.unpackb(payload)))
        finally:
            dealer.close(linger=0)


@asynccontextmanager
async def engine(*, profile: str = "demo", kv_blocks: int | None = None) -> AsyncGenerator[Client]:
    http_port, kv_port, replay_port, control_port = free_ports(4)
    instance = InstanceConfig(
        id="a",
        http_port=http_port,
        kv_port=kv_port,
        kv_replay_port=replay_port,
        model="tiny",
        profile=profile,
        block_size=BLOCK,
        seed=1,
        kv_blocks=kv_blocks,
    )
    config = EnginesConfig(instances=[instance], control_port=control_port)
    engines, sockets = Engines(config), zmq.asyncio.Context()
    try:
        await engines.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
            yield Client(config, session, sockets)
    finally:
        await engines.stop()
        sockets.destroy(linger=0)


async def events_of(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """The JSON of a stream's server-sent events; the stream must end with [DONE]."""
    lines = [line.strip() async for line in response.content]
    data = [line.removeprefix(b"data: ") for line in lines if line]
    assert data[-1] == b"[DONE]"
    return [json.loads(each) for each in data[:-1]]


async def test_a_completion_streams_its_tokens_and_ends_with_usage() -> None:
    async with engine() as client:
        ask = {
            "prompt": list(range(100)),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 30,
            "tokenfleet_output_tokens": 50,
        }
        async with client.session.post(client.base + "/v1/completions", json=ask) as response:
            assert response.content_type == "text/event-stream"
            *chunks, usage = await events_of(response)
        assert len(chunks) > 1
        assert len(tokenize("".join(chunk["choices"][0]["text"] for chunk in chunks))) == 30
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert usage["choices"] == []
        assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (100, 30)


async def test_chat_answers_whole_and_streamed() -> None:
    async with engine() as client:
        ask: dict[str, Any] = {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "tokenfleet_output_tokens": 3,
        }
        status, whole = await client.post("/v1/chat/completions", ask)
        assert (status, whole["object"], whole["choices"][0]["finish_reason"]) == (200, "chat.completion", "stop")
        async with client.session.post(client.base + "/v1/chat/completions", json={**ask, "stream": True}) as response:
            chunks = await events_of(response)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        streamed = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert streamed == whole["choices"][0]["message"]["content"] == output_text(0, 3)


async def test_a_repeated_prompt_reports_its_cached_tokens_unless_the_salt_differs() -> None:
    async with engine() as client:
        cached = [
            (await client.complete("x" * 400, cache_salt=salt))["usage"]["prompt_tokens_details"]["cached_tokens"]
            for salt in ("", "", "tenant")
        ]
        assert cached == [0, 80, 0]  # 100 tokens; at least 16 are computed, so 5 blocks of 16 are reused
        metrics = await client.metrics()
        assert metrics["vllm:prompt_tokens_cached_total"] == metrics["vllm:prefix_cache_hits_total"] == 80


async def test_a_caller_that_leaves_frees_its_kv_blocks() -> None:
    async with engine() as client:
        ask = {"prompt": list(range(500)), "stream": True, "max_tokens": 100_000, "ignore_eos": True}
        async with client.session.post(client.base + "/v1/completions", json=ask) as response:
            await response.content.readline()
            metrics = await client.metrics()
            assert metrics["vllm:num_requests_running"] == 1
            assert metrics["vllm:kv_cache_usage_perc"] > 0
            response.close()
        await asyncio.wait_for(client.metric_is("vllm:num_requests_running", 0), WAIT_S)
        assert (await client.metrics())["vllm:kv_cache_usage_perc"] == 0


async def test_the_metrics_page_has_vllm_names_and_adds_up() -> None:
    async with engine() as client:
        for _ in range(3):
            await client.complete("y" * 400, out=5)
        async with client.session.get(client.base + "/metrics") as response:
            families = {family.name: family for family in text_string_to_metric_families(await response.text())}
        cache = families["vllm:cache_config_info"].samples[0].labels
        assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", str(131_072 // 16))
        metrics = await client.metrics()
        assert metrics["vllm:prompt_tokens_total"] == 300
        assert metrics["vllm:generation_tokens_total"] == 15
        assert metrics["vllm:request_success_total"] == 3
        assert metrics["vllm:time_to_first_token_seconds_count"] == 3
        assert metrics["vllm:inter_token_latency_seconds_count"] == 12
        assert metrics["vllm:iteration_tokens_total_count"] == 15
        assert metrics["vllm:iteration_tokens_total_sum"] == 300 - metrics["vllm:prompt_tokens_cached_total"] + 12


async def test_kv_events_are_published_in_order_and_replayed() -> None:
    async with engine() as client:
        subscriber = client.sockets.socket(zmq.SUB)
        subscriber.connect(f"tcp://127.0.0.1:{client.instance.kv_port}")
        subscriber.subscribe(b"")
        batches: list[tuple[int, list[Any]]] = []
        prompts = 0
        while len(batches) < 2:  # a subscription takes effect a moment after it is made
            prompts += 1
            await client.complete([prompts] * 50, cache_salt="tenant")
            while await subscriber.poll(50):
                topic, sequence, payload = await subscriber.recv_multipart()
                assert topic.startswith(b"kv@127.0.0.1:")
                batches.append((int.from_bytes(sequence, "big"), msgpack.unpackb(payload)))
        subscriber.close(linger=0)
        first = batches[0][0]
        assert [sequence for sequence, _ in batches] == list(range(first, prompts))
        _, [stored], rank = batches[0][1]
        assert rank == 0
        assert stored["type"] == "BlockStored"
        assert stored["token_ids"] == [first + 1] * 48
        assert (len(stored["block_hashes"]), stored["block_size"], stored["parent_block_hash"]) == (3, BLOCK, None)
        assert stored["extra_keys"] == [["tenant"], None, None]
        replayed = await client.replay(0)
        assert [sequence for sequence, _ in replayed] == list(range(prompts))
        assert replayed[first:] == batches
        assert await client.replay(prompts) == []


async def test_the_replay_keeps_the_newest_batches_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events, "REPLAY_BYTES_MAX", 1_000)
    async with engine() as client:
        for prompt in range(1, 11):
            await client.complete([prompt] * 64)
        replayed = await client.replay(0)
    assert 1 <= len(replayed) < 10
    assert [sequence for sequence, _ in replayed] == list(range(10 - len(replayed), 10))


async def test_eviction_and_reset_are_told() -> None:
    async with engine(kv_blocks=16) as client:
        for prompt in range(6):
            await client.complete([prompt] * 64)
        events = [event for _, batch in await client.replay(0) for event in batch[1]]
        stored = {block for event in events if event["type"] == "BlockStored" for block in event["block_hashes"]}
        removed = {block for event in events if event["type"] == "BlockRemoved" for block in event["block_hashes"]}
        assert removed
        assert removed < stored
        status, body = await client.post("/reset_prefix_cache")
        assert (status, body) == (200, {"success": True})
        known = len(await client.replay(0))
        await client.complete([9] * 64)
        news = [event["type"] for _, batch in (await client.replay(known)) for event in batch[1]]
        assert news == ["AllBlocksCleared", "BlockStored"]


async def test_a_restart_is_a_new_boot_with_its_sequence_from_zero() -> None:
    async with engine() as client:
        await client.complete("z" * 400)
        await client.complete("w" * 400)
        before = await client.metrics()
        status, _ = await client.post("/fault", {"kind": "restart", "for_s": 0.1, "block_size": 32})
        assert status == 200
        await asyncio.wait_for(serves_again(client, before["process_start_time_seconds"]), WAIT_S)
        after = await client.metrics()
        assert after["process_start_time_seconds"] > before["process_start_time_seconds"]
        assert after["vllm:prompt_tokens_total"] == 0
        again = await client.complete("z" * 400)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        [(sequence, [_, [stored], _])] = await client.replay(0)
        assert (sequence, stored["block_size"]) == (0, 32)


async def serves_again(client: Client, old_boot: float) -> None:
    while True:
        try:
            if (await client.metrics())["process_start_time_seconds"] != old_boot:
                return
        except (aiohttp.ClientError, OSError):
            pass
        await asyncio.sleep(0.02)


async def test_a_crash_drops_connections_and_only_the_control_port_brings_it_back() -> None:
    async with engine() as client:
        ask = {"prompt": [1] * 64, "max_tokens": 100_000, "ignore_eos": True}
        running = asyncio.create_task(client.post("/v1/completions", ask))
        await asyncio.wait_for(client.metric_is("vllm:num_requests_running", 1), WAIT_S)
        await client.fault(kind="crash")
        with pytest.raises(aiohttp.ClientError):
            await running
        with pytest.raises(aiohttp.ClientError):
            await client.metrics()
        await client.fault(kind="none")
        assert (await client.metrics())["vllm:num_requests_running"] == 0


async def test_a_later_fault_calls_off_the_recovery_of_an_earlier_one() -> None:
    async with engine() as client:
        await client.fault(kind="refuse", for_s=0.1)
        await client.fault(kind="refuse", for_s=60)
        await asyncio.sleep(0.3)
        assert (await client.post("/v1/completions", {"prompt": "a"}))[0] == 503
        await asyncio.gather(*(client.fault(kind="restart") for _ in range(3)), client.fault(kind="none"))
        await asyncio.wait_for(serves_again(client, 0.0), WAIT_S)
        assert (await client.complete("a"))["usage"]["completion_tokens"] == 4


async def test_a_hung_engine_accepts_and_answers_only_when_it_is_well_again() -> None:
    async with engine() as client:
        await client.fault(kind="hang")
        page = asyncio.create_task(client.metrics())
        done, _ = await asyncio.wait([page], timeout=0.3)
        assert not done
        await client.fault(kind="none")
        assert "vllm:num_requests_running" in await page


async def test_slow_steps_show_in_the_inter_token_latency() -> None:
    async with engine() as client:
        await client.fault(kind="slow", factor=5.0)
        await client.complete([1] * 20, out=6)
        metrics = await client.metrics()
        step_s = metrics["vllm:inter_token_latency_seconds_sum"] / metrics["vllm:inter_token_latency_seconds_count"]
        assert step_s == pytest.approx(5 * 0.008, rel=0.1)


async def test_refusing_and_draining_engines_answer_503_and_draining_finishes_its_work() -> None:
    async with engine() as client:
        await client.fault(kind="refuse", for_s=60)
        assert (await client.post("/v1/completions", {"prompt": "a"}))[0] == 503
        assert "vllm:num_requests_running" in await client.metrics()
        await client.fault(kind="none")
        running = asyncio.create_task(client.complete([1] * 64, out=30))
        await asyncio.wait_for(client.metric_is("vllm:num_requests_running", 1), WAIT_S)
        status, body = await client.post("/drain")
        assert (status, body["running"]) == (200, 1)
        assert (await client.post("/v1/completions", {"prompt": "a"}))[0] == 503
        assert (await running)["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "a", "model": "other"}, 404),
        ({"prompt": [-1]}, 400),
        ({"prompt": "a", "max_tokens": 0}, 400),
        ({"prompt": ""}, 400),
        ({"messages": []}, 400),
        ({"prompt": [1] * 250, "max_tokens": 10}, 400),
        ({"prompt": [1] * 300}, 400),
    ],
)
async def test_requests_that_cannot_be_served_are_refused_with_a_reason(body: dict[str, Any], status: int) -> None:
    async with engine(kv_blocks=16) as client:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answered, error = await client.post(path, body)
        assert answered == status
        assert error["error"]["message"]


async def test_the_process_says_one_line_when_it_listens_and_ends_on_sigterm(tmp_path: Path) -> None:
    http_port, kv_port, replay_port = free_ports(3)
    instance = {
        "id": "a",
        "http_port": http_port,
        "kv_port": kv_port,
        "kv_replay_port": replay_port,
        "model": "tiny",
        "profile": "demo",
    }
    config = tmp_path / "engines.json"
    config.write_text(json.dumps({"instances": [instance]}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenfleet.local.engines", "--config", str(config)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 3 * WAIT_S)
        assert f"a 127.0.0.1:{http_port}".encode() in line
        process.terminate()
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
        assert await process.stdout.read() == b""
    finally:
        if process.returncode is None:
            process.kill()
