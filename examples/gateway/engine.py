"""Engine: one streamed completion over the OpenAI API, with the standard library alone."""

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

TIMEOUT_S = 120.0


class EngineError(Exception):
    """The engine did not deliver."""


@dataclass
class Answer:
    """What has come so far; times are time.monotonic(). Counts are the engine's own, None until it has told them."""

    chunks: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    stop: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token over tokens 2..n."""
        if self.first_token_s is None or self.last_token_s is None or (self.output_tokens or 0) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


def complete(address: str, model: str, prompt: list[int], max_tokens: int, answer: Answer) -> Iterator[Answer]:
    """Streams a completion from the engine at HOST:PORT, and yields `answer` after each chunk. Raises EngineError."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EngineError(f"{address} answered {response.status}")
        for line in response:
            if line.startswith(b"data:") and b"[DONE]" not in line:
                take(json.loads(line[5:]), answer)
                yield answer
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineError(f"{address}: {error}") from error
    finally:
        connection.close()
    if not answer.stop:
        raise EngineError(f"{address} ended the stream without a finish reason")


def take(chunk: dict, answer: Answer) -> None:
    """Adds one server-sent event to `answer`; the last one holds the usage."""
    for choice in chunk.get("choices", []):
        answer.chunks += 1
        answer.last_token_s = time.monotonic()
        answer.first_token_s = answer.first_token_s or answer.last_token_s
        answer.stop = choice.get("finish_reason") or answer.stop
    if usage := chunk.get("usage"):
        answer.output_tokens = usage.get("completion_tokens")
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
