"""Scenarios: the runs that policies are judged by, by name."""

from collections.abc import Mapping

from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.run import RunOptions
from tokenfleet.sim.traces.read import SHIPPED

NEVER_S = 1e6  # later than any run ends

SCENARIOS: dict[str, RunOptions] = {
    # Much reuse, Poisson arrivals.
    "reuse": RunOptions(trace="synthetic", copies=2.0, instances=8),
    "reuse-dense": RunOptions(trace="synthetic", copies=2.5, instances=8),
    "reuse-over": RunOptions(trace="synthetic", copies=3.0, instances=8, len_s=600.0),
    # Chat with long tails; reuse after minutes.
    "chat": RunOptions(trace="conversation", copies=3.0, instances=8),
    "chat-dense": RunOptions(trace="conversation", copies=3.6, instances=8),
    "chat-16": RunOptions(trace="conversation", copies=6.0, instances=16),
    "chat-64": RunOptions(trace="conversation", copies=24.0, instances=64),
    # Engines scraped five times as often: the default of llm-d's endpoint picker.
    "reuse-scraped-50ms": RunOptions(trace="synthetic", copies=2.0, instances=8, telemetry_period_s=0.05),
    "chat-scraped-50ms": RunOptions(trace="conversation", copies=3.0, instances=8, telemetry_period_s=0.05),
    # Caches five times as large: a host tier whose loads cost nothing.
    "reuse-large-cache": RunOptions(trace="synthetic", copies=2.0, instances=8, kv_blocks=12_000),
    "chat-large-cache": RunOptions(trace="conversation", copies=3.0, instances=8, kv_blocks=12_000),
    # TokenPilot starts from coefficients that are wrong and learns them.
    "learned-half": RunOptions(trace="synthetic", copies=2.0, instances=8, prior_factor=0.5, learning=True),
    "learned-double": RunOptions(trace="synthetic", copies=2.0, instances=8, prior_factor=2.0, learning=True),
    # Several gateways that hear of one another.
    "gateways": RunOptions(trace="synthetic", copies=2.0, instances=8, gateways=4, event_delay_s=0.02),
    "gateways-late": RunOptions(trace="synthetic", copies=2.0, instances=8, gateways=4, event_delay_s=0.25),
    "gateways-blind": RunOptions(trace="synthetic", copies=2.0, instances=8, gateways=4, event_delay_s=NEVER_S),
    "gateways-alone": RunOptions(
        trace="synthetic", copies=2.0, instances=8, gateways=4, event_delay_s=NEVER_S, engine_counts=False
    ),
    # A mixture of experts, at ease and with more work than it can do.
    "moe": RunOptions(trace="conversation", copies=1.5, instances=8, profile="DSV3-DP", len_s=600.0, warm_s=250.0),
    "overload": RunOptions(trace="conversation", copies=2.4, instances=8, profile="DSV3-DP", len_s=500.0, warm_s=200.0),
    "overload-tp": RunOptions(trace="conversation", copies=2.4, instances=8, profile="DSV3", len_s=500.0, warm_s=200.0),
}


def options_of(scenario: str, changes: Mapping[str, object]) -> RunOptions:
    """The scenario's options, or the usual ones for an empty name, with fields changed. Raises PolicyError.

    Usual is one copy of a trace of the user's own: what its fleet had to serve.
    """
    base = SCENARIOS.get(scenario) if scenario else RunOptions()
    if base is None:
        raise PolicyError(f"no scenario {scenario!r}; there is: {listed(SCENARIOS)}")
    own = not scenario and changes.get("trace", base.trace) not in SHIPPED
    return replace(base, **({"copies": 1.0} if own else {}) | dict(changes))
