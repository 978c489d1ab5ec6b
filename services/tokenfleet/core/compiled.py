"""Compiled: computations over large pools in two forms that give the same bits, as whole arrays and as one loop.

Arrays serve small pools, where a compiler isn't worth its second and 100 MB. Large pools are served by the loop once it
is compiled, if numba is installed (the extra `fast`).
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

COMPILED_FROM = 256  # instances of a pool; from about here on a loop takes less than the many calls for arrays

P = ParamSpec("P")
R = TypeVar("R")


class Twin(Generic[P, R]):
    """One computation in its two forms."""

    def __init__(
        self,
        arrays: Callable[P, R],
        loop: Callable[P, R],
        *,
        sample: Callable[[], tuple[Any, ...]],
        formulas: tuple[Callable[..., Any], ...] = (),
    ) -> None:
        """`sample` makes arguments of the types that the loop is compiled for, `formulas` are what it calls."""
        self.arrays = arrays
        self.loop = loop
        self._sample = sample
        self._formulas = formulas
        self._compiled: Callable[P, R] | None = None
        _twins.append(self)

    def of(self, instances: int) -> Callable[P, R]:
        """The form for a pool of so many."""
        return self.arrays if self._compiled is None or instances < COMPILED_FROM else self._compiled

    def compile(self, njit: Callable[..., Any], jitable: Callable[..., Any]) -> None:
        """By numba's decorators, once; from the cache of an earlier process where there is one."""
        if self._compiled is not None:
            return
        for formula in self._formulas:
            jitable(formula)
        try:
            compiled = njit(cache=True, error_model="numpy")(self.loop)
        except RuntimeError:  # no folder to keep it in
            compiled = njit(error_model="numpy")(self.loop)
        compiled(*self._sample())
        compiled.disable_compile()  # other types are a fault, and would cost one decision a second
        self._compiled = compiled


_twins: list[Twin[..., Any]] = []


def is_available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def load() -> bool:
    """Compile the loops of all modules imported so far; False without numba.

    It takes seconds the first time, later a second: before the first decision, or in a thread while the arrays serve.
    """
    try:
        from numba import njit
        from numba.extending import register_jitable
    except ImportError:  # not installed, or not for this NumPy
        return False
    for twin in _twins:
        twin.compile(njit, register_jitable)
    return True
