"""Fit: a profile's constants from the measured times of requests.

Linear least squares on what each interval's steps hold (sim/fit_steps.py), a few times over, because which steps there
were depends a little on how long they take. A decode step is not split into its base, floor and tokens, which no
measurement tells apart: it is measured whole, as floor_points by decodes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np
from msgspec import Struct

from tokenfleet.core.errors import PolicyError
from tokenfleet.core.trace_line import TraceLine
from tokenfleet.sim.fit_steps import Equation, Floats, Measured, equations_of
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.traces.read import lines_of, read_trace

ROUNDS = 5
REQUESTS_MIN = 50
KNOTS = (1, 8, 16, 32, 64, 96, 128, 192, 256)  # decodes at which a decode step is measured
KNOT_SHARE_MIN = 0.03  # of the decodes' moments are near a knot, or it is not one
RELATIVE_NOISE = 0.02
OUTLIER = 5.0  # times the usual deviation: a wait for KV room, a preemption, a request nobody recorded
PRIOR = 3.0  # a base's value may be off by so many times itself
TINY_S = 1e-12  # where the base has none
NOISE_MIN = 0.05  # of RELATIVE_NOISE: no clock is better than that
DEVIATION_MAX = 0.15  # of the value: beyond, the data doesn't identify it

STEP, TOKEN, PAIR, CONTEXT = "prefill_base_s", "token_s", "pair_s", "context_s"


class Coefficient(Struct, frozen=True, kw_only=True):
    """One constant: its value, its standard deviation, and whether the data told it; else it is the base profile's."""

    name: str
    value: float
    deviation: float
    identified: bool


class Fitted(Struct, frozen=True, kw_only=True):
    """The profile, and how good it is: `prefill_error`, `decode_error` are median relative errors of times it explains.

    `requests` were used; `skipped` had no times, or not whether their prompt was cached.
    """

    profile: Profile
    coefficients: tuple[Coefficient, ...]
    requests: int
    skipped: int
    prefill_error: float
    decode_error: float


def read_measured(path: str, *, skip_bad: bool = False) -> tuple[list[list[Measured]], int]:
    """The measured requests of a trace in TokenFleet's own format, by instance, and how many rows had no times.

    Raises PolicyError as read_trace does, for a trace of another format and for one with too few measured requests.
    """
    trace = read_trace(path, skip_bad=skip_bad)
    lines, decoder = lines_of(path), msgspec.json.Decoder(TraceLine)
    engines: dict[str, list[Measured]] = defaultdict(list)
    skipped = 0
    for row in trace.rows:
        try:
            line = decoder.decode(lines[row.line - 1])
        except msgspec.DecodeError:
            raise PolicyError(
                f"{path}: holds no times; fit reads TokenFleet JSONL, which `sim export` writes"
            ) from None
        measured = _measured(line)
        if measured is None:
            skipped += 1
        else:
            engines[line.instance].append(measured)
    found = len(trace.rows) - skipped
    if found < REQUESTS_MIN:
        raise PolicyError(
            f"{path}: {found} of {len(trace.rows)} rows have ttft_s, tpot_s and cached_tokens; "
            f"a fit takes {REQUESTS_MIN}"
        )
    return list(engines.values()), skipped


def _measured(line: TraceLine) -> Measured | None:
    if line.ttft_s is None or line.cached_tokens is None or line.ttft_s <= 0.0:
        return None
    if line.output_tokens > 1 and (line.tpot_s is None or line.tpot_s <= 0.0):
        return None
    first_token_s = line.at_s + line.ttft_s
    return Measured(
        arrived_s=line.at_s,
        first_token_s=first_token_s,
        ended_s=first_token_s + (line.output_tokens - 1) * (line.tpot_s or 0.0),
        prompt_tokens=line.prompt_tokens,
        cached_tokens=min(max(line.cached_tokens, 0), line.prompt_tokens - 1),
        output_tokens=line.output_tokens,
    )


def fit(engines: Sequence[Sequence[Measured]], base: Profile, *, source: str, skipped: int = 0) -> Fitted:
    """The profile of these engines, alike all of them. Memory, token budget and what isn't identified are `base`'s."""
    profile, coefficients = base, ()
    equations: list[Equation] = []
    for _ in range(ROUNDS):
        equations = [equation for engine in engines for equation in equations_of(engine, profile)]
        profile, coefficients = _solved(equations, profile, base, source)
    errors = {
        of_prefill: [abs(_seconds(e, profile) / e.seconds - 1.0) for e in equations if e.of_prefill is of_prefill]
        for of_prefill in (True, False)
    }
    return Fitted(
        profile=profile,
        coefficients=coefficients,
        requests=sum(map(len, engines)),
        skipped=skipped,
        prefill_error=median(errors[True]) if errors[True] else math.nan,
        decode_error=median(errors[False]) if errors[False] else math.nan,
    )


