"""Sealed: bytes that callers carry as text, and that come back as they were or are known not to.

The body, then HMAC-SHA256 with the site's secret over all of it; base64 for URLs. A body begins with its version, which
no two kinds share, so that one kind never passes for another.
"""

import hmac
from base64 import b64decode, urlsafe_b64encode
from typing import Literal

SIGNATURE_BYTES = 32
TEXT_CHARS_MAX = 4096

Problem = Literal["malformed", "tampered"]


def seal(body: bytes, secret: bytes) -> str:
    """The body as text, signed."""
    return urlsafe_b64encode(body + _signature(body, secret)).decode()


def unseal(text: str, secret: bytes, *, version: bytes) -> bytes | Problem:
    """The body of that version which `secret` signed, or why there is none. Nothing is read of what is not signed."""
    try:
        signed = b64decode(text.encode("ascii"), b"-_", validate=True) if len(text) <= TEXT_CHARS_MAX else b""
    except ValueError:
        signed = b""
    body, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    if not body.startswith(version):
        return "malformed"
    return body if hmac.compare_digest(signature, _signature(body, secret)) else "tampered"


def _signature(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, body, "sha256")
