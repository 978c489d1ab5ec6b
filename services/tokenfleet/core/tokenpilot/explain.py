"""Explain: a routing in words, with the trade that it made."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from tokenfleet.core.decision import Candidate, How, Reason

# The terms a sentence can name, in words, in the order in which equal gains are named.
TERMS: dict[str, str] = {
    "wait_s": "waiting",
    "work_s": "prefill",
    "kv_s": "KV room",
    "decode_s": "fewer decodes",
    "margin_s": "surer data",
    "weight_s": "operator's weight",
    "pace_s": "pace of those who decode",
}
NAMES = tuple(TERMS)
WORK = NAMES.index("work_s")
TERMS_OF: Callable[[Candidate], tuple[float, ...]] = attrgetter(*NAMES)


# How a target was found, in the words that say so.
HOW_TOLD: dict[How, str] = {
    "near_tie": "drawn among near-ties with",
    "prefix_home": "home of this prefix among near-ties with",
    "session": "keeps its session:",
    "suspect": "all are suspect: the less loaded of two drawn, the other",
    "off": "TokenPilot is off: the less loaded of two drawn, the other",
    "power_of_two": "by the rule power_of_two; the other drawn,",
    "least_requests": "by the rule least_requests; the cheapest other,",
    "round_robin": "by the rule round_robin; the cheapest other,",
    "random": "by the rule random; the cheapest other,",
    "least_cost": "runner-up",
}
ALONE_TOLD = "no other passed"


def deciding_term(target: Candidate, runner_up: Candidate) -> str:
    """The term in which the target gained most on the runner-up, empty if in none. The price of reuse is the work's."""
    theirs, ours = TERMS_OF(runner_up), TERMS_OF(target)
    gains_s = [them - us for them, us in zip(theirs, ours, strict=True)]
    gains_s[WORK] = (theirs[WORK] + runner_up.reuse_s) - (ours[WORK] + target.reuse_s)
    most_s = max(gains_s)
    return NAMES[gains_s.index(most_s)] if most_s > 0.0 else ""


def sentence_of(
    target: Candidate,
    runner_up: Candidate | None,
    *,
    how: How,
    network_s: float,
    deciding: str,
    removed: Mapping[str, str] | None = None,
    relaxed: Sequence[str] = (),
    ttft_max_s: float | None = None,
) -> str:
    """Such as "b-chat-1: first token in 212 ms (waits 90 ms, prefills 122 ms; 3,072 of 4,096 tokens cached saves
    412 ms); runner-up b-chat-0 by 120 ms, for prefill"."""
    spent = f"waits {ms(target.wait_s)}, prefills {ms(target.work_s)}"
    if network_s > 0.0:
        spent += f", network {ms(network_s)}"
    if target.hit_tokens:
        prompt = target.hit_tokens + target.uncached_tokens
        spent += f"; {target.hit_tokens:,} of {prompt:,} tokens cached saves {ms(target.saved_s)}"
    if target.bias_s:
        spent += f", learned {'+' if target.bias_s > 0 else '-'}{ms(abs(target.bias_s))}"
    told = f"{target.instance}: first token in {ms(network_s + target.ttft_s)}"
    if ttft_max_s is not None and target.ttft_s > ttft_max_s:
        told += f", past the {ms(max(0.0, network_s + ttft_max_s))} that are left,"
    why = _why(target, runner_up, how=how, deciding=deciding)
    if removed and runner_up is None:
        why = f"{ALONE_TOLD}: " + ", ".join(f"{name} ({by})" for name, by in removed.items())
    lifted = f"; all failed {', '.join(relaxed)}, which was lifted" if relaxed else ""
    return f"{told} ({spent}); {why}{lifted}"


def refusal_sentence(pool: str, reason: Reason, considered: int, excluded: dict[str, int]) -> str:
    """Such as "no target in chat@b: all_busy (3 instances: 2 kv_full, 1 draining)"."""
    if considered == 0:
        return f"no target in {pool}: {reason} (the pool is empty)"
    removed = ", ".join(f"{n} {name}" for name, n in excluded.items())
    return f"no target in {pool}: {reason} ({considered} instance{'s' if considered > 1 else ''}: {removed})"


def ms(seconds: float) -> str:
    """Milliseconds as people read them: 212 ms, 1,500 ms."""
    return f"{seconds * 1000:,.0f} ms"


def _why(target: Candidate, runner_up: Candidate | None, *, how: How, deciding: str) -> str:
    if runner_up is None:
        return f"{ALONE_TOLD} the filters"
    gap_s = runner_up.cost_s - target.cost_s
    told = HOW_TOLD.get(how, "")
    match how:
        case "near_tie" | "prefix_home":
            return f"{told} {runner_up.instance} ({ms(abs(gap_s))} apart)"
        case "session":
            return f"{told} {runner_up.instance} would gain only {ms(max(-gap_s, 0.0))}"
        case "suspect" | "off":
            return f"{told} {runner_up.instance}"
        case "power_of_two" | "least_requests" | "round_robin" | "random":
            return f"{told} {runner_up.instance}, costs {ms(abs(gap_s))} {'more' if gap_s >= 0.0 else 'less'}"
        case _:
            named = f", for {TERMS[deciding]}" if deciding else ""
            return f"{HOW_TOLD['least_cost']} {runner_up.instance} by {ms(gap_s)}{named}"
