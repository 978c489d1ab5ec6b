"""Generation: one streamed completion from an OpenAI-compatible engine, as a gateway's proxy sees it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class GenerationError(Exception):
    """The engine didn't deliver; `kind` is the cause in one word: refused, status, broken."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Generation(Struct, kw_only=True):
    """What has come so far; times are the caller's monotonic clock. Token counts of usage are None until reported."""

    tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    stop: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token over tokens 2..n; None before the second."""
        if self.tokens < 2 or self.first_token_s is None or self.last_token_s is None:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)


class _Choice(Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


async def generate(
    session: aiohttp.ClientSession,
    address: str,
    model: str,
    prompt: NDArray[np.uint32],
    output_tokens: int,
    generation: Generation,
    *,
    now: Callable[[], float],
) -> AsyncIterator[Generation]:
    """Streams a completion of `prompt` from the engine at `address`, updating `generation` at each chunk.

    `output_tokens` is what a simulated engine will produce, and the budget of a real one. Raises GenerationError.
    """
    decoder = msgspec.json.Decoder(_Chunk)
    try:
        async with session.post(
            f"http://{address}/v1/completions",
            data=_body(model, prompt, max(1, output_tokens)),  # in no name of ours: half a megabyte while it streams
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status != 200:
                raise GenerationError("status", f"{address} answered {response.status}")
            async for line in response.content:
                if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                    continue
                _take(generation, decoder.decode(line[5:]), now())
                yield generation
    except aiohttp.ClientConnectorError as error:
        raise GenerationError("refused", str(error)) from error
    except (aiohttp.ClientError, msgspec.DecodeError, ConnectionError) as error:
        raise GenerationError("broken", str(error)) from error
    if not generation.stop:
        raise GenerationError("broken", f"{address} ended the stream without a finish reason")


def _body(model: str, prompt: NDArray[np.uint32], output_tokens: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt.tolist(),
            "max_tokens": output_tokens,
            "tokenfleet_output_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )


def _take(generation: Generation, chunk: _Chunk, now_s: float) -> None:
    for choice in chunk.choices:
        if choice.text or choice.finish_reason:
            if generation.first_token_s is None:
                generation.first_token_s = now_s
            generation.last_token_s = now_s
            generation.tokens += 1
        if choice.finish_reason:
            generation.stop = choice.finish_reason
    if chunk.usage is not None:
        generation.prompt_tokens = chunk.usage.prompt_tokens
        if chunk.usage.completion_tokens is not None:
            generation.tokens = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        if details is not None and isinstance(cached := details.get("cached_tokens"), int):
            generation.cached_tokens = cached
