"""Traces: what each format's lines become, what is refused before a run, and how a trace is made denser."""

import gzip
import lzma
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.core.errors import PolicyError
from tokenfleet.core.trace_line import TraceLine
from tokenfleet.sim.profiles import Profile, load_profile, profile_text, profiles
from tokenfleet.sim.traces.azure import parse_azure
from tokenfleet.sim.traces.bailian import parse_bailian
from tokenfleet.sim.traces.burstgpt import parse_burstgpt
from tokenfleet.sim.traces.fits import check_fits
from tokenfleet.sim.traces.lines import BadLines
from tokenfleet.sim.traces.mooncake import parse_mooncake
from tokenfleet.sim.traces.own import parse_own
from tokenfleet.sim.traces.read import read_trace
from tokenfleet.sim.traces.rows import TraceRow
from tokenfleet.sim.traces.scale import scaled

MOONCAKE = """\
{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1500, "output_length": 6, "hash_ids": [0, 1, 2]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 23:59:59.9999999,374,44\r
2023-11-17 00:00:00.0000002,396,109\r
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
_CHAT = '"input_length": {0}, "output_length": {1}, "type": "{2}", "turn": {3}, "hash_ids": {4}}}\n'
BAILIAN = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, '
    + _CHAT.format(40, 132, "text", 1, [11, 12, 13])
    + '{"chat_id": 8, "parent_chat_id": 7, "timestamp": 70.5, '
    + _CHAT.format(64, 20, "search", 2, [11, 12, 14, 11])
    + '{"chat_id": 9, "parent_chat_id": 8, "timestamp": 80.5, '
    + _CHAT.format(16, 20, "search", 3, [12])
)
OWN = (
    '{"at_s": 0.0, "prompt_tokens": 40, "output_tokens": 7, "id": "r1", "ids": [5, 6], "block_tokens": 16, '
    '"session": "c", "tenant": "acme", "class": "chat"}\n'
    '{"at_s": 1.5, "prompt_tokens": 16, "output_tokens": 7, "id": "r2", "keys": "BQAAAAAAAAA=", "block_tokens": 16}\n'
)
TEXTS = {"Mooncake": MOONCAKE, "Azure": AZURE, "BurstGPT": BURSTGPT, "Bailian": BAILIAN, "own": OWN}


def written(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(folder: Path, text: str | bytes) -> str:
    """What read_trace says of a file that can't be used."""
    with pytest.raises(PolicyError) as refused:
        read_trace(written(folder, text))
    return str(refused.value)


def own(at_s: float = 0.0, prompt: int = 100, output: int = 10, **more: object) -> str:
    return msgspec.json.encode({"at_s": at_s, "prompt_tokens": prompt, "output_tokens": output, **more}).decode()


# Formats


def test_mooncake_times_are_milliseconds_and_its_blocks_have_512_tokens() -> None:
    first, second = parse_mooncake(MOONCAKE.splitlines(), source="m")
    assert first == TraceRow(at_s=0.0, prompt_tokens=1000, output_tokens=5, hash_ids=(0, 1), line=1)
    assert (second.at_s, second.block_tokens, second.line) == (3.0, 512, 2)


def test_azure_times_keep_their_hundred_nanoseconds_across_midnight() -> None:
    first, second = parse_azure(AZURE.splitlines(), source="a")
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.hash_ids, first.line) == (0.0, 374, 44, (), 2)
    assert second.at_s == pytest.approx(3e-7, abs=1e-12)


def test_azure_times_may_name_their_zone() -> None:
    text = AZURE.replace("00:00:00.0000002", "01:00:00.5+01:00").replace("9999999,", "5+00:00,")
    assert [row.at_s for row in parse_azure(text.splitlines(), source="a")] == [0.0, 1.0]


def test_burstgpt_columns_are_found_by_name() -> None:
    rows = parse_burstgpt(BURSTGPT.splitlines(), source="b")
    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in rows] == [(5.0, 472, 18), (45.0, 1087, 230)]


