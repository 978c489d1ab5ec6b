"""Fit command: `tokenfleet sim fit`, a profile of one's own engines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.core.errors import SetupError

if TYPE_CHECKING:
    from tokenfleet.sim.fit import Fitted

ERROR_MAX = 0.05  # beyond, the engine did something that its steps don't explain


def fit_profile(
    trace: Annotated[str, typer.Argument(help="Trace with times, as `sim export` writes it.")],
    out: Annotated[Path, typer.Argument(help="TOML file to write; `sim run routing --profile FILE` reads it.")],
    base: Annotated[
        str, typer.Option(help="Profile that the rest is taken from: memory, token budget, what isn't identified.")
    ] = "L70",
    token_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a step at most (vLLM: max_num_batched_tokens).")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out and count lines that can't be used.")] = False,
) -> None:
    """Fit a profile to what was measured of engines that are all alike."""
    import msgspec

    from tokenfleet.sim.fit import fit, read_measured
    from tokenfleet.sim.profiles import load_profile, profile_text

    if out.exists() and Path(trace).exists() and out.samefile(trace):
        raise SetupError(f"{out} is the trace itself, which the profile would replace; name another file")
    like = load_profile(base)
    if token_budget is not None:
        like = msgspec.structs.replace(like, token_budget=token_budget)
    engines, skipped = read_measured(trace, skip_bad=skip_bad)
    fitted = fit(engines, like, source=f"Fitted to {Path(trace).name}; the rest is {base}'s.", skipped=skipped)
    try:
        out.write_text(profile_text(fitted.profile))
    except OSError as error:
        raise SetupError(f"{out} can't be written: {error.strerror}") from error
    for line in told(fitted, base):
        typer.echo(line)


def told(fitted: "Fitted", base: str) -> list[str]:
    """What was fitted and how far to trust it, for people."""
    lines = [
        f"{each.name:20} {each.value:.4g} s  "
        + (f"± {each.deviation / each.value:.1%}" if each.identified else unknown)
        for unknown in [f"not identified by this data: {base}'s"]
        for each in fitted.coefficients
    ]
    lines.append(
        f"{fitted.requests} requests, {fitted.skipped} without times; half of the times are explained to within "
        f"{fitted.prefill_error:.1%} (prefill) and {fitted.decode_error:.1%} (decode)"
    )
    if not max(fitted.prefill_error, fitted.decode_error) <= ERROR_MAX:
        lines.append(
            f"that is worse than {ERROR_MAX:.0%}: prompts waited for KV memory, the trace lacks requests, or "
            "the token budget is another; take a calmer time, or give --token-budget"
        )
    return lines