def _solved(
    equations: Sequence[Equation], now: Profile, base: Profile, source: str
) -> tuple[Profile, tuple[Coefficient, ...]]:
    """Weighted least squares without outliers; what stays uncertain or turns negative is taken from `base`."""
    knots = _knots(equations)
    names = [STEP, TOKEN, PAIR, CONTEXT, *(f"decode step at {knot}" for knot in knots)]
    known = np.array(
        [base.prefill_base_s, base.token_s, base.pair_s, base.context_s, *(_decode_s(base, k) for k in knots)]
    )
    rows = np.array([_row(equation, knots) for equation in equations])
    seconds = np.array([equation.seconds for equation in equations])
    weights = 1.0 / np.hypot(RELATIVE_NOISE * seconds, [equation.noise_s for equation in equations])
    off = (seconds - np.array([_seconds(equation, now) for equation in equations])) * weights
    kept = np.abs(off - np.median(off)) <= OUTLIER * np.median(np.abs(off - np.median(off))) + 1e-9
    rows, seconds = (rows * weights[:, None])[kept], (seconds * weights)[kept]
    free = list(range(len(names)))
    values, deviations = known.copy(), np.full(len(names), math.inf)
    while free:
        held = np.setdiff1d(np.arange(len(names)), free)
        values[free], deviations[free] = _least_squares(
            rows[:, free], seconds - rows[:, held] @ known[held], known[free]
        )
        doubt = [deviations[i] / values[i] if values[i] > 0.0 else math.inf for i in free]
        if max(doubt) <= DEVIATION_MAX:
            break
        worst = free.pop(doubt.index(max(doubt)))
        values[worst] = known[worst]
    told = tuple(
        Coefficient(name=name, value=float(values[i]), deviation=float(deviations[i]), identified=i in free)
        for i, name in enumerate(names)
    )
    step, token, pair, context, *decode = (float(value) for value in values)
    profile = msgspec.structs.replace(
        base,
        source=source,
        prefill_base_s=step,
        decode_base_s=0.0,
        token_s=token,
        pair_s=pair,
        context_s=context,
        floor_points=_beyond(list(zip(knots, decode, strict=True)), step, token, base.sequences_max),
    )
    return profile, told


def _beyond(
    points: list[tuple[int, float]], step_s: float, token_s: float, decodes_max: int
) -> tuple[tuple[int, float], ...]:
    """The points, and what is supposed of larger batches: as long as the last, then as a prefill step of as many.

    Never longer than that: a floor above a prefill step would be taken for its cause.
    """
    last, last_s = points[-1]
    level = math.ceil((last_s - step_s) / token_s) if token_s > 0.0 else decodes_max
    if last < level < decodes_max:
        points.append((level, last_s))
    if last < decodes_max:
        points.append((decodes_max, max(last_s, step_s + token_s * decodes_max)))
    return tuple(points)


def _least_squares(rows: Floats, seconds: Floats, known: Floats) -> tuple[Floats, Floats]:
    """The solution and its standard deviations.

    Rows are in units of their own noise. A known value that may be anything up to PRIOR times itself stands for each
    column, so that those which the rows can't tell apart keep deviations as large as that.
    """
    scale = np.maximum(known, TINY_S)
    even = rows * scale
    first = np.linalg.pinv(even) @ seconds
    noise = max(NOISE_MIN, math.sqrt(float(np.square(seconds - even @ first).mean())))
    inverse = np.linalg.inv(even.T @ even + np.eye(len(scale)) * (noise / PRIOR) ** 2)
    values = inverse @ (even.T @ seconds + (noise / PRIOR) ** 2)
    return values * scale, np.sqrt(np.diag(inverse)) * noise * scale


def _knots(equations: Sequence[Equation]) -> tuple[int, ...]:
    """The KNOTS that the decodes come near, each closer to it than to the next."""
    steps = np.zeros(len(KNOTS))
    for equation in equations:
        for decodes, share in equation.decoding:
            if not equation.of_prefill:
                steps[np.abs(np.array(KNOTS) - decodes).argmin()] += share
    near = [knot for knot, weight in zip(KNOTS, steps, strict=True) if weight > KNOT_SHARE_MIN * steps.sum()]
    return tuple(near) or KNOTS[:1]


def _row(equation: Equation, knots: tuple[int, ...]) -> list[float]:
    """What the equation holds of each coefficient; a decode step between two knots is of both, linearly."""
    at_knots = np.zeros(len(knots))
    for decodes, share in equation.decoding:
        at_knots += share * np.array([np.interp(decodes, knots, unit) for unit in np.eye(len(knots))])
    return [equation.prefill_steps, equation.tokens, equation.pairs, equation.context_tokens, *at_knots.tolist()]


def _decode_s(profile: Profile, decodes: float) -> float:
    """Seconds of a step of that many decodes, without their context."""
    return profile.step_s(prefill_tokens=0, pairs=0.0, decodes=round(decodes), context_tokens=0)


def _seconds(equation: Equation, profile: Profile) -> float:
    """What the equation's steps take by the profile."""
    return (
        profile.prefill_base_s * equation.prefill_steps
        + profile.token_s * equation.tokens
        + profile.pair_s * equation.pairs
        + profile.context_s * equation.context_tokens
        + sum(share * _decode_s(profile, decodes) for decodes, share in equation.decoding)
    )
