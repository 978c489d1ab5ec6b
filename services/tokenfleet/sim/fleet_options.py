"""Fleet options: what every command that simulates a fleet may be told of it; None: the scenario's, or the usual."""

from typing import Annotated

import typer

Trace = Annotated[str | None, typer.Option(help="One that ships, as `sim list` names it, or a path. {synthetic}")]
Copies = Annotated[
    float | None, typer.Option(help="Rotated copies of the trace laid over each other. {2, of a file 1}")
]
Instances = Annotated[int | None, typer.Option(help="Engines in the fleet. {8}")]
Gateways = Annotated[int | None, typer.Option(help="Gateways; each request arrives at a random one. {1}")]
EventDelay = Annotated[float | None, typer.Option(help="Seconds until the other gateways hear of a placement. {0.02}")]
ProfileName = Annotated[
    str | None, typer.Option(help="Engine profile; `sim list` names them, or a file of `sim fit`. {L70}")
]
Length = Annotated[float | None, typer.Option("--len", help="Seconds of the trace. Default: by instances.")]
Warm = Annotated[float | None, typer.Option(help="Seconds before requests are measured. Default: by instances.")]