def test_bailian_turns_belong_to_the_chat_that_began_and_a_block_is_taken_with_all_before_it() -> None:
    first, second, third = parse_bailian(BAILIAN.splitlines(), source="q")
    assert {row.session for row in (first, second, third)} == {"chat-7"}
    assert [row.request_class for row in (first, second)] == ["text", "search"]
    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert second.hash_ids[3] != second.hash_ids[0], "the same tokens after another prefix are another block"
    assert third.hash_ids[0] not in first.hash_ids
    assert first.block_tokens == 16


def test_own_format_names_blocks_by_ids_or_by_packed_keys() -> None:
    first, second = parse_own(OWN.splitlines(), source="o")
    assert first == TraceRow(
        at_s=0.0,
        prompt_tokens=40,
        output_tokens=7,
        hash_ids=(5, 6),
        block_tokens=16,
        session="c",
        tenant="acme",
        request_class="chat",
        line=1,
    )
    assert second.hash_ids == (5,)


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("pack", [bytes, lzma.compress, gzip.compress])
def test_a_file_is_read_by_its_content_whatever_its_name_and_packing(
    form: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    trace = read_trace(written(tmp_path, pack(b"\xef\xbb\xbf" + TEXTS[form].encode())))
    assert len(trace.rows) == TEXTS[form].count("\n") - TEXTS[form].startswith("T")
    assert trace.rows[0].at_s == 0.0, "a trace begins with its first request"
    assert trace.quantum_s == (1.0 if form == "BurstGPT" else 0.0)


def test_the_shipped_traces_are_those_of_their_publication() -> None:
    conversation, synthetic = read_trace("conversation"), read_trace("synthetic")
    assert (len(conversation.rows), len(synthetic.rows)) == (12_031, 3_993)
    assert (conversation.quantum_s, synthetic.quantum_s) == (3.0, 0.0)
    assert (conversation.shared_first_block, synthetic.shared_first_block) == (True, False)
    for trace, hit in ((conversation, 0.366), (synthetic, 0.640)):
        blocks = [i for row in trace.rows for i in row.hash_ids]
        assert 1 - len(set(blocks)) / len(blocks) == pytest.approx(hit, abs=0.001), "the hits of an endless cache"


# Bad input


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"at_s": 1', "Input data was truncated"),
        ("{}", "missing required field `at_s`"),
        ('{"at_s": 1, "prompt_tokens": 5}', "missing required field `output_tokens`"),
        ('{"at_s": NaN, "prompt_tokens": 5, "output_tokens": 1}', "malformed"),
        ('{"at_s": 1e999, "prompt_tokens": 5, "output_tokens": 1}', "out of range"),
        (own(1.0, prompt=0, block_tokens=16), "0 prompt tokens; a request has 1 to 2147483647"),
        (own(1.0, output=0, block_tokens=16), "0 output tokens"),
        (own(1.0, output=-3, block_tokens=16), "-3 output tokens"),
        (own(1.0, prompt=2**31, block_tokens=16), "2147483648 prompt tokens"),
        (own(at_s=-1.0), "-1.0 is no time"),
        (own(at_s=0.5), "arrives at 0.5 s, before line 1 at 1 s"),
        (own(1.0, ids=[*range(8)], block_tokens=16), "8 block ids for 100 tokens, which are 7 blocks"),
        (own(1.0, ids=[3, 3], block_tokens=16), "a block id occurs twice"),
        (own(1.0, ids=[2**64], block_tokens=16), "no unsigned 64-bit number"),
        (own(1.0, ids=[-1], block_tokens=16), "no unsigned 64-bit number"),
        (own(1.0, keys="AAAA", block_tokens=16), "keys are 3 bytes"),
        (own(1.0, keys="BQAAAAAAAAA=", ids=[5], block_tokens=16), "both ids and keys"),
        (own(1.0, block_tokens=0), "blocks of 0 tokens"),
        (own(1.0, block_tokens=512), "blocks of 512 tokens, those of line 1 have 16"),
        (own(1.0, id="r1", block_tokens=16), "id 'r1' was there before"),
        (own(1.0, sesion="c", block_tokens=16), "unknown field `sesion`"),
        (b"\xff\xfe".decode("latin-1"), "malformed"),
    ],
)
def test_a_line_that_can_t_be_used_is_named_with_its_reason_and_remedy(line: str, reason: str, tmp_path: Path) -> None:
    text = f"{own(1.0, id='r1', block_tokens=16)}\n\n{line}\n{own(2.0, id='r3', block_tokens=16)}\n"
    said = refusal(tmp_path, text)
    assert f"{tmp_path}/trace, line 3: " in said
    assert reason in said
    assert "--skip-bad" in said
    trace = read_trace(tmp_path / "trace", skip_bad=True)
    assert [row.line for row in trace.rows] == [1, 4]
    assert trace.bad == 1
    assert reason in trace.bad_first[0]


