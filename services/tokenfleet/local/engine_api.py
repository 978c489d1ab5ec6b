"""The OpenAI requests a simulated engine understands, and the answers it gives."""

from typing import Annotated, Any, Literal

import msgspec

from tokenfleet.local.engine_tokens import natural_output_tokens, tokenize
from tokenfleet.sim.engine.events import Finished

COMPLETION_TOKENS_DEFAULT = 16  # OpenAI's default of max_tokens for completions
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """continuous_usage_stats (vLLM's) puts the usage so far on every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One chat message; content is text or parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A completion (prompt) or chat (messages) request; fields it does not name are ignored.

    tokenfleet_output_tokens is the length the model will really generate, bounded by max_tokens.
    """

    model: str | None = None
    prompt: str | list[TokenId] | None = None
    messages: list[Message] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: str = ""
    tokenfleet_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def token_ids(self) -> list[int]:
        """The prompt's tokens; the chat template is a line "role: content" a message."""
        if isinstance(self.prompt, list):
            return self.prompt
        if self.prompt is not None:
            return tokenize(self.prompt)
        return tokenize("".join(f"{message.role}: {_text_of(message.content)}\n" for message in self.messages or []))

    def max_output_tokens(self, *, chat: bool, room: int) -> int:
        """The bound on the output: the request's, else the API's default."""
        asked = self.max_completion_tokens or self.max_tokens
        return asked or (room if chat else min(room, COMPLETION_TOKENS_DEFAULT))

    def output_tokens(self, token_ids: list[int], max_tokens: int) -> int:
        """The length the model will generate."""
        if self.tokenfleet_output_tokens is not None:
            return min(self.tokenfleet_output_tokens, max_tokens)
        if self.ignore_eos:
            return max_tokens
        return min(max(self.min_tokens, natural_output_tokens(token_ids)), max_tokens)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks of one answer share."""

    id: str
    created: int  # Unix seconds
    model: str
    chat: bool
    prompt_tokens: int

    def chunk(self, text: str, *, first: bool, finished: Finished | None, usage: dict[str, Any] | None) -> bytes:
        """One server-sent event with the text of some tokens."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finished.reason.value if finished else None}
        if self.chat:
            choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            choice["text"] = text
        return self._event([choice], usage)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event of a stream with include_usage."""
        return self._event([], usage)

    def whole(self, text: str, finished: Finished) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finished.reason.value}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        usage = self.usage(finished.output_tokens, finished.cached_tokens)
        return self._body("chat.completion" if self.chat else "text_completion", [choice], usage)

    def usage(self, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": self.prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return b"data: " + msgspec.json.encode(self._body(kind, choices, usage)) + b"\n\n"

    def _body(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return body if usage is None else {**body, "usage": usage}


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What shall go wrong, for how long; for_s None means until the next fault, for a restart at once.

    crash: sockets closed, connections dropped, all state lost; comes back only after for_s, if given.
    restart: a crash that comes back after for_s, if block_size is given with blocks of that size.
    hang: connections are accepted and never answered, steps stand still. slow: steps take factor times as long.
    refuse: 503 to requests and health checks. none: healthy again.
    """

    kind: Literal["crash", "restart", "hang", "slow", "refuse", "none"]
    factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    for_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1)] | None = None


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _text_of(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""
