"""Ports: whether everything that a fleet wants to listen on is free, asked before anything starts.

A plain bind, without SO_REUSEPORT: with it a second program would get the port silently and half of the calls.
"""

import errno
import socket
from collections.abc import Iterable

from tokenfleet.core.errors import SetupError
from tokenfleet.local.layout import HOST


def refuse_taken(ports: Iterable[tuple[str, int]]) -> None:
    """`ports` are (what for, port). Raises SetupError naming the first that is taken and the remedy."""
    for what, port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections of an earlier fleet
            try:
                probe.bind((HOST, port))
            except OSError as error:
                why = "is taken" if error.errno == errno.EADDRINUSE else f"can't be used ({error.strerror})"
                raise SetupError(
                    f"port {port} for {what} {why}: end who holds it, or choose others with --port-base "
                    "(beside another fleet also a folder with --state-dir)"
                ) from error