@pytest.mark.parametrize(
    ("form", "old", "new", "reason"),
    [
        ("Azure", "374", "", "no ContextTokens"),
        ("Azure", "374", "3e2", "ContextTokens: '3e2' is no whole number"),
        ("Azure", ",44", "", "2 fields"),
        ("Azure", "374", "9" * 200_000, "field larger than field limit"),
        ("Azure", "2023-11-16", "2023-11-31", "TIMESTAMP: day is out of range"),
        ("Azure", "2023-11-16 ", "", "is not like 2023-11-16 18:15:46"),
        ("BurstGPT", "5,ChatGPT", "soon,ChatGPT", "'soon' is no number of seconds"),
        ("BurstGPT", "5,ChatGPT", "nan,ChatGPT", "nan is no time"),
        ("BurstGPT", "18", "0", "0 output tokens"),
        ("Bailian", '"chat_id": 8', '"chat_id": 7', "chat_id 7 was there before"),
        ("Mooncake", '"hash_ids": [0, 1]', '"hash_ids": [0, 1, 2]', "3 block ids for 1000 tokens, which are 2 blocks"),
        ("Mooncake", '"hash_ids": [0, 1]', '"hash_ids": [0, 1], "more": ' + "[" * 10_000, "recursion"),
    ],
)
def test_so_are_the_lines_of_other_formats(form: str, old: str, new: str, reason: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, TEXTS[form].replace(old, new, 1))
    assert reason in said
    assert "line " in said


def test_a_recorder_s_step_and_a_retry_repeat_moments_and_rows_which_is_no_error(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, f"{own(1.0)}\n{own(1.0)}\n{own(1.0, prompt=7)}\n"))
    assert len(trace.rows) == 3
    assert trace.repeats == 1


def test_a_file_that_is_not_a_trace_is_told_what_would_be(tmp_path: Path) -> None:
    assert refusal(tmp_path, "").endswith("the file is empty")
    assert refusal(tmp_path, "\n \n").endswith("the file is empty")
    assert "no requests in it" in refusal(tmp_path, AZURE.splitlines()[0])
    said = refusal(tmp_path, "num_prefill_tokens,num_decode_tokens\n1,2\n")
    assert "begins 'num_prefill_tokens" in said
    assert "Mooncake JSONL" in said
    assert "not a trace" in refusal(tmp_path, '{"at_s": ' + "[" * 10_000)
    assert "can't be unpacked" in refusal(tmp_path, lzma.compress(MOONCAKE.encode())[:-9])
    assert "can't be unpacked" in refusal(tmp_path, gzip.compress(MOONCAKE.encode())[:-9])
    with pytest.raises(PolicyError, match="Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(
        PolicyError,
        match=r"no trace 'convers': .* there is: azure-code, azure-conv, conversation, synthetic, or the path",
    ):
        read_trace("convers")


def test_a_file_most_of_whose_lines_are_bad_is_refused_even_with_skip_bad(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join([own(), "x", own(output=0), own(prompt=0)]))
    with pytest.raises(PolicyError, match=r"3 of 4 lines are bad as TokenFleet JSONL; line 2: "):
        read_trace(path, skip_bad=True)


def test_of_many_bad_lines_the_first_are_shown_and_all_are_counted() -> None:
    bad = BadLines()
    assert not list(parse_own(["x"] * 100, source="o", bad=bad))
    assert (bad.count, len(bad.first)) == (100, 5)


