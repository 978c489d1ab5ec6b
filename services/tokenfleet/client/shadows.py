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
    """One line a shadow: milliseconds of regret; reuse in tokens, and the shares of it that were had."""
    table = Table(title="shadows, and the decisions that they were asked beside", box=None, padding=(0, 1, 0, 0))
    for column in ("policy", "shadow"):
        table.add_column(column, overflow="fold")
    for column in ("asked", "differ", "regret", "own", "reuse", "captured", "shadow's", "delivered"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.policy_revision),
            row.shadow,
            f"{row.decisions:,}",
            f"{row.differing / row.decisions:.1%}",
            f"{row.mean_regret_s * 1e3:+,.1f}",
            f"{row.mean_decision_regret_s * 1e3:+,.1f}",
            f"{row.available_tokens:,}",
            _part(row.captured_tokens, row.available_tokens),
            _part(row.shadow_captured_tokens, row.available_tokens),
            _part(row.delivered_tokens, row.available_tokens),
        )
    table.caption = (
        "regret: ms of predicted time to first token at the shadow's choice - at the decision's (below 0: the shadow's "
        "is earlier); own: at the decision's - the earliest; reuse: cached tokens on the best instance, and of them "
        "captured by the decision, by the shadow, delivered by the engine"
    )
    return table


def _part(tokens: int, available: int) -> str:
    return f"{tokens / available:.1%}" if available else "-"
