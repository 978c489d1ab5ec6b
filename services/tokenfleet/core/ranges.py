"""Ranges: the numbers that a policy may hold."""

from typing import Annotated

from msgspec import Meta

# 1e15: TOML has `inf`, and inf - inf is a cost that compares with nothing; products of two such are still numbers.
Positive = Annotated[float, Meta(gt=0.0, le=1e15)]
NonNegative = Annotated[float, Meta(ge=0.0, le=1e15)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
