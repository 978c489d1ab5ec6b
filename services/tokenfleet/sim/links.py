"""Links: when, and whether, a record that is sent at one moment arrives."""

from random import Random

from msgspec import Struct


class LinkTerms(Struct, frozen=True, kw_only=True):
    """What a link does to records, in seconds and shares of them.

    Each takes `delay_s` + U(0, `jitter_s`) and arrives in the order of sending, as in a partition of a log. A share
    `loss` never arrives; a share `reorder` falls behind by U(0, `late_s`) and is overtaken; a share `duplicate` comes
    again within `late_s`.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    late_s: float = 1.0


class Link:
    """One way from a sender to a receiver, with its own chance."""

    def __init__(self, terms: LinkTerms, rng: Random) -> None:
        self._terms = terms
        self._rng = rng
        self._last_s = 0.0
        self._constant = not (terms.jitter_s or terms.loss or terms.duplicate or terms.reorder)

    def arrivals_s(self, now_s: float) -> tuple[float, ...]:
        """When a record sent now arrives: once, twice, or not at all."""
        terms, rng = self._terms, self._rng
        if self._constant:
            return (now_s + terms.delay_s,)
        if rng.random() < terms.loss:
            return ()
        at_s = now_s + terms.delay_s + rng.uniform(0.0, terms.jitter_s)
        if rng.random() < terms.reorder:
            at_s += rng.uniform(0.0, terms.late_s)
        else:
            at_s = self._last_s = max(at_s, self._last_s)
        if rng.random() < terms.duplicate:
            return at_s, at_s + rng.uniform(0.0, terms.late_s)
        return (at_s,)


class Links(Struct, frozen=True, kw_only=True):
    """The links to every gateway, by kind of record.

    Telemetry is the scrape's own way; KV events batch in the engine and in the agent; placements and feedback travel
    over a broker. Outcomes are of a gateway's own requests: it sees them in the streams that pass through it.
    """

    telemetry: LinkTerms = LinkTerms(delay_s=0.01)
    kv: LinkTerms = LinkTerms(delay_s=0.1)
    placements: LinkTerms = LinkTerms(delay_s=0.02)
    feedback: LinkTerms = LinkTerms(delay_s=0.1)
    outcomes: LinkTerms = LinkTerms()
