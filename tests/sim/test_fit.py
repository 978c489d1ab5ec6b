"""Fit: an engine's constants come back from the times of its requests, and what they can't tell is said."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from tokenfleet.core.errors import PolicyError, SetupError
from tokenfleet.core.trace_line import TraceLine
from tokenfleet.sim.engine.events import Event, Finished, FirstToken, Job
from tokenfleet.sim.engine.machine import EngineMachine
from tokenfleet.sim.fit import Coefficient, Fitted, fit, read_measured
from tokenfleet.sim.fit_command import fit_profile, told
from tokenfleet.sim.fit_steps import Measured
from tokenfleet.sim.profiles import Profile, load_profile, profiles
from tokenfleet.sim.traces.read import read_trace
from tokenfleet.sim.traces.rows import TraceRow

L70 = profiles()["L70"]


def rows(share: float, *, seed: int = 1, count: int = 800) -> list[TraceRow]:
    """A share of the synthetic trace, as one engine of a fleet would get it."""
    rng = Random(seed)
    return [row for row in read_trace("synthetic").rows if rng.random() < share][:count]


def served(profile: Profile, offered: list[TraceRow], *, instance: str = "") -> list[TraceLine]:
    """What gateways and engine would tell of the rows, served by one engine."""
    machine, events = EngineMachine(profile), list[Event]()
    for number, row in enumerate(offered):
        events += machine.advance(row.at_s)
        job = Job(
            id=str(number),
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            max_tokens=row.output_tokens,
            block_hashes=row.hash_ids[: row.prompt_tokens // profile.block_size],
        )
        machine.submit(job, row.at_s)
    events += machine.advance(1e9)
    first_s = {event.job_id: event.at_s for event in events if isinstance(event, FirstToken)}
    ends = {event.job_id: event for event in events if isinstance(event, Finished)}
    return [
        TraceLine(
            at_s=row.at_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            cached_tokens=ends[str(number)].cached_tokens,
            ttft_s=first_s[str(number)] - row.at_s,
            tpot_s=(ends[str(number)].at_s - first_s[str(number)]) / max(1, row.output_tokens - 1) or None,
            instance=instance,
        )
        for number, row in enumerate(offered)
    ]


def written(path: Path, lines: list[TraceLine]) -> str:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in sorted(lines, key=lambda line: line.at_s)))
    return str(path)


def wrong(profile: Profile, factor: float) -> Profile:
    """The profile with all its times off by a factor."""
    names = ("prefill_base_s", "decode_base_s", "token_s", "pair_s", "context_s")
    floor = tuple((tokens, seconds * factor) for tokens, seconds in profile.floor_points)
    return msgspec.structs.replace(profile, **{n: getattr(profile, n) * factor for n in names}, floor_points=floor)


def fitted_to(path: str, base: Profile) -> Fitted:
    engines, skipped = read_measured(path)
    return fit(engines, base, source="test", skipped=skipped)


def prefill_s(profile: Profile, tokens: int) -> float:
    return profile.step_s(prefill_tokens=tokens, pairs=tokens**2 / 2, decodes=0, context_tokens=0)


def decode_s(profile: Profile, decodes: int) -> float:
    return profile.step_s(prefill_tokens=0, pairs=0.0, decodes=decodes, context_tokens=decodes * 10_000)


def off(fitted: Fitted, true: Profile) -> dict[str, float]:
    """Relative errors of the coefficients."""
    return {each.name: abs(each.value / true_value(each, true) - 1.0) for each in fitted.coefficients}


def true_value(each: Coefficient, true: Profile) -> float:
    if each.name.startswith("decode step at "):
        decodes = int(each.name.rpartition(" ")[2])
        return true.step_s(prefill_tokens=0, pairs=0.0, decodes=decodes, context_tokens=0)
    return getattr(true, each.name)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_two_engines_give_back_their_profile_from_a_base_that_is_wrong(factor: float, tmp_path: Path) -> None:
    lines = [line for seed in (1, 2) for line in served(L70, rows(0.25, seed=seed), instance=f"i{seed}")]
    fitted = fitted_to(written(tmp_path / "t", lines), wrong(L70, factor))
    assert fitted.requests == len(lines)
    assert all(each.identified for each in fitted.coefficients)
    errors = off(fitted, L70)
    assert errors["context_s"] < 0.03
    assert max(error for name, error in errors.items() if name != "context_s") < 0.01
    assert max(fitted.prefill_error, fitted.decode_error) < 0.01
    for prompt in (256, 1_024, 4_096):
        assert prefill_s(fitted.profile, prompt) == pytest.approx(prefill_s(L70, prompt), rel=0.01)
    for decodes in (1, 32, 64, 128, 256):  # some 30 were seen
        assert decode_s(fitted.profile, decodes) == pytest.approx(decode_s(L70, decodes), rel=0.02)


def test_an_engine_whose_steps_grow_with_the_batch_gives_back_its_points(tmp_path: Path) -> None:
    glm = profiles()["GLM5"]
    offered = [row for row in rows(0.1) if row.prompt_tokens < 100_000]
    fitted = fitted_to(written(tmp_path / "t", served(glm, offered)), wrong(glm, 1.5))
    errors = off(fitted, glm)
    assert errors["token_s"] < 0.02
    assert errors["pair_s"] < 0.02
    assert max(error for name, error in errors.items() if name.startswith("decode step")) < 0.08


def test_short_prompts_among_decodes_take_as_long_as_any_step(tmp_path: Path) -> None:
    rng, at_s, offered = Random(3), 0.0, list[TraceRow]()
    for line in range(1_500):
        at_s += rng.expovariate(8.0)
        prompt = rng.choice((10, 20, 40, 60, 150, 400, 1_000))
        offered.append(TraceRow(at_s=at_s, prompt_tokens=prompt, output_tokens=rng.randint(20, 200), line=line))
        if rng.random() < 0.2:
            offered.append(msgspec.structs.replace(offered[-1], line=line))
    fitted = fitted_to(written(tmp_path / "t", served(L70, offered)), wrong(L70, 1.5))
    errors = off(fitted, L70)
    assert max(error for name, error in errors.items() if name not in ("pair_s", "context_s")) < 0.01
    assert errors["pair_s"] < 0.05


def test_noise_of_the_clocks_is_borne(tmp_path: Path) -> None:
    rng = Random(5)
    noisy = [
        msgspec.structs.replace(line, at_s=line.at_s + rng.uniform(0.0, 0.005), ttft_s=line.ttft_s * rng.gauss(1, 0.01))
        for line in served(L70, rows(0.2))
        if line.ttft_s
    ]
    errors = off(fitted_to(written(tmp_path / "t", noisy), wrong(L70, 1.5)), L70)
    assert errors["token_s"] < 0.05
    assert errors["decode step at 1"] < 0.03


def test_what_the_requests_can_t_tell_is_the_base_s_and_said(tmp_path: Path) -> None:
    alike = [TraceRow(at_s=10.0 * i, prompt_tokens=4_096, output_tokens=1, line=i) for i in range(60)]
    base = wrong(L70, 2.0)
    fitted = fitted_to(written(tmp_path / "t", served(L70, alike)), base)
    kept = [each for each in fitted.coefficients if not each.identified]
    assert {"context_s", "decode step at 1"} <= {each.name for each in kept}
    assert len(kept) == len(fitted.coefficients) - 1, "prompts all of one length are one equation"
    assert all(each.value == true_value(each, base) for each in kept)
    assert prefill_s(fitted.profile, 4_096) == pytest.approx(prefill_s(L70, 4_096), rel=0.001)
    assert sum("not identified by this data: L70's" in line for line in told(fitted, "L70")) == len(kept)


def test_waits_that_no_step_explains_are_reported(tmp_path: Path) -> None:
    small = msgspec.structs.replace(L70, kv_tokens=110_000)
    lines = served(small, [row for row in rows(0.6, count=400) if row.prompt_tokens < 90_000])
    assert "worse than 5%" in told(fitted_to(written(tmp_path / "t", lines), L70), "L70")[-1]


def test_rows_without_times_are_counted_and_too_few_with_them_refused(tmp_path: Path) -> None:
    lines = served(L70, rows(0.2, count=60))
    bare = [msgspec.structs.replace(line, ttft_s=None) for line in lines[:5]]
    bare.append(msgspec.structs.replace(lines[5], cached_tokens=None))
    path = written(tmp_path / "t", [*bare, *lines[6:]])
    assert fitted_to(path, L70).skipped == 6
    path = written(tmp_path / "t", [*bare, *lines[6:50]])
    with pytest.raises(PolicyError, match="44 of 50 rows have ttft_s, tpot_s and cached_tokens; a fit takes 50"):
        read_measured(path)
    with pytest.raises(PolicyError, match="fit reads TokenFleet JSONL"):
        read_measured("synthetic")


def test_first_tokens_that_a_clock_can_t_tell_apart_are_one_step() -> None:
    together: list[Measured] = []
    for i in range(60):
        for prompt in (3_000, 100 * i + 1, 10):  # more than the budget: it is not what the base says
            end_s = 10.0 * i + 0.1 + 1e-5 * (3_000 + 100 * i + 11)
            together.append(
                Measured(
                    arrived_s=10.0 * i,
                    first_token_s=end_s,
                    ended_s=end_s,
                    prompt_tokens=prompt,
                    cached_tokens=0,
                    output_tokens=1,
                )
            )
    fitted = fit([together], L70, source="test")
    assert fitted.requests == 180
    assert fitted.prefill_error < 0.005


def test_the_file_that_is_written_is_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t", served(L70, rows(0.2, count=200)))
    fit_profile(trace=path, out=tmp_path / "mine.toml", base="DSV3-DP", token_budget=4_096, skip_bad=False)
    mine = load_profile(str(tmp_path / "mine.toml"))
    assert mine.kv_tokens == profiles()["DSV3-DP"].kv_tokens
    assert mine.token_s == pytest.approx(L70.token_s, rel=0.02)
    assert mine.source == "Fitted to t; the rest is DSV3-DP's."
    assert "200 requests, 0 without times" in capsys.readouterr().out


def test_a_profile_never_replaces_the_trace_that_it_is_fitted_to(tmp_path: Path) -> None:
    path = written(tmp_path / "t", served(L70, rows(0.2, count=60)))
    before = (tmp_path / "t").read_bytes()
    with pytest.raises(SetupError, match="is the trace itself"):
        fit_profile(trace=path, out=tmp_path / "t", skip_bad=False)
    assert (tmp_path / "t").read_bytes() == before
