"""llm-d: weighted scorers over prefix, queue and KV use, the greatest sum wins.

The endpoint picker of llm-d (kubernetes-sigs/gateway-api-inference-extension, plugins `prefix-cache-scorer` at 00913f9,
`queue-scorer` at 02308be, `kv-cache-utilization-scorer`, `max-score-picker`) with the weights of the guide
inference-scheduling of llm-d/llm-d at 086f217, 3, 2 and 2:

    3 · matched/prompt blocks + 2 · (q_max - q) / (q_max - q_min) + 2 · (1 - KV use)

q are waiting requests by the last scrape; all score 1 when all queues are equal. The index of prefixes is approximate,
an LRU of own dispatches of 31,250 blocks of 64 tokens an instance; a prompt's first block is its oldest entry there.
The rule has no account of its own requests: between two scrapes it sees none of what it sent. Its endpoint picker
scrapes each 50 ms by default (DefaultRefreshMetricsInterval); here the period is the scenario's. Left out because it
would only weaken the rule: the first versions match at most 256 blocks of a prompt.
"""

from collections.abc import Sequence

from msgspec import Struct

from tokenfleet.core.decision import Request
from tokenfleet.sim.baselines.accounts import Accounts, Placement, least, split_keys
from tokenfleet.sim.baselines.telemetry import Telemetry
from tokenfleet.sim.router import Record, Setup

INDEX_TOKENS = 31_250 * 64  # an instance: lruCapacityPerServer × the block size


class LlmdSettings(Struct, frozen=True, kw_only=True):
    """Weights of the three scores, each of which is within 0..1."""

    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0


class Llmd(Accounts):
    """Weighted scoring of one gateway."""

    def __init__(self, setup: Setup, settings: LlmdSettings | None = None) -> None:
        super().__init__(setup)
        self.settings = settings or LlmdSettings()
        self._telemetry = Telemetry(self.instances)
        self._sent: dict[str, dict[bytes, None]] = {name: {} for name in self.instances}  # oldest first
        self._block_tokens = 1

    def place(self, request: Request, now_s: float) -> Placement:
        keys = split_keys(request)
        self._block_tokens = max(request.block_tokens, 1)
        seen = self._telemetry.seen
        queues = [gauges.waiting for gauges in seen.values()]
        shortest, longest = min(queues), max(queues)
        matched = {name: matching_blocks(keys, self._sent[name]) for name in self.instances}
        costs: dict[str, float] = {}
        for name, gauges in seen.items():
            queue = (longest - gauges.waiting) / (longest - shortest) if longest > shortest else 1.0
            prefix = matched[name] / len(keys) if keys else 0.0
            weights = self.settings
            costs[name] = -(weights.prefix * prefix + weights.queue * queue + weights.kv * (1.0 - gauges.kv_use))
        instance = least(costs, self.rng)
        return Placement(
            instance=instance,
            tokens=request.prompt_tokens,
            keys=keys,
            hit_tokens=matched[instance] * self._block_tokens,
            kv_state="approx",
        )

    def began(self, placement: Placement) -> None:
        sent = self._sent[placement.instance]
        for key in placement.keys:
            sent.pop(key, None)
            sent[key] = None
        while len(sent) * self._block_tokens > INDEX_TOKENS:
            del sent[next(iter(sent))]

    def heard(self, record: Record, now_s: float) -> None:
        self._telemetry.hear(record)


def matching_blocks(keys: Sequence[bytes], held: dict[bytes, None]) -> int:
    """Blocks from the first on that are held without a break."""
    for blocks, key in enumerate(keys):
        if key not in held:
            return blocks
    return len(keys)
