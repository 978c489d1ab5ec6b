"""Route error: why one request of a stream got no decision, as the error that its own call would have raised."""

from typing import Final

import grpc
import grpc.aio

from tokenfleet.wire.v1 import scheduler_pb2

# Codes of a replica that can't answer now, where another may.
SILENT_CODES: Final = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class RouteError(grpc.aio.AioRpcError):
    """One request got no decision. `reason` and `field` are those of the service's Problem, empty if it said none."""

    def __init__(self, code: grpc.StatusCode, details: str, *, reason: str = "", field: str = "") -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
        self.reason = reason
        self.field = field


def error_of(problem: scheduler_pb2.Problem) -> RouteError:
    """The error that the service's `problem` is."""
    code = _CODES.get(problem.code, grpc.StatusCode.UNKNOWN)
    return RouteError(code, problem.message, reason=problem.reason, field=problem.field)


_CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}
