"""Mapping: which series of an engine's metrics page means what, as data (mapping.toml)."""

from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from tokenfleet.core.errors import PolicyError


class ConfigForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An info series that says its values in labels: `block_size` and `total_blocks` name the labels."""

    series: str
    block_size: str
    total_blocks: str


class EngineMapping(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Series by need, the preferred name first; an empty list means that the engine doesn't say.

    Gauges: `running`, `waiting` (sequences), `kv_use_share` (0..1), `kv_used_tokens`, `block_size` (tokens),
    `total_blocks`, `total_tokens`, `awake` (1 unless sleeping). Counters: the three `*_tokens`, `iterations`,
    `preemptions`. Histograms in seconds: `ttft`, `prefill`, `queue`.
    """

    rank_label: str
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_use_share: tuple[str, ...] = ()
    kv_used_tokens: tuple[str, ...] = ()
    block_size: tuple[str, ...] = ()
    total_blocks: tuple[str, ...] = ()
    total_tokens: tuple[str, ...] = ()
    awake: tuple[str, ...] = ()
    prompt_tokens: tuple[str, ...] = ()
    generation_tokens: tuple[str, ...] = ()
    cached_tokens: tuple[str, ...] = ()
    iterations: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    ttft: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    queue: tuple[str, ...] = ()
    config: tuple[ConfigForm, ...] = ()

    def values(self) -> set[str]:
        """All series of gauges and counters."""
        gauges = self.running + self.waiting + self.kv_use_share + self.kv_used_tokens + self.awake
        sizes = self.block_size + self.total_blocks + self.total_tokens
        counters = self.prompt_tokens + self.generation_tokens + self.cached_tokens + self.iterations + self.preemptions
        return set(gauges + sizes + counters)

    def histograms(self) -> set[str]:
        return set(self.ttft + self.prefill + self.queue)


class Selector(Struct, frozen=True):
    """One series name and the label values it is narrowed to."""

    name: str
    labels: dict[str, str]


@cache
def engine_mappings() -> dict[str, EngineMapping]:
    """The shipped mapping by kind of engine: vllm, sglang, trtllm."""
    return parse_mappings(files("tokenfleet.adapters.engines").joinpath("mapping.toml").read_text(encoding="utf-8"))


def parse_mappings(toml: str) -> dict[str, EngineMapping]:
    """Mappings by kind of engine.

    Raises PolicyError for anything but known keys with series that can be parsed.
    """
    try:
        mappings = msgspec.toml.decode(toml, type=dict[str, EngineMapping])
        for mapping in mappings.values():
            for series in mapping.values() | mapping.histograms():
                selector(series)
    except (msgspec.DecodeError, ValueError) as error:
        raise PolicyError(f"engine mapping: {error}") from error
    return mappings


@cache
def selector(series: str) -> Selector:
    """The name and labels that a mapping entry selects.

    Raises ValueError if it isn't a series.
    """
    for family in text_string_to_metric_families(f"{series} 0\n"):
        for sample in family.samples:
            return Selector(sample.name, dict(sample.labels))
    raise ValueError(f"not a series: {series!r}")
