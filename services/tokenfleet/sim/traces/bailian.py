"""Bailian: the JSONL traces of Qwen on Alibaba's Bailian (seconds, 16-token blocks, turns of conversations)."""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from tokenfleet.sim.traces.lines import BadLines, Line, LineError, rows_of
from tokenfleet.sim.traces.rows import TraceRow

BLOCK_TOKENS = 16
NO_PARENT = -1


class _BailianLine(Struct, frozen=True):
    chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    parent_chat_id: int = NO_PARENT
    turn: int = 1
    type: str = ""


def parse_bailian(lines: Iterable[Line], *, source: str, bad: BadLines | None = None) -> Iterator[TraceRow]:
    """Rows of a Bailian JSONL trace; a conversation is named by its first turn, the request's type is its class.

    An id there stands for the tokens of its block, so each is taken with all before it. A turn whose parent is not in
    the trace begins a conversation.
    Raises PolicyError, naming source and line, for a line that isn't such a row; with `bad` it is counted there.
    """
    decoder = msgspec.json.Decoder(_BailianLine)
    prefixes: dict[tuple[int, int], int] = {}  # (prefix before, id of the block) -> the prefix with it
    roots: dict[int, int] = {}  # chat -> the conversation's first chat

    def read(line: Line) -> TraceRow:
        row = decoder.decode(line)
        if row.chat_id in roots:
            raise LineError(f"chat_id {row.chat_id} was there before: a chat is one request")
        roots[row.chat_id] = root = roots.get(row.parent_chat_id, row.chat_id)
        chain: list[int] = []
        prefix = 0
        for block in row.hash_ids:
            prefix = prefixes.setdefault((prefix, block), len(prefixes) + 1)
            chain.append(prefix)
        return TraceRow(
            at_s=row.timestamp,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            hash_ids=tuple(chain),
            block_tokens=BLOCK_TOKENS,
            session=f"chat-{root}",
            request_class=row.type,
        )

    return rows_of(lines, read, source=source, bad=bad)
