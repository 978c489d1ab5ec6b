"""Sent: what the replicas of an origin tell one another of the requests that they send to other sites."""

from typing import Annotated

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0)]


class SendEvent(Struct, frozen=True, kw_only=True):
    """A request that was sent to another site: what it adds to the work there until that site's next summary tells.

    `work_s` is its predicted stand-alone prefill, `uncached_tokens` the tokens of it, `kv_tokens` prompt and estimated
    output.
    """

    request: Name
    attempt: Count
    site: Name
    model: Name
    work_s: float
    uncached_tokens: Count
    kv_tokens: Count
