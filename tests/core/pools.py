"""Pools: views of instances in one line, for tests of routing."""

from importlib.resources import files
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from tokenfleet.core.accounts import PoolCalibration
from tokenfleet.core.columns import columns_of
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Policy, TokenPilotPolicy, parse_policy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import prior_coefficients
from tokenfleet.core.tokenpilot.choose import choose
from tokenfleet.core.tokenpilot.routing import Routing
from tokenfleet.core.view import InstanceView

SHIPPED = parse_policy((files("tokenfleet.core") / "default_policy.toml").read_text(), source="default")
MODELS = {  # what these tests measure against: the large one is Llama-3.1-70B on TP8 H100 (L70 in sim/profiles.toml)
    "small-chat": replace(
        SHIPPED.models["small-chat"],
        budget_tokens=4096,
        c0_s=0.006,
        w_min_s=0.002,
        a_s=3.2e-5,
        b_s=1.0e-10,
        d_s=4.0e-9,
    ),
    "large-chat": replace(
        SHIPPED.models["large-chat"],
        budget_tokens=4096,
        c0_s=0.0075,
        w_min_s=0.0026,
        a_s=3.78e-5,
        b_s=4.94e-10,
        d_s=1.3e-8,
    ),
}
POLICY = replace(SHIPPED, models=MODELS)


def instance(name: str, **facts: Any) -> InstanceView:
    """An idle instance of known size, heard just now."""
    known: dict[str, Any] = {
        "address": f"http://{name}",
        "model": "large-chat",
        "model_digest": "large-chat@2026-09",
        "kv_total_tokens": 1_000_000.0,
    }
    return InstanceView(instance=name, **(known | facts))


def pool(*instances: InstanceView, **calibration: Any) -> PoolView:
    model = POLICY.model("large-chat")
    known: dict[str, Any] = {"coefficients": prior_coefficients(model, factor=1.0)}
    return PoolView(
        site="b",
        pool="large-chat@b",
        model="large-chat",
        columns=columns_of(instances),
        calibration=PoolCalibration(pool="large-chat@b", model="large-chat", **(known | calibration)),
        budget_tokens=model.budget_tokens,
        seats_max=model.seats_max,
        age_s=0.1,
    )


def request(prompt_tokens: int = 4096, *, first_key: int | None = None, **facts: Any) -> Request:
    keys = b"" if first_key is None else np.array([first_key], dtype="<u8").tobytes()
    known: dict[str, Any] = {"id": "r-1", "model": "large-chat", "tenant": "acme", "origin": "b"}
    return Request(prompt_tokens=prompt_tokens, block_keys=keys, **(known | facts))


def weights(**changed: Any) -> Policy:
    """The default policy with other weights of TokenPilot."""
    return replace(POLICY, tokenpilot=TokenPilotPolicy(**changed))


def route(
    view: PoolView, asked: Request | None = None, *, policy: Policy = POLICY, seed: int = 0, **options: Any
) -> Routing:
    known: dict[str, Any] = {"request_class": "chat", "output_q50": 256.0, "output_q90": 640.0}
    return choose(asked or request(), view, policy, rng=Random(seed), **(known | options))
