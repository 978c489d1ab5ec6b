"""The command `sim run plan`: a day of the long loop."""

from typing import Annotated

import typer


def run_plan(
    design: Annotated[str, typer.Option(help="forecast, or perfect: it knows what will be offered.")] = "forecast",
    hours: Annotated[float, typer.Option(help="Length, after a week of history.")] = 24.0,
    peak: Annotated[float, typer.Option(help="Greatest demand of a site over its mean.")] = 2.0,
    critical: Annotated[float, typer.Option(help="Share of the work to be served with any one site lost.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan the replicas of four sites through a day, beside sites that always have what their peak needs.

    Needs the extra tokenfleet[plan].
    """
    from time import process_time  # of the processor, for what the solver takes alone

    import msgspec

    from tokenfleet.core.errors import SetupError
    from tokenfleet.sim.words import progress_bar

    try:
        from tokenfleet.sim.plan.run import PlanOptions, run_plan
    except ImportError as error:
        raise SetupError(f"plans need {error.name}: pip install tokenfleet[plan]") from error

    options = PlanOptions(design=design, hours=hours, peak=peak, critical=critical, seed=seed)
    with progress_bar(f"{design}, seed {seed}", total_s=hours * 3600.0) as progress:
        result = run_plan(options, now_s=process_time, progress=progress)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
        return
    typer.echo(
        f"{design}: {result.hours:g} h of four sites whose demand peaks at {peak:g} times its mean, a quarter of a day "
        f"apart, seed {seed}"
    )
    typer.echo(
        f"planned  {result.gpu_hours:,.0f} GPU-hours, {result.attainment:.3%} of the work served\n"
        f"static   {result.static_gpu_hours:,.0f} GPU-hours, {result.static_attainment:.3%} served\n"
        f"saved    {result.saved:.1%}; {result.plans} plans, {result.published} published, "
        f"the slowest took {result.solve_s:.2f} s"
    )
