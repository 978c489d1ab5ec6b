"""Scrape: one instance's metrics page over HTTP, and what it says in the terms of a heartbeat.

No answer and a refused connection are different facts: the first may be a stall, the second is the end of a process.
"""

import errno
import re
from collections.abc import Sequence
from typing import Literal

import aiohttp
from msgspec import Struct

from tokenfleet.adapters.engines.mapping import EngineMapping
from tokenfleet.adapters.engines.page import Page, Ranked, read_page, start_of
from tokenfleet.core.records import EngineState, Histogram

PAGE_BYTES_MAX = 8 * 1024 * 1024  # a real page is 50 KB; with many adapters and ranks a few hundred
RANK = re.compile("[0-9]{1,6}")
SHARE_MAX = 1.0001  # a share of KV above it is no share: unknown
NEEDED_FIELDS = ("running", "waiting", "kv_used_blocks")  # what decisions rest on
ACCEPT = "text/plain;version=0.0.4, application/openmetrics-text;q=0.5, */*;q=0.1"


class ScrapeError(Exception):
    """The page could not be read. `refused`: nobody listens at the address; otherwise there was no usable answer."""

    def __init__(self, problem: str, *, refused: bool) -> None:
        super().__init__(problem)
        self.refused = refused


class Readings(Struct, frozen=True, kw_only=True):
    """What one page says; the fields are those of `records.Heartbeat`, None means unknown."""

    boot: str = ""
    ranks: tuple[int, ...] = ()
    running: float | None = None
    waiting: float | None = None
    kv_used_blocks: float | None = None
    kv_total_blocks: int | None = None
    block_size: int | None = None
    in_flight_tokens: float | None = None
    in_flight_source: Literal["engine", "estimated"] = "estimated"
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    cached_tokens_total: float | None = None
    ttft: Histogram | None = None
    prefill: Histogram | None = None
    queue: Histogram | None = None
    iterations_total: float | None = None
    preemptions_total: float | None = None
    state: EngineState = "ready"


async def fetch_page(session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> str:
    """The text of the page at `url`.

    Raises ScrapeError if the connection is refused, or if there is no whole page within `timeout_s`.
    """
    try:
        async with session.get(
            url, headers={"Accept": ACCEPT}, timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
        ) as answer:
            if answer.status != 200:
                raise ScrapeError(f"{url} answers HTTP {answer.status}", refused=False)
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > PAGE_BYTES_MAX:
                    raise ScrapeError(f"{url} is larger than {PAGE_BYTES_MAX} bytes", refused=False)
            return body.decode("utf-8", "replace")
    except aiohttp.ClientConnectorError as error:
        raise ScrapeError(f"{url}: {error.os_error}", refused=error.os_error.errno == errno.ECONNREFUSED) from error
    except TimeoutError as error:
        raise ScrapeError(f"{url}: no answer within {timeout_s} s", refused=False) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ScrapeError(f"{url}: {type(error).__name__}: {error}", refused=False) from error


def unknown_readings(pages: Sequence[Readings]) -> dict[str, int]:
    """How many of the pages lack each reading that decisions rest on: a renamed gauge shows here first."""
    return {field: sum(getattr(page, field) is None for page in pages) for field in NEEDED_FIELDS}


class PageReader:
    """Reads the pages of one instance, one after another; remembers the last for what one page alone can't tell.

    `life` is a prefix for boots that the engine doesn't name itself; it differs between starts of the agent.
    """

    def __init__(self, mapping: EngineMapping, *, life: str) -> None:
        self._mapping = mapping
        self._life = life
        self._lives = 0
        self._last: Page | None = None
        self._boot = ""

    def read(self, text: str) -> Readings:
        """What the page says. A rank that an older page of the same boot had is kept with its last values."""
        page = read_page(text, self._mapping)
        boot = start_of(text) or self._counted_boot(page)
        if self._last is not None and boot == self._boot:
            page = page.with_stale(self._last)
        self._last, self._boot = page, boot
        return readings(page, self._mapping, boot)

    def restarted(self) -> None:
        """The engine was seen to start anew: its KV sequence went back. A boot that it names itself stays."""
        self._lives += 1
        self._last = None

    def _counted_boot(self, page: Page) -> str:
        if self._last is not None and page.falls_below(self._last):
            self._lives += 1
        return f"{self._life}-{self._lives}"


def readings(page: Page, mapping: EngineMapping, boot: str) -> Readings:
    """The page in the terms of a heartbeat."""
    block_size = _block_size(page, mapping)
    blocks = _blocks_by_rank(page, mapping, block_size)
    used_blocks, in_flight_tokens, source = _in_use(page, mapping, blocks, block_size)
    total_blocks = _sum(blocks)
    return Readings(
        boot=boot,
        ranks=tuple(sorted(int(rank) for rank in page.ranks if RANK.fullmatch(rank))),
        running=page.total(mapping.running),
        waiting=page.total(mapping.waiting),
        kv_used_blocks=used_blocks,
        kv_total_blocks=None if total_blocks is None else int(total_blocks),
        block_size=block_size,
        in_flight_tokens=in_flight_tokens,
        in_flight_source=source,
        prompt_tokens_total=page.total(mapping.prompt_tokens),
        generation_tokens_total=page.total(mapping.generation_tokens),
        cached_tokens_total=page.total(mapping.cached_tokens),
        ttft=page.histogram(mapping.ttft),
        prefill=page.histogram(mapping.prefill),
        queue=page.histogram(mapping.queue),
        iterations_total=page.total(mapping.iterations),
        preemptions_total=page.total(mapping.preemptions),
        state="sleeping" if 0.0 in page.by_rank(mapping.awake).values() else "ready",
    )


def _block_size(page: Page, mapping: EngineMapping) -> int | None:
    """Tokens a block; unknown unless all ranks say the same."""
    sizes = page.by_rank(mapping.block_size) or page.config(mapping.config, "block_size")
    size = next(iter(sizes.values())) if len(set(sizes.values())) == 1 else None
    return int(size) if size is not None and size >= 1.0 else None


def _blocks_by_rank(page: Page, mapping: EngineMapping, block_size: int | None) -> Ranked:
    blocks = page.by_rank(mapping.total_blocks) or page.config(mapping.config, "total_blocks")
    if blocks or block_size is None:
        return blocks
    tokens = page.by_rank(mapping.total_tokens)
    return {rank: None if total is None else total // block_size for rank, total in tokens.items()}


def _in_use(
    page: Page, mapping: EngineMapping, blocks: Ranked, block_size: int | None
) -> tuple[float | None, float | None, Literal["engine", "estimated"]]:
    """Blocks and tokens that running requests hold, and who says so; estimated as share × blocks if not reported."""
    tokens = page.total(mapping.kv_used_tokens)
    if tokens is not None:
        return (tokens / block_size if block_size else None), tokens, "engine"
    shares = page.by_rank(mapping.kv_use_share)
    total = _sum(blocks)
    known = [share for share in shares.values() if share is not None and share <= SHARE_MAX]
    if total is None or not known or len(known) < len(shares):
        return None, None, "estimated"
    if shares.keys() == blocks.keys():
        used = sum(((shares[rank] or 0.0) * (blocks[rank] or 0.0) for rank in shares), 0.0)
    else:
        used = sum(known) / len(known) * total
    return used, (used * block_size if block_size else None), "estimated"


def _sum(values: Ranked) -> float | None:
    known = [value for value in values.values() if value is not None]
    return sum(known, 0.0) if known and len(known) == len(values) else None
