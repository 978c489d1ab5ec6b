"""Load config: what the load is told; `up` writes it without loading what the load needs."""

from msgspec import Struct


class LoadConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`origins` are the gateways of each ingress site, `origin_shares` its share of the conversations; so are `models`
    and `tenants`. `batch_share` of the conversations run as batch jobs, those of `batch_tenants` all.

    `wait_max_s` is how long a request may be held before it is sent (late binding, class queues). `mixed` above 0 is
    the load of the mixed workload for so many `instances`, which then comes instead of the trace; `model_of` are the
    models of classes that don't ask for one of `models`.

    `run` begins every request id, so that books and rows of two runs never mix. `block_tokens` and `site_secret` must
    be the agents' own.
    """

    run: str
    origins: dict[str, tuple[str, ...]]
    origin_shares: dict[str, float]
    models: dict[str, float]
    tenants: dict[str, float]
    batch_tenants: tuple[str, ...] = ()
    batch_share: float = 0.08
    site_secret: str
    block_tokens: int = 256
    copies: int = 1
    seed: int = 1
    folder: str
    prompt_tokens_max: int = 60_000
    wait_max_s: float = 0.0
    mixed: float = 0.0
    model_of: dict[str, str] = {}
    instances: int = 1
