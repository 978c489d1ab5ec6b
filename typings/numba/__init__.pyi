"""What core/compiled.py uses of numba, which ships no types."""

from collections.abc import Callable
from typing import Any

def njit(*, cache: bool = False, error_model: str = "python") -> Callable[[Callable[..., Any]], Any]: ...
