"""Real engines: the fleet that a discovery file of real engines makes of the shipped one."""

from pathlib import Path

from msgspec.structs import replace

from tokenfleet.adapters.engines.discovery import parse_discovery
from tokenfleet.core.errors import PolicyError
from tokenfleet.local.fleet import EngineGroup, Fleet


def real_fleet(fleet: Fleet, path: Path) -> Fleet:
    """The sites of `fleet` with the file's engines instead of simulated ones, and a load that asks their models only.

    Raises PolicyError when the file can't be used or names a site that the fleet does not have.
    """
    try:
        engines = parse_discovery(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: {error}") from error
    if not engines:
        raise PolicyError(f"{path}: it lists no engine")
    if unknown := sorted({engine.site for engine in engines} - set(fleet.sites)):
        raise PolicyError(f"{path}: no site {unknown[0]!r} in the fleet; there is: {', '.join(sorted(fleet.sites))}")
    models = {engine.model for engine in engines}
    shares = {model: fleet.load.models.get(model, 0.0) for model in sorted(models)}
    if not any(shares.values()):
        shares = dict.fromkeys(shares, 1.0)
    sites = {
        name: replace(
            site,
            engines=tuple(
                EngineGroup(name=f"real-{number}", model=engine.model, digest=engine.model_digest, profile="")
                for number, engine in enumerate(engines)
                if engine.site == name
            ),
        )
        for name, site in fleet.sites.items()
    }
    return replace(fleet, sites=sites, load=replace(fleet.load, models=shares))
