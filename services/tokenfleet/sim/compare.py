"""Compare: many routing runs, policy by policy and seed by seed; a cell is one policy on one seed of one scenario."""

from collections.abc import Sequence
from pathlib import Path
from time import process_time

import msgspec
from msgspec import Struct

from tokenfleet.sim.bounds import bounded
from tokenfleet.sim.measure import InstanceLoad, Quantiles, figures_of, quantiles
from tokenfleet.sim.policies import policy_named
from tokenfleet.sim.profiles import Profile, load_profile
from tokenfleet.sim.run import RunOptions, rows_of, run, trace_of, window
from tokenfleet.sim.runs import Runs, named_by
from tokenfleet.sim.served import Served
from tokenfleet.sim.watch import Reuse, Watch

BOUNDS = ("bound: pooled cache", "bound: endless cache")


class Job(Struct, frozen=True, kw_only=True):
    """One run to make; `options` name policy and seed."""

    scenario: str
    options: RunOptions


class Requests(Struct, frozen=True, kw_only=True):
    """All requests of one run as columns, by arrival; -1 as instance and None as seconds: it never got there.

    Of a bound, no request has an instance. Token columns count the prompt, what the engine found cached, and what KV
    events said was cached at placement: on the instance that had most, and on the one that it went to.
    """

    at_s: list[float]
    instance: list[int]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    available_tokens: list[int]
    captured_tokens: list[int]
    ttft_s: list[float | None]
    tpot_s: list[float | None]
    e2e_s: list[float | None]


class Cell(Struct, frozen=True, kw_only=True):
    """One policy on one seed: the figures of those that arrived in [`warm_s`, `len_s`), and all requests.

    `lost` were rejected or never finished; `rho` is the offered load without any cache (measure.Result), 0 for a bound.
    """

    scenario: str
    policy: str
    seed: int
    warm_s: float
    len_s: float
    instances: int
    rho: float
    measured: int
    lost: int
    ttft_s: Quantiles
    tpot_s: Quantiles
    e2e_s: Quantiles
    hit_ratio: float
    throughput_tokens_per_s: float
    loads: tuple[InstanceLoad, ...]
    requests: Requests

    @property
    def label(self) -> str:
        return f"{self.scenario}, {self.policy}, seed {self.seed}"


def cell_of(job: Job) -> Cell:
    """Make one run. Raises PolicyError as run does."""
    return _bound(job) if job.options.policy in BOUNDS else _routed(job)


def routing_runs(folder: Path | None) -> Runs[Job, Cell]:
    """Raises SetupError if the folder can't be made."""
    return Runs(folder, kind=Cell, make=cell_of, name=file_name)


def file_name(job: Job) -> str:
    """Readable in front, then what tells it from all others."""
    options = msgspec.structs.replace(job.options, make_router=None)
    words = f"{job.scenario}.{options.policy}"
    return named_by(words, options.seed, msgspec.json.encode(options), _trace_bytes(options.trace))


def _trace_bytes(trace: str) -> bytes:
    """A trace of the user's own may change under its name; the shipped ones are part of the code."""
    path = Path(trace)
    return path.read_bytes() if path.is_file() else b""


def _routed(job: Job) -> Cell:
    watch = Watch()
    options = job.options
    made = run(
        msgspec.structs.replace(options, make_router=watch.over(policy_named(options.policy))), cpu_s=process_time
    )
    result = made.result
    return Cell(
        scenario=job.scenario,
        policy=options.policy,
        seed=options.seed,
        warm_s=result.warm_s,
        len_s=result.len_s,
        instances=options.instances,
        rho=result.rho,
        measured=result.measured,
        lost=result.unfinished + result.rejected,
        ttft_s=result.ttft_s,
        tpot_s=result.tpot_s,
        e2e_s=result.e2e_s,
        hit_ratio=result.hit_ratio,
        throughput_tokens_per_s=result.throughput_tokens_per_s,
        loads=result.loads,
        requests=_columns(made.served, watch),
    )


def _columns(served: Sequence[Served], watch: Watch) -> Requests:
    figures = [figures_of(each) for each in served]
    nothing = Reuse(available_tokens=0, captured_tokens=0)
    reuse = [watch.reuse.get(each.id, nothing) for each in served]
    return Requests(
        at_s=[each.at_s for each in figures],
        instance=[each.instance for each in figures],
        prompt_tokens=[each.prompt_tokens for each in figures],
        cached_tokens=[each.cached_tokens for each in figures],
        available_tokens=[each.available_tokens for each in reuse],
        captured_tokens=[each.captured_tokens for each in reuse],
        ttft_s=[each.ttft_s for each in figures],
        tpot_s=[each.tpot_s for each in figures],
        e2e_s=[each.e2e_s for each in figures],
    )


def _bound(job: Job) -> Cell:
    options = job.options
    len_s, warm_s = window(options)
    rows = rows_of(trace_of(options), options, len_s=len_s, warm_s=warm_s)
    profile = _sized(options, block_tokens=rows[0].block_tokens)
    pooled = options.policy == BOUNDS[0]
    alone = bounded(rows, profile, blocks_max=profile.kv_blocks * options.instances if pooled else None)
    measured = [(row, each) for row, each in zip(rows, alone, strict=True) if row.at_s >= warm_s]
    cached = [each.cached_tokens for each in alone]
    prompt_tokens = sum(row.prompt_tokens for row, _ in measured)
    return Cell(
        scenario=job.scenario,
        policy=options.policy,
        seed=options.seed,
        warm_s=warm_s,
        len_s=len_s,
        instances=options.instances,
        rho=0.0,
        measured=len(measured),
        lost=0,
        ttft_s=quantiles([each.ttft_s for _, each in measured]),
        tpot_s=quantiles([each.tpot_s for _, each in measured if each.tpot_s is not None]),
        e2e_s=quantiles([each.e2e_s for _, each in measured]),
        hit_ratio=sum(each.cached_tokens for _, each in measured) / prompt_tokens if prompt_tokens else 0.0,
        throughput_tokens_per_s=sum(row.output_tokens for row, _ in measured) / (len_s - warm_s),
        loads=(),
        requests=Requests(
            at_s=[row.at_s for row in rows],
            instance=[-1] * len(rows),
            prompt_tokens=[row.prompt_tokens for row in rows],
            cached_tokens=cached,
            available_tokens=cached,
            captured_tokens=cached,
            ttft_s=[each.ttft_s for each in alone],
            tpot_s=[each.tpot_s for each in alone],
            e2e_s=[each.e2e_s for each in alone],
        ),
    )


def _sized(options: RunOptions, *, block_tokens: int) -> Profile:
    return load_profile(options.profile).sized(block_size=block_tokens, kv_blocks=options.kv_blocks)
