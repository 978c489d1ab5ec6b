"""Endpoints: where the parts of a running fleet listen, as `up` writes it for the other commands."""

from pathlib import Path

import msgspec
from msgspec import Struct

from tokenfleet.core.errors import SetupError

FILE_NAME = "endpoints.json"


class Endpoints(Struct, frozen=True, kw_only=True):
    """Addresses as HOST:PORT. `gateways` are the gRPC addresses of each site's decision replicas, ingress sites first.

    `status` are the addresses of /health and /metrics by process name.
    """

    kafka: str
    postgres: str
    audit: str
    gateways: dict[str, tuple[str, ...]]
    status: dict[str, str] = {}

    def write(self, state_dir: Path) -> None:
        """Puts the file in place whole."""
        new = state_dir / f"{FILE_NAME}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        new.replace(state_dir / FILE_NAME)


def read_endpoints(state_dir: Path) -> Endpoints:
    """Raises SetupError, with the remedy, when no fleet has written its endpoints there."""
    path = state_dir / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Endpoints)
    except FileNotFoundError:
        raise SetupError(
            f"no fleet runs here ({path} is missing): start one with `tokenfleet up`, or give the address"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise SetupError(f"{path} can't be read: {error}") from error
