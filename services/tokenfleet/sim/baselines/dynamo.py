"""Dynamo: the cost of its KV router, prefill and decode blocks, with overlap from KV events.

ai-dynamo/dynamo, `lib/kv-router/src/scheduling/selector.rs` at 01690d4 and the KV Router pages of its documentation
(v0.4 to v1.2), defaults overlap weight 1.0 (later named prefill load scale) and temperature 0:

    weight · (active prefill tokens + uncached tokens) / block + potential decode blocks, the least wins

Active prefill tokens are the uncached tokens, as believed at dispatch, of own requests before their first token.
Potential decode blocks are the blocks that own requests hold until they end, shared ones once, and those of the request
that are not among them; generated tokens are not counted (router_track_output_blocks is off by default).
"""

from collections import Counter

from msgspec import Struct

from tokenfleet.core.decision import Request
from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.core.records import KvDelta, KvSnapshot
from tokenfleet.sim.baselines.accounts import Accounts, Placement, least, split_keys
from tokenfleet.sim.router import Record, Setup


class DynamoSettings(Struct, frozen=True, kw_only=True):
    """`overlap_weight`: decode blocks that one prefill block costs."""

    overlap_weight: float = 1.0


class Dynamo(Accounts):
    """KV routing of one gateway; router_replica_sync is off by default, so it knows only its own requests."""

    def __init__(self, setup: Setup, settings: DynamoSettings | None = None) -> None:
        super().__init__(setup)
        self.settings = settings or DynamoSettings()
        self._cached = PrefixIndex()
        self._prefill_tokens = dict.fromkeys(self.instances, 0)
        self._held: dict[str, Counter[bytes]] = {name: Counter() for name in self.instances}  # block → own holders
        self._unnamed = dict.fromkeys(self.instances, 0)  # held blocks of prompts that came without keys

    def place(self, request: Request, now_s: float) -> Placement:
        keys = split_keys(request)
        hits = self._cached.hits(request.block_keys)
        block_tokens = max(request.block_tokens, 1)
        costs: dict[str, float] = {}
        for name in self.instances:
            uncached = request.prompt_tokens - hits.get(name, 0) * block_tokens
            held = self._held[name]
            decode_blocks = len(held) + sum(key not in held for key in keys) + self._unnamed[name]
            prefill_blocks = (self._prefill_tokens[name] + uncached) / block_tokens
            costs[name] = self.settings.overlap_weight * prefill_blocks + decode_blocks
        instance = least(costs, self.rng)
        return Placement(
            instance=instance,
            tokens=request.prompt_tokens,
            keys=keys,
            unnamed_blocks=max(0, request.prompt_tokens // block_tokens - len(keys)),
            hit_tokens=hits.get(instance, 0) * block_tokens,
            kv_state=self._cached.state(instance),
        )

    def began(self, placement: Placement) -> None:
        self._prefill_tokens[placement.instance] += placement.uncached_tokens
        self._held[placement.instance].update(placement.keys)
        self._unnamed[placement.instance] += placement.unnamed_blocks

    def prefilled(self, placement: Placement) -> None:
        self._prefill_tokens[placement.instance] -= placement.uncached_tokens

    def ended(self, placement: Placement) -> None:
        self._unnamed[placement.instance] -= placement.unnamed_blocks
        held = self._held[placement.instance]
        for key in placement.keys:
            if held[key] == 1:
                del held[key]
            else:
                held[key] -= 1

    def heard(self, record: Record, now_s: float) -> None:
        if isinstance(record, KvDelta | KvSnapshot):
            self._cached.apply(record)
