"""Metrics pages: a real one, the dialects of others, and values that are no numbers."""

import timeit
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.ports import free_port
from tokenfleet.adapters.engines.mapping import engine_mappings, parse_mappings
from tokenfleet.adapters.engines.scrape import PageReader, Readings, ScrapeError, fetch_page, unknown_readings
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.records import Histogram

REAL = (Path(__file__).parent.parent / "fixtures" / "vllm-0.32.0-cpu.metrics.txt").read_text()


def read(*pages: str, engine: str = "vllm") -> Readings:
    """What the last of the pages says, read one after another."""
    reader = PageReader(engine_mappings()[engine], life="test")
    return [reader.read(page) for page in pages][-1]


def test_a_real_page_of_vllm() -> None:
    assert read(REAL) == Readings(
        boot="start-1795973491.14",
        ranks=(0,),
        running=0.0,
        waiting=0.0,
        kv_used_blocks=0.0,
        kv_total_blocks=32768,
        block_size=32,
        in_flight_tokens=0.0,
        prompt_tokens_total=296.0,
        generation_tokens_total=80.0,
        cached_tokens_total=192.0,
        ttft=Histogram(sum_s=0.2619197368621826, count=4.0),
        prefill=Histogram(sum_s=0.16567115500083673, count=4.0),
        queue=Histogram(sum_s=0.00028970399989702855, count=4.0),
        iterations_total=80.0,
        preemptions_total=0.0,
    )


def test_every_reading_has_its_declared_type() -> None:
    """A record decoded and encoded again must be the same bytes: no whole number where a float is declared."""
    found = read(REAL)
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Readings)) == (
        msgspec.msgpack.encode(found)
    )


def test_ranks_add_up_and_a_lost_one_is_stale() -> None:
    config = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="%d"} 1'
    rank = 'vllm:num_requests_running{engine="%d"} %d\nvllm:kv_cache_usage_perc{engine="%d"} %f\n' + config + "\n"
    both = rank % (0, 3, 0, 0.5, 0) + rank % (1, 4, 1, 0.25, 1)
    found = read(both)
    assert (found.ranks, found.running) == ((0, 1), 7.0)
    assert (found.kv_total_blocks, found.kv_used_blocks, found.in_flight_tokens) == (200, 75.0, 1200.0)
    lost = read(both, rank % (0, 1, 0, 0.5, 0))
    assert (lost.ranks, lost.running, lost.kv_total_blocks) == ((0, 1), 5.0, 200)


def test_old_names_are_read_and_no_name_is_unknown() -> None:
    config = '\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    assert read("vllm:kv_cache_usage_perc 0.5" + config).kv_used_blocks == 50.0
    assert read("vllm:gpu_cache_usage_perc 0.5" + config).kv_used_blocks == 50.0
    assert read("vllm:something_else 0.5" + config).kv_used_blocks is None


def test_an_engine_that_tells_no_kv_use_is_counted_beside_those_with_the_old_and_the_new_name() -> None:
    config = '\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    load = "vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
    names = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:kv_use_of_next_year")
    pages = [read(f"{load}{name} 0.5{config}") for name in names]
    assert [page.kv_used_blocks for page in pages] == [50.0, 50.0, None]
    assert unknown_readings(pages) == {"running": 0, "waiting": 0, "kv_used_blocks": 1}
    assert unknown_readings([]) == {"running": 0, "waiting": 0, "kv_used_blocks": 0}


