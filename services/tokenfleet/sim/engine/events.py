"""What goes into a simulated engine and what comes out of it."""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a job ended: at its max_tokens, at its own end, or because its caller left."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine sees it.

    output_tokens is the length the model would generate, >= 1; max_tokens bounds it.
    block_hashes are the chain hashes (u64, distinct) of the prompt's full KV blocks, first block first.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    block_hashes: tuple[int, ...] = ()


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The job left the queue; cached_tokens of its prompt were found in the prefix cache. Again after a preemption."""

    job_id: str
    at_s: float
    cached_tokens: int


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """The job's last prefill chunk is computed; once a job."""

    job_id: str
    at_s: float


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The job is over; exactly once a job. cached_tokens as of its first admission."""

    job_id: str
    at_s: float
    output_tokens: int
    cached_tokens: int
    reason: FinishReason


class Preempted(msgspec.Struct, frozen=True, kw_only=True):
    """The job lost its KV blocks and waits at the head of the queue to be computed again."""

    job_id: str
    at_s: float


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt blocks first_block, first_block + 1, ... of the job became visible in the prefix cache."""

    job_id: str
    at_s: float
    first_block: int
    hashes: tuple[int, ...]
    parent: int | None


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks left the prefix cache. at_s is the end of the last step this advance reached, at or after the removal."""

    at_s: float
    hashes: tuple[int, ...]


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix cache was emptied; told with the first step after it, as vLLM does."""

    at_s: float


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that ended, alike but for the context's growth; seconds is their sum, tokens are those of one step."""

    at_s: float
    steps: int
    seconds: float
    prefill_tokens: int
    decodes: int


Event = Admitted | FirstToken | Finished | Preempted | BlocksStored | BlocksRemoved | Cleared | Stepped


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's exact state and counters since it was made.

    kv_used_blocks are held by running jobs; cached blocks nobody holds count as free.
    prompt_tokens and cached_tokens count at the first token, queried and hit tokens at every admission.
    """

    running: int
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    kv_cached_blocks: int
    prompt_tokens: int
    cached_tokens: int
    queried_tokens: int
    hit_tokens: int
    generation_tokens: int
    iterations: int
    iteration_tokens: int
    preemptions: int
