"""Coming again: when may a refused request be asked once more, and how does it keep its place in line?"""

from tokenfleet.wire.v1 import decision_pb2


def wait_s(refused: decision_pb2.Decision) -> float | None:
    """Seconds until the request may come again, None if it was not told to: the refusal was not for want of room."""
    admission = refused.admission
    if not refused.return_ticket and refused.reason != decision_pb2.REASON_ALL_BUSY:
        return None
    if admission.HasField("retry_after_s"):
        return admission.retry_after_s
    return admission.not_before_s if admission.HasField("not_before_s") else None


def come_again(request: decision_pb2.Request, refused: decision_pb2.Decision, *, elapsed_s: float) -> None:
    """Makes `request` the attempt after the refused one, with its ticket if it was given one.

    `elapsed_s` is the time since the logical request arrived, by the clock that all its attempts are timed on.
    """
    request.attempt = refused.attempt + 1
    request.return_ticket = refused.return_ticket
    request.elapsed_s = elapsed_s
    del request.sites_tried[:]
