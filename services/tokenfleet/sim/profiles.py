"""Profiles: how long a step of one engine takes and how much KV memory it has."""

import math
from bisect import bisect_left
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import msgspec

from tokenfleet.core.errors import PolicyError, listed

WATERMARK = 0.01  # share of KV blocks an admission leaves free, as vLLM's block manager does


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of one instance; profiles.toml says what each means and where it comes from."""

    source: str
    prefill_base_s: float
    decode_base_s: float
    floor_points: tuple[tuple[int, float], ...]
    token_s: float
    pair_s: float
    context_s: float
    kv_bytes_per_token: int
    kv_tokens: int
    token_budget: int
    sequences_max: int = 256
    block_size: int = 512

    @property
    def kv_blocks(self) -> int:
        """KV blocks of block_size tokens."""
        return self.kv_tokens // self.block_size

    @property
    def watermark_blocks(self) -> int:
        """Blocks an admission leaves free, so that decodes can grow."""
        return int(self.kv_blocks * WATERMARK)

    def step_s(self, *, prefill_tokens: int, pairs: float, decodes: int, context_tokens: int) -> float:
        """Seconds of one step; the formula of profiles.toml."""
        tokens = prefill_tokens + decodes
        base = self.prefill_base_s if prefill_tokens else self.decode_base_s
        linear = max(self._floor_s(tokens), base + self.token_s * tokens)
        return linear + self.pair_s * pairs + self.context_s * context_tokens

    def sized(self, *, block_size: int, kv_blocks: int | None = None) -> "Profile":
        """This profile in blocks of another size; kv_blocks None keeps its memory."""
        kv_tokens = self.kv_tokens if kv_blocks is None else kv_blocks * block_size
        return msgspec.structs.replace(self, block_size=block_size, kv_tokens=kv_tokens)

    def _floor_s(self, tokens: int) -> float:
        points = self.floor_points
        after = bisect_left(points, (tokens, 0.0))
        if after == 0:
            return points[0][1]
        if after == len(points):
            return points[-1][1]
        (left, left_s), (right, right_s) = points[after - 1], points[after]
        return left_s + (right_s - left_s) * (tokens - left) / (right - left)


@cache
def profiles() -> dict[str, Profile]:
    """All profiles by name, read once from profiles.toml in the package.

    Raises msgspec.ValidationError for an unknown or missing key.
    """
    text = (files("tokenfleet.sim") / "profiles.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, Profile])


def load_profile(name_or_path: str) -> Profile:
    """The profile of that name, or the one in that TOML file: its keys are those of a table of profiles.toml.

    Raises PolicyError, with the list of names, when there is neither; with file and key when the file can't be used.
    """
    known = profiles().get(name_or_path)
    if known is not None:
        return known
    try:
        profile = msgspec.toml.decode(Path(name_or_path).read_bytes(), type=Profile)
    except FileNotFoundError:
        there_is = f"there is: {listed(profiles())}, or the path of a TOML file"
        raise PolicyError(f"no profile {name_or_path!r}: {there_is}") from None
    except (msgspec.DecodeError, RecursionError, OSError) as error:
        raise PolicyError(f"{name_or_path}: {error}; `sim fit` writes such a file") from error
    _check(profile, name_or_path)
    return profile


def profile_text(profile: Profile) -> str:
    """The profile as a file that load_profile reads back."""
    values = msgspec.to_builtins(profile, str_keys=True)
    return "".join(f"{key} = {msgspec.json.encode(value).decode()}\n" for key, value in values.items())


def _check(profile: Profile, source: str) -> None:
    """What the engine takes for granted of its constants. Raises PolicyError."""
    seconds = ("prefill_base_s", "decode_base_s", "token_s", "pair_s", "context_s")
    for name in seconds:
        if not 0.0 <= getattr(profile, name) < math.inf:
            raise PolicyError(f"{source}: {name} = {getattr(profile, name)} is no time; it is 0 or more")
    for name in ("kv_bytes_per_token", "kv_tokens", "token_budget", "sequences_max", "block_size"):
        if getattr(profile, name) < 1:
            raise PolicyError(f"{source}: {name} = {getattr(profile, name)}; it is 1 or more")
    points = profile.floor_points
    if not points or any(not 0.0 < point_s < math.inf for _, point_s in points):
        raise PolicyError(f"{source}: floor_points = {list(points)}; each is [tokens, seconds above 0], at least one")
    if any(after[0] <= before[0] for before, after in pairwise(points)):
        raise PolicyError(f"{source}: floor_points = {list(points)}; their tokens rise")
