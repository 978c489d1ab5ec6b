"""Addresses: one spelling for each place an engine listens at, so that equal ones are one instance."""

import ipaddress
from urllib.parse import urlsplit

PORT_DEFAULT = 8000  # vLLM's


def canonical_address(text: str) -> str:
    """HOST:PORT of an engine, with IPv6 in brackets, in its shortest form and with its zone.

    Takes host, host:port, a bare IPv6 address or an http(s) URL. An IPv4-mapped IPv6 address is that IPv4 address: the
    same process answers both. Names are lower-cased and not resolved.
    Raises ValueError for anything else.
    """
    host, port = _split(text.strip())
    return f"{_canonical_host(host)}:{port}"


def _split(text: str) -> tuple[str, int]:
    if _ip(text) is not None:
        return text, PORT_DEFAULT
    parts = urlsplit(text if "://" in text else f"//{text}")
    if not parts.hostname or parts.username is not None:
        raise ValueError(f"no host:port: {text!r}")
    secure = PORT_DEFAULT if not parts.scheme else 443 if parts.scheme == "https" else 80
    return parts.hostname, secure if parts.port is None else parts.port


def _canonical_host(host: str) -> str:
    address = _ip(host)
    if address is None:
        if ":" in host or not host.replace("-", "").replace(".", "").replace("_", "").isalnum():
            raise ValueError(f"no host: {host!r}")
        return host.lower().rstrip(".")
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address}]"


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
