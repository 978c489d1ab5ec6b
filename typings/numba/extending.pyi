"""See numba/__init__.pyi."""

from collections.abc import Callable
from typing import Any

def register_jitable(function: Callable[..., Any]) -> Callable[..., Any]: ...
