"""Errors: what a failed call says, with the details that travel in grpc-status-details-bin."""

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


def explained(error: grpc.RpcError) -> str:
    """One line: status, message, the reason a program can act on, the field at fault, and when to ask again."""
    parts = [f"{error.code().name}: {error.details()}"]
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info, fields, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info):
            parts.append(f"reason {info.reason}")
        elif detail.Unpack(fields):
            parts += [f"field {violation.field}" for violation in fields.field_violations]
        elif detail.Unpack(retry):
            parts.append(f"again in {retry.retry_delay.ToTimedelta().total_seconds():g} s")
    return "; ".join(parts)
