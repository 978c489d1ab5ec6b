"""Tokens of a simulated engine: text to token ids, token ids to block hashes, output tokens to text."""

from array import array

import xxhash

CHARACTERS_A_TOKEN = 4
VOCABULARY = 128_000  # ids fit in u32, as a Llama 3 vocabulary does
OUTPUT_TOKENS_MAX = 400  # of a request that names no length: 1..400, mean 200
_WORDS = "".join(f" {a}{b}{c}" for a in "bdfgklmnprstvz" for b in "aeiou" for c in "lmnrstx")


def tokenize(text: str) -> list[int]:
    """One token id per 4 characters, a hash of them: equal prefixes give equal ids."""
    pieces = (text[at : at + CHARACTERS_A_TOKEN] for at in range(0, len(text), CHARACTERS_A_TOKEN))
    return [xxhash.xxh32_intdigest(piece.encode("utf-8", "surrogatepass")) % VOCABULARY for piece in pieces]


def block_hashes(token_ids: list[int], block_size: int, *, root: int, salt: str = "") -> tuple[int, ...]:
    """Chain hashes (u64) of the full blocks; opaque to others: root differs between instances, salt between tenants."""
    packed = array("I", token_ids).tobytes()
    block_bytes = block_size * array("I").itemsize
    parent = xxhash.xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"), seed=root)
    hashes: list[int] = []
    for at in range(0, len(packed) - block_bytes + 1, block_bytes):
        parent = xxhash.xxh3_64_intdigest(packed[at : at + block_bytes], seed=parent)
        hashes.append(parent)
    return tuple(hashes)


def natural_output_tokens(token_ids: list[int]) -> int:
    """The length the model would give this prompt, 1..OUTPUT_TOKENS_MAX; the same prompt gives the same."""
    return 1 + xxhash.xxh3_64_intdigest(array("I", token_ids).tobytes()) % OUTPUT_TOKENS_MAX


def output_text(start: int, tokens: int) -> str:
    """Text of output tokens start..start+tokens: 4 characters each, so that it tokenizes to as many."""
    begin = start * CHARACTERS_A_TOKEN % len(_WORDS)
    wanted = tokens * CHARACTERS_A_TOKEN
    text = _WORDS[begin : begin + wanted]
    while len(text) < wanted:
        text += _WORDS[: wanted - len(text)]
    return text