@given(st.binary(max_size=200), st.sampled_from(sorted(TEXTS)))
def test_whatever_stands_in_a_line_is_a_row_or_a_refusal(noise: bytes, form: str) -> None:
    parse = {
        "Mooncake": parse_mooncake,
        "Azure": parse_azure,
        "BurstGPT": parse_burstgpt,
        "Bailian": parse_bailian,
        "own": parse_own,
    }[form]
    bad = BadLines()
    lines = [line.encode() for line in TEXTS[form].splitlines()]
    rows = list(parse([*lines, *noise.splitlines()], source="noise", bad=bad))
    assert len(rows) >= len(lines) - 1


def test_a_request_that_no_instance_can_hold_is_named_before_the_run() -> None:
    profile = msgspec.structs.replace(profiles()["L70"], kv_tokens=200 * 512)  # 2 of 200 blocks stay free
    held = TraceRow(at_s=1.0, prompt_tokens=198 * 512, output_tokens=1, line=1)
    check_fits([held], profile)
    one_more = msgspec.structs.replace(held, output_tokens=2, line=2)
    largest = msgspec.structs.replace(held, at_s=2.0, prompt_tokens=300 * 512, line=3)
    with pytest.raises(PolicyError, match="198; 1 requests"):
        check_fits([held, one_more], profile)
    with pytest.raises(
        PolicyError,
        match=r"line 3, at 2.0 s: 153600 prompt \+ 1 output tokens are 300 blocks of 512, .* 198; 2 requests",
    ):
        check_fits([held, one_more, largest], profile)


@given(prompt=st.integers(1, 4000), output=st.integers(1, 500))
def test_a_request_fits_exactly_when_the_engine_says_so(prompt: int, output: int) -> None:
    from tokenfleet.sim.engine.events import Job
    from tokenfleet.sim.engine.machine import EngineMachine

    profile = msgspec.structs.replace(profiles()["demo"], kv_tokens=3_200, block_size=16)
    row = TraceRow(at_s=0.0, prompt_tokens=prompt, output_tokens=output)
    job = Job(id="j", prompt_tokens=prompt, output_tokens=output, max_tokens=output)
    if EngineMachine(profile).fits(job):
        check_fits([row], profile)
    else:
        with pytest.raises(PolicyError):
            check_fits([row], profile)


# Scaling

ROWS = [
    TraceRow(
        at_s=float(i), prompt_tokens=2048, output_tokens=1, hash_ids=(0, i % 10 + 1, 100 + i), session=f"c{i % 10}"
    )
    for i in range(100)
]


@pytest.mark.parametrize(
    ("copies", "rows", "speed"), [(1.0, 100, 1.0), (2.5, 200, 1.25), (3.0, 300, 1.0), (1.9, 100, 1.9)]
)
def test_a_number_that_is_not_whole_is_whole_copies_replayed_a_little_faster(
    copies: float, rows: int, speed: float
) -> None:
    laid = scaled(ROWS, copies=copies, quantum_s=0.0, rng=Random(1), shared_first_block=True)
    assert len(laid) == rows
    assert [row.at_s for row in laid] == sorted(row.at_s for row in laid)
    assert laid[-1].at_s <= 99.0 / speed
    assert rows / (99.0 / speed) == pytest.approx(copies * 100 / 99.0)


def test_copies_share_the_system_prompt_and_nothing_else() -> None:
    laid = scaled(ROWS, copies=3, quantum_s=0.0, rng=Random(1), shared_first_block=True)
    assert {row.hash_ids[0] for row in laid} == {0}
    assert Counter(i for row in laid for i in row.hash_ids[2:]).most_common(1)[0][1] == 1
    assert len({row.session for row in laid}) == 30
    apart = scaled(ROWS, copies=3, quantum_s=0.0, rng=Random(1), shared_first_block=False)
    assert len({row.hash_ids[0] for row in apart}) == 3


def test_copies_are_turned_against_each_other() -> None:
    laid = scaled(ROWS[:1] * 50 + ROWS[99:], copies=4, quantum_s=0.0, rng=Random(1), shared_first_block=True)
    bursts = [count for _, count in Counter(row.at_s for row in laid).items() if count >= 50]
    assert len(bursts) == 4, "each copy's burst is at a moment of its own"


