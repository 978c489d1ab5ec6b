"""HTTP GET: ask a process of this machine for /health or /metrics, without an HTTP library's start-up cost."""

import asyncio

BODY_BYTES_MAX = 8 * 1024 * 1024
TIMEOUT_S = 2.0


class NoAnswerError(Exception):
    """The process does not answer, or not with HTTP."""


async def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body. Raises NoAnswerError."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
                answer = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise NoAnswerError(str(error)) from error
    head, gap, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if not gap or len(words) < 2 or not words[1].isdigit() or len(body) > BODY_BYTES_MAX:
        raise NoAnswerError("not an HTTP answer")
    return int(words[1]), body