def test_absent_is_not_zero() -> None:
    assert read("") == Readings(boot="test-0")


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300", "nonsense", ""])
def test_what_is_no_number_is_unknown(value: str) -> None:
    found = read(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc {value}\n")
    assert (found.running, found.waiting, found.kv_used_blocks) == (None, 2.0, None)
    found = read(f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:num_requests_running{{engine="1"}} NaN\n')
    assert found.running is None


def test_a_share_above_one_is_no_share() -> None:
    assert read('vllm:kv_cache_usage_perc 37\nvllm:cache_config_info{num_gpu_blocks="9"} 1').kv_used_blocks is None


def test_config_labels_may_say_none() -> None:
    found = read('vllm:cache_config_info{block_size="None",num_gpu_blocks="None",engine="0"} 1.0')
    assert (found.block_size, found.kv_total_blocks, found.in_flight_tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("page", "boot"),
    [
        ("process_start_time_seconds 12.5\n", "start-12.5"),
        ("# TYPE x counter\nx_total 5\nprocess_start_time_seconds 12.5\n", "start-12.5"),
        ('a_created{b="1"} 7.5\nc_created 6.5\n', "created-6.5"),
        ("vllm:prompt_tokens_total 5\n", "test-0"),
    ],
)
def test_the_boot_is_named_by_what_the_page_has(page: str, boot: str) -> None:
    assert read(page).boot == boot


def test_a_counter_that_falls_is_another_boot() -> None:
    pages = [f'vllm:prompt_tokens_total{{engine="0"}} {value}\n' for value in (5, 9, 9, 2, 3)]
    reader = PageReader(engine_mappings()["vllm"], life="test")
    assert [reader.read(page).boot for page in pages] == ["test-0", "test-0", "test-0", "test-1", "test-1"]
    reader.restarted()
    assert reader.read(pages[-1]).boot == "test-2"


def test_a_new_boot_has_no_stale_ranks() -> None:
    first = 'process_start_time_seconds 1\nvllm:num_requests_running{engine="1"} 5\n'
    second = 'process_start_time_seconds 2\nvllm:num_requests_running{engine="0"} 1\n'
    assert read(first, second).running == 1.0


def test_sleeping_is_seen() -> None:
    assert read('vllm:engine_sleep_state{sleep_state="awake"} 0\n').state == "sleeping"
    assert read('vllm:engine_sleep_state{sleep_state="awake"} 1\n').state == "ready"


def test_open_metrics_with_exemplars_and_timestamps() -> None:
    page = (
        "# TYPE vllm:prompt_tokens counter\n"
        'vllm:prompt_tokens_total{engine="0"} 5 # {trace_id="a"} 1.0 1520879607.7\n'
        'vllm:prompt_tokens_created{engine="0"} 1520430000.1\n'
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 2 1520879607.7\n'
        "# EOF\n"
    )
    found = read(page)
    assert (found.prompt_tokens_total, found.running, found.boot) == (5.0, 2.0, "created-1520430000.1")


def test_sglang_in_both_forms_of_its_config() -> None:
    load = "sglang:num_running_reqs 3\nsglang:num_queue_reqs 4\nsglang:token_usage 0.25\n"
    gauges = read(load + "sglang:page_size 16\nsglang:num_pages 100\n", engine="sglang")
    labels = read(load + 'sglang:cache_config_info{page_size="16",num_pages="100"} 1\n', engine="sglang")
    tokens = read(load + "sglang:page_size 16\nsglang:max_total_num_tokens 1607\n", engine="sglang")
    assert gauges == labels == tokens
    assert (gauges.running, gauges.waiting, gauges.kv_total_blocks, gauges.kv_used_blocks) == (3.0, 4.0, 100, 25.0)
    assert (gauges.in_flight_tokens, gauges.in_flight_source) == (400.0, "estimated")
    told = read(load + "sglang:page_size 16\nsglang:num_pages 100\nsglang:num_used_tokens 320\n", engine="sglang")
    assert (told.in_flight_tokens, told.in_flight_source, told.kv_used_blocks) == (320.0, "engine", 20.0)


@pytest.mark.parametrize("prefix", ["trtllm_", "trtllm:"])
def test_tensorrt_llm_in_both_spellings(prefix: str) -> None:
    page = (
        f"{prefix}num_requests_running 3\n{prefix}num_requests_waiting 1\n{prefix}kv_cache_utilization 0.5\n"
        f"{prefix}kv_cache_tokens_per_block 32\n{prefix}kv_cache_max_blocks 10\n"
    )
    found = read(page, engine="trtllm")
    assert (found.running, found.waiting, found.kv_used_blocks, found.in_flight_tokens) == (3.0, 1.0, 5.0, 160.0)


def test_tensorrt_llm_behind_triton() -> None:
    page = (
        'nv_trt_llm_request_metrics{request_type="waiting",version="1"} 2\n'
        'nv_trt_llm_request_metrics{request_type="scheduled",version="1"} 3\n'
        'nv_trt_llm_request_metrics{request_type="max",version="1"} 512\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.5\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64\n'
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 20\n'
    )
    found = read(page, engine="trtllm")
    assert (found.running, found.waiting, found.kv_total_blocks, found.block_size) == (3.0, 2.0, 20, 64)


@given(st.text(max_size=300), st.integers(0, len(REAL)))
def test_no_page_breaks_the_reader(noise: str, at: int) -> None:
    read(REAL[:at] + noise + REAL[at:], noise)


def test_a_mapping_that_can_not_be_used_is_refused() -> None:
    for bad in ("[x]\nrank_label = 'r'\nrunnin = []", "[x]\nrank_label='r'\nrunning=['a{b']", "[x]\nrunning = 3", "="):
        with pytest.raises(PolicyError, match="engine mapping"):
            parse_mappings(bad)


def test_a_real_page_costs_well_under_the_whole() -> None:
    reader = PageReader(engine_mappings()["vllm"], life="test")
    best_s = min(timeit.repeat(lambda: reader.read(REAL), number=10, repeat=5)) / 10
    assert best_s < 0.01  # measured 0.6 ms; parsing every line takes 20


Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []

    async def start(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> str:
        app = web.Application()
        app.router.add_get("/metrics", answer)
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}/metrics"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_a_page_is_fetched(serve: Serve, session: aiohttp.ClientSession) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text=REAL)

    assert await fetch_page(session, await serve(page), timeout_s=5.0) == REAL


async def test_refused_and_no_answer_are_told_apart(serve: Serve, session: aiohttp.ClientSession) -> None:
    async def failing(_: web.Request) -> web.Response:
        return web.Response(status=503)

    async def breaking(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    for url, timeout_s, refused in (
        (f"http://127.0.0.1:{free_port()}/metrics", 5.0, True),
        (await serve(failing), 5.0, False),
        (await serve(breaking), 5.0, False),
        (await serve(breaking), 1e-9, False),
    ):
        with pytest.raises(ScrapeError) as caught:
            await fetch_page(session, url, timeout_s=timeout_s)
        assert caught.value.refused is refused, url
