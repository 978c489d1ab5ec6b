"""Ports for servers under test."""

import socket


def free_port() -> int:
    """A TCP port of loopback that nobody holds at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
