"""Settled: what a step of a request changes in the ledgers of a site's replicas."""

from tokenfleet.core.records import TERMINAL_KINDS, Entry, OutcomeEvent, PlacementEvent


def change_of(event: OutcomeEvent, entry: Entry | None, instance: str) -> PlacementEvent | None:
    """What the other replicas are to hear of an outcome event; None: nothing. `entry` is its placement, if known."""
    if not event.decision:
        return None
    if event.kind in TERMINAL_KINDS:
        return PlacementEvent(
            kind="ended",
            decision=event.decision,
            request=event.request,
            attempt=event.attempt,
            instance=instance or "unknown",
        )
    if event.kind in ("first_token", "progress") and entry is not None:
        return PlacementEvent(
            kind="first_token" if event.kind == "first_token" else "progress",
            decision=entry.decision,
            request=entry.request,
            attempt=entry.attempt,
            instance=entry.instance,
            entry=entry,
        )
    return None
