"""Status: /health and /metrics of one process, on a port of its own.

Served from a thread, so that a stalled event loop is seen: `/health` is 503 when the loop has not ticked for
LOOP_SILENT_MAX_S, when a part says that it isn't ready, or while stopping. The body names each part and its state.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, Gauge, generate_latest

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.core.errors import SetupError

LOOP_TICK_S = 0.5
LOOP_SILENT_MAX_S = 5.0

LOOP_LAG = Gauge("tokenfleet_event_loop_lag_seconds", "How late the event loop ran its last tick")

Part = Callable[[], tuple[bool, str]]
"""A part's state: ready or not, and a short word on it (age, lag, why not)."""


class Status:
    """What one process says of itself. `parts` are asked at each request; a part that raises is not ready.

    Use: `status = Status("agent", host="127.0.0.1", port=0)`; `status.parts["kafka"] = lambda: (True, "lag 0")`;
    `async with status: ...`. `port` is the port really bound after entering.
    """

    def __init__(self, process: str, *, host: str, port: int) -> None:
        self.process = process
        self.parts: dict[str, Part] = {}
        self.port = port
        self._host = host
        self._ticked_at_s = monotonic_s()
        self._server: ThreadingHTTPServer | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Status":
        try:
            self._server = ThreadingHTTPServer((self._host, self.port), _handler(self))
        except OSError as error:
            raise SetupError(
                f"status port {self._host}:{self.port} can't be used ({error.strerror}); "
                "set TOKENFLEET_STATUS_PORT to a free one"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="status", daemon=True).start()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether all parts are ready, and a document that names each."""
        silent_s = monotonic_s() - self._ticked_at_s
        parts = {"event loop": (silent_s < LOOP_SILENT_MAX_S, f"ticked {silent_s:.1f} s ago")}
        for name, part in list(self.parts.items()):
            try:
                parts[name] = part()
            except Exception as error:  # a part that can't answer is a part that isn't ready
                parts[name] = (False, f"{type(error).__name__}: {error}")
        ready = all(ok for ok, _ in parts.values())
        document = {
            "process": self.process,
            "ready": ready,
            "parts": {name: {"ready": ok, "state": word} for name, (ok, word) in parts.items()},
        }
        return ready, document

    def metrics(self) -> bytes:
        return generate_latest(REGISTRY)

    async def _tick(self) -> None:
        while True:
            before_s = monotonic_s()
            await asyncio.sleep(LOOP_TICK_S)
            self._ticked_at_s = monotonic_s()
            LOOP_LAG.set(max(0.0, self._ticked_at_s - before_s - LOOP_TICK_S))


def _handler(status: Status) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0  # a client that sends nothing holds a thread no longer

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, status.metrics())
            elif self.path in ("/health", "/healthz", "/"):
                ready, document = status.health()
                self._answer(200 if ready else 503, "application/json", json.dumps(document).encode())
            else:
                self._answer(404, "text/plain", b"/health or /metrics\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            with contextlib.suppress(ConnectionError):  # who asked has left: this process was paused, or is busy
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Probes are not worth a log line."""

    return Handler
