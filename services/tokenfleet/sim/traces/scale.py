"""Scale: a trace made as dense as a fleet of another size would see it.

By rotated copies, never by compressing time: that would make think time vanish and flatter caching.
"""

from random import Random

import msgspec

from tokenfleet.sim.traces.rows import TraceRow

HASH_IDS_A_COPY = 10_000_000


def rotated_copies(rows: list[TraceRow], *, copies: int, quantum_s: float, rng: Random) -> list[TraceRow]:
    """`copies` of the trace laid over each other, copy k rotated by T·k/copies + U(0, T/copies), sorted by arrival.

    Each copy has block ids of its own but for the first block (a system prompt that all share). Arrivals are
    spread over the recorder's quantum by U(0, quantum_s).
    """
    if not rows or copies < 1:
        return []
    span_s = rows[-1].at_s + max(quantum_s, 1e-9)
    laid: list[TraceRow] = []
    for copy in range(copies):
        shift_s = span_s * copy / copies + (rng.uniform(0.0, span_s / copies) if copies > 1 else 0.0)
        base = copy * HASH_IDS_A_COPY
        for row in rows:
            at_s = (row.at_s + shift_s + rng.uniform(0.0, quantum_s)) % span_s
            ids = row.hash_ids[:1] + tuple(i + base for i in row.hash_ids[1:])
            laid.append(msgspec.structs.replace(row, at_s=at_s, hash_ids=ids))
    return sorted(laid, key=lambda row: row.at_s)
