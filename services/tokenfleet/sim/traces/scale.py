"""Scale: a trace made as dense as a fleet of another size would see it.

By rotated copies, not by compressing time: that would make think time vanish and flatter caching.
"""

import math
from collections import Counter
from random import Random

import msgspec

from tokenfleet.sim.traces.rows import TraceRow

IDS_A_COPY = 1 << 40  # beyond the ids of traces that number their blocks
ODD = 0x9E37_79B9_7F4A_7C15  # 2^64 over the golden ratio: moves ids that are hashes of 64 bits
U64 = (1 << 64) - 1


def scaled(
    rows: list[TraceRow],
    *,
    copies: float,
    quantum_s: float,
    rng: Random,
    shared_first_block: bool,
    turned_s: float = 0.0,
) -> list[TraceRow]:
    """`copies` of the trace laid over each other, copy k of K rotated by T·k/K + U(0, T/K), sorted by arrival.

    `turned_s` more seconds are added to every rotation.

    Each copy has block ids and sessions of its own; with `shared_first_block` the commonest first block (a system
    prompt) stays one. Arrivals are spread over the recorder's quantum by U(0, quantum_s).
    A number that isn't whole is floor(copies) of them, replayed faster by copies / floor(copies): below 2, and never
    much. Below 1 whole conversations are left out, so that those that stay keep their think times.
    """
    if not rows or copies <= 0.0:
        return []
    if copies < 1.0:
        rows, copies = _thinned(rows, share=copies, rng=rng), 1.0
    laid_over = math.floor(copies)
    speed = copies / laid_over
    span_s = rows[-1].at_s + max(quantum_s, 1e-9)
    shared = _commonest_first(rows) if shared_first_block else -1
    step = IDS_A_COPY if max(max(row.hash_ids, default=0) for row in rows) < IDS_A_COPY else ODD
    laid: list[TraceRow] = []
    for copy in range(laid_over):
        shift_s = (
            turned_s + span_s * copy / laid_over + (rng.uniform(0.0, span_s / laid_over) if laid_over > 1 else 0.0)
        )
        base = copy * step
        for row in rows:
            at_s = (row.at_s + shift_s + rng.uniform(0.0, quantum_s)) % span_s / speed
            if not copy:
                laid.append(msgspec.structs.replace(row, at_s=at_s))
                continue
            ids = tuple(i if i == shared else (i + base) & U64 for i in row.hash_ids)
            session = row.session and f"{row.session}#{copy}"
            laid.append(msgspec.structs.replace(row, at_s=at_s, hash_ids=ids, session=session))
    return sorted(laid, key=lambda row: row.at_s)


def _thinned(rows: list[TraceRow], *, share: float, rng: Random) -> list[TraceRow]:
    """The rows of a `share` of the conversations, drawn; at least one conversation."""
    shared = _commonest_first(rows)
    conversations = list(dict.fromkeys(_conversation(row, shared) for row in rows))
    kept = set(rng.sample(conversations, max(1, round(share * len(conversations)))))
    return [row for row in rows if _conversation(row, shared) in kept]


def _conversation(row: TraceRow, shared: int) -> str | int:
    """What a row shares with others: its session, else its first block that is no system prompt, else nothing."""
    if row.session:
        return row.session
    first = next((i for i in row.hash_ids[:2] if i != shared), -1)
    return first if first >= 0 else f"line {row.line}"


def _commonest_first(rows: list[TraceRow]) -> int:
    firsts = Counter(row.hash_ids[0] for row in rows if row.hash_ids)
    return firsts.most_common(1)[0][0] if firsts else -1
