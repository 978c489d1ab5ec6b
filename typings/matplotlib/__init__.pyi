"""What sim/pictures.py uses of matplotlib, whose own types leave all keyword arguments unknown."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

def rc_context(rc: Mapping[str, object]) -> AbstractContextManager[None]: ...
