"""Shadows: what the sampled decisions say of the policy's shadows, from PostgreSQL."""

from collections.abc import Sequence

from msgspec import Struct
from rich.table import Table

from tokenfleet.adapters.postgres import Postgres, PostgresAwayError
from tokenfleet.core.errors import SetupError

SHADOW_REGRET = "select * from shadow_regret order by policy_revision desc, shadow"


class ShadowRow(Struct, frozen=True, kw_only=True):
    """A row of the view shadow_regret, whose comment says what its columns mean."""

    policy_revision: int
    shadow: str
    decisions: int
    differing: int
    mean_regret_s: float
    mean_decision_regret_s: float
    told: int
    available_tokens: int
    captured_tokens: int
    shadow_captured_tokens: int
    delivered_tokens: int


async def shadow_rows(dsn: str) -> list[ShadowRow]:
    """All shadows of all revisions, the newest revision first. Raises SetupError if PostgreSQL does not answer."""
    try:
        async with Postgres(dsn) as postgres:
            return [ShadowRow(**dict(row)) for row in await postgres.fetch(SHADOW_REGRET)]
    except PostgresAwayError as error:
        raise SetupError(f"PostgreSQL: {error}; start it, run `tokenfleet migrate`, or give its --postgres") from error


def shadows_table(rows: Sequence[ShadowRow]) -> Table:
    """One line a shadow; reuse in tokens, as the decisions captured it and as the shadow would have."""
    table = Table(title="shadows, and the decisions that they were asked beside")
    for column in ("policy", "shadow"):
        table.add_column(column)
    for column in ("decisions", "differ", "regret", "own regret", "available", "captured", "by shadow", "delivered"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.policy_revision),
            row.shadow,
            f"{row.decisions:,}",
            f"{row.differing / row.decisions:.1%}",
            _ms(row.mean_regret_s),
            _ms(row.mean_decision_regret_s),
            f"{row.available_tokens:,}",
            _part(row.captured_tokens, row.available_tokens),
            _part(row.shadow_captured_tokens, row.available_tokens),
            _part(row.delivered_tokens, row.available_tokens),
        )
    table.caption = (
        "regret: predicted time to first token at the shadow's choice − at the decision's (below 0: the shadow's is "
        "earlier); own regret: at the decision's − the earliest; reuse in tokens, of decisions whose outcome told it"
    )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:+,.1f} ms"


def _part(tokens: int, available: int) -> str:
    return f"{tokens / available:.1%}" if available else "-"