def test_arrivals_are_spread_over_the_recorder_s_step() -> None:
    stepped = [msgspec.structs.replace(row, at_s=float(i // 10) * 3) for i, row in enumerate(ROWS)]
    laid = scaled(stepped, copies=1, quantum_s=3.0, rng=Random(1), shared_first_block=True)
    assert len({row.at_s for row in laid}) == 100
    assert sum(row.at_s // 3 * 3 == before.at_s for row, before in zip(laid, stepped, strict=True)) == 100


def test_below_one_whole_conversations_are_left_out_and_the_others_keep_their_times() -> None:
    laid = scaled(ROWS, copies=0.3, quantum_s=0.0, rng=Random(1), shared_first_block=True)
    assert len({row.session for row in laid}) == 3
    assert len(laid) == 30
    gaps = Counter(
        round(after.at_s - before.at_s)
        for session in {row.session for row in laid}
        for mine in [[row for row in laid if row.session == session]]
        for before, after in pairwise(mine)
    )
    assert gaps.most_common(1)[0][0] == 10, "think time is as recorded"


def test_ids_that_are_hashes_stay_apart_and_within_64_bits() -> None:
    rows = [TraceRow(at_s=0.0, prompt_tokens=16, output_tokens=1, hash_ids=(2**64 - 1,), block_tokens=16)]
    laid = scaled(rows, copies=5, quantum_s=0.0, rng=Random(1), shared_first_block=False)
    ids = {row.hash_ids[0] for row in laid}
    assert len(ids) == 5
    assert max(ids) < 2**64


@given(copies=st.floats(0.01, 8.0), seed=st.integers(0, 100))
def test_the_same_seed_gives_the_same_rows(copies: float, seed: int) -> None:
    def once() -> list[TraceRow]:
        return scaled(ROWS, copies=copies, quantum_s=0.5, rng=Random(seed), shared_first_block=True)

    laid = once()
    assert laid == once()
    assert len(laid) >= 1


def test_nothing_scales_to_nothing() -> None:
    assert scaled([], copies=3, quantum_s=0.0, rng=Random(1), shared_first_block=True) == []
    assert scaled(ROWS, copies=0, quantum_s=0.0, rng=Random(1), shared_first_block=True) == []


# Profiles

DEMO = profile_text(profiles()["demo"])


def test_a_profile_is_named_or_a_file_s(tmp_path: Path) -> None:
    assert load_profile("L70") is profiles()["L70"]
    body = profile_text(load_profile("demo"))
    assert load_profile(str(written(tmp_path, body, "mine.toml"))) == load_profile("demo")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("token_s = 'much'", "Expected `float`|missing required field"),
        ("token_s = ", "mine.toml: "),
        ("tokens_s = 1.0", "tokens_s"),
        ("source = " + "[" * 10_000, "mine.toml: maximum recursion depth"),
        (DEMO.replace("token_s = 0.00004", "token_s = -1.0"), "token_s = -1.0 is no time"),
        (DEMO.replace("token_s = 0.00004", "token_s = nan"), "token_s = nan is no time"),
        (DEMO.replace("kv_tokens = 131072", "kv_tokens = 0"), "kv_tokens = 0; it is 1 or more"),
        (DEMO.replace("[[1,", "[[1,0.1],[1,"), "their tokens rise"),
        (DEMO.replace("[[1,0.008]]", "[]"), "at least one"),
    ],
)
def test_a_profile_file_that_can_t_be_used_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=reason):
        load_profile(str(written(tmp_path, text, "mine.toml")))


def test_an_unknown_profile_is_answered_with_the_list() -> None:
    with pytest.raises(PolicyError, match=r"no profile 'l70': .*there is: DSV3, .*L70"):
        load_profile("l70")


def test_own_lines_are_written_as_they_are_read() -> None:
    line = TraceLine(at_s=1.0, prompt_tokens=3, output_tokens=2, class_="chat", keys=b"\x05" + bytes(7), block_tokens=2)
    [row] = parse_own([msgspec.json.encode(line)], source="o")
    assert (row.request_class, row.hash_ids, row.block_tokens) == ("chat", (5,), 2)
    assert isinstance(load_profile("demo"), Profile)
