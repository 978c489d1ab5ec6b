"""The command `sim run sites`: one origin's requests on the engines of several sites."""

from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.sim.fleet_options import EventDelay, Length, ProfileName, Warm

if TYPE_CHECKING:
    from tokenfleet.sim.sites.run import SitesOptions

Copies = Annotated[float | None, typer.Option(help="Copies of the conversation trace. {2.6}")]
ResidencyShare = Annotated[
    float | None, typer.Option("--residency", help="Share of conversations that must stay at the existing site. {0.2}")
]
SummaryAge = Annotated[float | None, typer.Option(help="Seconds between two summaries of a site. {0.5}")]
Ingresses = Annotated[int | None, typer.Option(help="Origins. {1}")]
Replicas = Annotated[int | None, typer.Option(help="Of each decision service. {1}")]


def run_sites(
    copies: Copies = None,
    residency: ResidencyShare = None,
    design: Annotated[
        str | None,
        typer.Option(help="fleetmind, ideal, least_in_flight, local_only, spill, or random. {fleetmind}"),
    ] = None,
    summary_age: SummaryAge = None,
    ingresses: Ingresses = None,
    replicas: Replicas = None,
    event_delay: EventDelay = None,
    profile: ProfileName = None,
    length: Length = None,
    warm: Warm = None,
    seed: Annotated[int, typer.Option(help="Of the requests, and of all chance in the world.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve requests that arrive where no engines are, at an existing site (b) and two that extend it (c, d).

    What stands in {} is taken where no option tells.
    """
    from time import process_time  # of the processor, for requests_per_cpu_s alone

    import msgspec
    from rich.console import Console

    from tokenfleet.sim.sites.run import run_sites
    from tokenfleet.sim.sites.words import result_words
    from tokenfleet.sim.words import progress_bar

    options = options_of(
        copies=copies,
        residency=residency,
        design=design,
        summary_age_s=summary_age,
        ingresses=ingresses,
        replicas=replicas,
        event_delay_s=event_delay,
        profile=profile,
        len_s=length,
        warm_s=warm,
        seed=seed,
    )
    with progress_bar(options.label, total_s=options.len_s) as progress:
        result = run_sites(options, cpu_s=process_time, progress=progress).result
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(result_words(result))


def options_of(**given: object) -> "SitesOptions":
    """The usual options with those changed that are given, None counting as not."""
    from msgspec.structs import replace

    from tokenfleet.sim.sites.run import SitesOptions

    return replace(SitesOptions(), **{name: value for name, value in given.items() if value is not None})
