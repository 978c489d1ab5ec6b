"""The HTTP side of a simulated engine: OpenAI completions, health, metrics."""

from typing import Any

import msgspec
from aiohttp import web

from tokenfleet.adapters.clock import wall_s
from tokenfleet.local.engine_api import Answer, Ask, error_body
from tokenfleet.local.engine_events import Prompt
from tokenfleet.local.engine_live import JobStream, LiveEngine
from tokenfleet.local.engine_metrics import CONTENT_TYPE
from tokenfleet.local.engine_tokens import block_hashes, output_text

BODY_BYTES_MAX = 16 * 1024 * 1024  # a prompt of a million token ids as JSON

_decoder = msgspec.json.Decoder(Ask)


class EngineHttp:
    """Routes of one life of an engine; root makes its block hashes its own."""

    def __init__(self, engine: LiveEngine, *, model: str, root: int) -> None:
        self._engine = engine
        self._model = model
        self._root = root
        self._draining = False

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        app.router.add_post("/drain", self._drain)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model,
            "object": "model",
            "created": int(wall_s()),
            "owned_by": "tokenfleet",
            "max_model_len": self._engine.context_tokens_max(),
        }
        return _json({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        page = self._engine.metrics.page(self._engine.load())
        return web.Response(body=page.encode(), headers={"Content-Type": f"{CONTENT_TYPE}; charset=utf-8"})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return _json({"success": self._engine.reset_prefix_cache()})

    async def _drain(self, request: web.Request) -> web.Response:
        """No new work from now on; what runs and waits is finished."""
        self._draining = True
        load = self._engine.load()
        return _json({"draining": True, "running": load.running, "waiting": load.waiting})

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        if self._draining:
            return error("the engine drains", 503)
        try:
            ask = _decoder.decode(await request.read())
        except msgspec.MsgspecError as wrong:
            return error(str(wrong), 400)
        if ask.model not in (None, self._model):
            return error(f"The model `{ask.model}` does not exist.", 404)
        token_ids = ask.token_ids()
        room = self._engine.context_tokens_max() - len(token_ids)
        max_tokens = ask.max_output_tokens(chat=chat, room=room)
        if not token_ids or not 1 <= max_tokens <= room:
            return error(
                f"{len(token_ids)} prompt + {max_tokens} output tokens do not fit in {room + len(token_ids)}", 400
            )
        hashes = block_hashes(token_ids, self._engine.profile.block_size, root=self._root, salt=ask.cache_salt)
        stream = self._engine.submit(
            Prompt(token_ids=token_ids, salt=ask.cache_salt),
            hashes=hashes,
            output_tokens=ask.output_tokens(token_ids, max_tokens),
            max_tokens=max_tokens,
        )
        if stream is None:
            return error("the queue is full", 503)
        answer = Answer(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{request.headers.get('X-Request-Id', stream.job.id)}",
            created=int(wall_s()),
            model=self._model,
            chat=chat,
            prompt_tokens=len(token_ids),
        )
        try:
            return await (self._stream(request, ask, answer, stream) if ask.stream else self._whole(answer, stream))
        finally:
            if stream.finished is None:  # the caller left, or the write to it failed
                self._engine.cancel(stream)

    async def _whole(self, answer: Answer, stream: JobStream) -> web.Response:
        while stream.finished is None:
            stream.changed.clear()
            await stream.changed.wait()
        return _json(answer.whole(output_text(0, stream.finished.output_tokens), stream.finished))

    async def _stream(self, request: web.Request, ask: Ask, answer: Answer, stream: JobStream) -> web.StreamResponse:
        """Server-sent events: the first token at once, further tokens as the engine's pulse brings them."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        continuous, sent = ask.stream_options.continuous_usage_stats, 0
        while stream.finished is None or sent < stream.finished.output_tokens:
            await stream.changed.wait()
            stream.changed.clear()
            tokens = self._engine.generated_tokens(stream)
            if tokens == sent:
                continue
            text = output_text(sent, tokens - sent)
            usage = answer.usage(tokens, stream.cached_tokens) if continuous else None
            await response.write(answer.chunk(text, first=sent == 0, finished=stream.finished, usage=usage))
            sent = tokens
        if ask.stream_options.include_usage:
            usage = answer.usage(sent, stream.finished.cached_tokens)
            await response.write(answer.usage_chunk(usage))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def error(message: str, status: int) -> web.Response:
    """An OpenAI error answer."""
    kind = "ServiceUnavailableError" if status == 503 else "BadRequestError" if status == 400 else "NotFoundError"
    return _json(error_body(message, kind, status), status=status)


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
