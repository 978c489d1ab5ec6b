"""Token: what a caller shows of itself with each call, as gRPC metadata."""

from tokenfleet.adapters.settings import token_of

Shown = tuple[tuple[str, str], ...] | None


def shown(token: str | None = None) -> Shown:
    """The metadata that shows `token`, by default that of the environment; None without one. Raises SetupError."""
    token = token_of() if token is None else token
    return (("authorization", f"Bearer {token}"),) if token else None
