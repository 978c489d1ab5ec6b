"""The /metrics page of a simulated engine: names, types and labels of vLLM 0.32.0."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from tokenfleet.sim.engine.events import FinishReason, Load
from tokenfleet.sim.profiles import Profile

CONTENT_TYPE = "text/plain; version=0.0.4"

# bucket bounds of vLLM 0.32.0, in seconds or tokens
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

HISTOGRAMS = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _TTFT_S),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _ITL_S),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _ITL_S),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _REQUEST_S),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _REQUEST_S),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _REQUEST_S),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _REQUEST_S),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _REQUEST_S),
    "request_prompt_tokens": ("Number of prefill tokens processed.", _TOKENS),
    "request_generation_tokens": ("Number of generation tokens processed.", _TOKENS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _STEP_TOKENS),
}
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class Histogram:
    """Observations counted by bucket; cumulative only on the page."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class EngineMetrics:
    """What one life of an engine counted; a restart begins a new one."""

    def __init__(self, *, model: str, profile: Profile, started_wall_s: float) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.rejected = dict.fromkeys(REJECTION_REASONS, 0)
        self._labels = f'engine="0",model_name="{_escaped(model)}"'
        self._model_label = f'model_name="{_escaped(model)}"'
        self._profile = profile
        self._started_wall_s = started_wall_s

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add to a histogram of HISTOGRAMS."""
        self.histograms[name].observe(value, times)

    def count_finished(self, reason: FinishReason) -> None:
        self.finished[reason.value] += 1

    def page(self, load: Load) -> str:
        """The whole page in the text format."""
        return "\n".join((*self._process(), *self._gauges(load), *self._counters(load), *self._histogram_lines(), ""))

    def _process(self) -> Iterator[str]:
        yield from _head(
            "process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."
        )
        yield f"process_start_time_seconds {self._started_wall_s!r}"

    def _gauges(self, load: Load) -> Iterator[str]:
        blocks, size = load.kv_total_blocks, self._profile.block_size
        yield from self._family(
            "num_requests_running", "Number of requests in model execution batches.", [("", load.running)]
        )
        yield from self._family(
            "num_requests_waiting", "Number of requests waiting to be processed.", [("", load.waiting)]
        )
        reasons = [('reason="capacity"', load.waiting), ('reason="deferred"', 0)]
        yield from self._family("num_requests_waiting_by_reason", "Number of waiting requests by reason.", reasons)
        states = [
            (f'sleep_state="{state}"', state == "awake") for state in ("awake", "weights_offloaded", "discard_all")
        ]
        yield from self._family("engine_sleep_state", "Engine sleep state; awake = 1 means engine is awake.", states)
        usage = load.kv_used_blocks / blocks
        yield from self._family("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", [("", usage)])
        yield from _head("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
        yield (
            f'vllm:cache_config_info{{block_size="{size}",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
            f'hash_block_size="None",kv_cache_size_tokens="{blocks * size}",num_cpu_blocks="None",'
            f'num_gpu_blocks="{blocks}",prefix_caching_hash_algo="xxhash"}} 1.0'
        )

    def _counters(self, load: Load) -> Iterator[str]:
        computed = load.prompt_tokens - load.cached_tokens
        sources = [
            ('source="local_compute"', computed),
            ('source="local_cache_hit"', load.cached_tokens),
            ('source="external_kv_transfer"', 0),
        ]
        for name, text, series in (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                load.queried_tokens,
            ),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", load.hit_tokens),
            ("external_prefix_cache_queries", "External prefix cache queries, in tokens.", 0),
            ("external_prefix_cache_hits", "External prefix cache hits, in tokens.", 0),
            ("num_preemptions", "Cumulative number of preemption from the engine.", load.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", load.prompt_tokens),
            ("prompt_tokens_by_source", "Number of prompt tokens by source.", sources),
            ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", load.cached_tokens),
            ("generation_tokens", "Number of generation tokens processed.", load.generation_tokens),
            (
                "request_success",
                "Count of successfully processed requests.",
                [(f'finished_reason="{reason}"', count) for reason, count in self.finished.items()],
            ),
        ):
            yield from self._counter(name, text, [("", series)] if isinstance(series, int) else series, self._labels)
        rejections = [(f'reason="{reason}"', count) for reason, count in self.rejected.items()]
        text = "Number of admission attempts rejected by a queue limit, by reason."
        yield from self._counter("admission_rejections", text, rejections, self._model_label)

    def _histogram_lines(self) -> Iterator[str]:
        for name, histogram in self.histograms.items():
            text, below = HISTOGRAMS[name][0], 0
            yield from _head(f"vllm:{name}", "histogram", text)
            for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
                below += count
                yield f'vllm:{name}_bucket{{{self._labels},le="{bound}"}} {float(below)}'
            yield f"vllm:{name}_count{{{self._labels}}} {float(below)}"
            yield f"vllm:{name}_sum{{{self._labels}}} {histogram.sum!r}"
            yield from _head(f"vllm:{name}_created", "gauge", text)
            yield f"vllm:{name}_created{{{self._labels}}} {self._started_wall_s!r}"

    def _family(self, name: str, text: str, series: Iterable[tuple[str, float]]) -> Iterator[str]:
        yield from _head(f"vllm:{name}", "gauge", text)
        for extra, value in series:
            yield f"vllm:{name}{{{_joined(self._labels, extra)}}} {float(value)}"

    def _counter(self, name: str, text: str, series: Iterable[tuple[str, float]], labels: str) -> Iterator[str]:
        series = list(series)
        yield from _head(f"vllm:{name}_total", "counter", text)
        for extra, value in series:
            yield f"vllm:{name}_total{{{_joined(labels, extra)}}} {float(value)}"
        yield from _head(f"vllm:{name}_created", "gauge", text)
        for extra, _ in series:
            yield f"vllm:{name}_created{{{_joined(labels, extra)}}} {self._started_wall_s!r}"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _joined(labels: str, extra: str) -> str:
    return f"{labels},{extra}" if extra else labels


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
