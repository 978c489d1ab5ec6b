"""Words: decisions, sites and outcomes as people read them in a terminal."""

import datetime as dt
from collections.abc import Iterable

from google.protobuf.json_format import MessageToDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenfleet.wire.v1 import audit_pb2, decision_pb2, outcomes_pb2, scheduler_pb2

CANDIDATE_TERMS = ("cost", "ttft", "wait", "work", "learned", "margin", "reuse", "kv", "decode")
VERDICT_STYLES = {"admit": "green", "redirect": "cyan", "queue": "yellow", "defer": "yellow", "reject": "red"}


def verdict_of(decision: decision_pb2.Decision) -> str:
    """The verdict's word."""
    return decision_pb2.Verdict.Name(decision.verdict).removeprefix("VERDICT_").lower()


def age_words(age_s: float | None) -> str:
    """An age as people say it."""
    if age_s is None:
        return "never heard"
    return f"{age_s * 1000:.0f} ms" if age_s < 1 else f"{age_s:.1f} s"


def moment(wall_s: float) -> str:
    """A wall time with its date, in UTC."""
    return dt.datetime.fromtimestamp(wall_s, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def plain(
    message: decision_pb2.Decision
    | scheduler_pb2.SitesResponse
    | scheduler_pb2.WhatIfResponse
    | audit_pb2.ExplainResponse
    | audit_pb2.FindResponse,
) -> dict[str, object]:
    """The message as JSON would hold it, in the field names of the contract."""
    return MessageToDict(message, preserving_proto_field_name=True)


def decision_words(decision: decision_pb2.Decision) -> RenderableType:
    """One decision: the sentence, then what it rests on."""
    verdict = verdict_of(decision)
    head = Text.assemble(
        (verdict.upper(), f"bold {VERDICT_STYLES.get(verdict, '')}"),
        f" {decision.target or decision.site or '-'}",
        f"  {moment(decision.at_wall_s)}  attempt {decision.attempt}  [{decision.id}]",
    )
    age = decision.age_s if decision.HasField("age_s") else None
    mode = decision_pb2.Mode.Name(decision.mode).removeprefix("MODE_").lower()
    lines: list[RenderableType] = [head, Text(f"  {decision.sentence}")]
    lines.append(Text(f"  {decision.request_class} ({decision.admission.rule}); agreed: {_agreed(decision.admission)}"))
    lines.append(
        Text(
            f"  {mode}, telemetry {age_words(age)}; policy {decision.policy_revision}"
            f"{' (canary)' if decision.canary else ''}, calibration "
            f"{decision.calibration_revision}; by {decision.replica} in {decision.took_s * 1e3:.1f} ms"
        )
    )
    if decision.admission.HasField("retry_after_s"):
        lines.append(Text(f"  retry after {decision.admission.retry_after_s:.1f} s"))
    if decision.excluded:
        removed = ", ".join(f"{n} {name}" for name, n in sorted(decision.excluded.items()))
        lines.append(Text(f"  removed by filters: {removed}"))
    if decision.candidates:
        lines.append(_candidates(decision))
    if len(decision.sites) > 1:
        lines.append(_options(decision))
    return Group(*lines)


def what_if_words(told: scheduler_pb2.WhatIfResponse) -> RenderableType:
    """Both choices, the difference first."""
    now, then = told.present, told.changed
    if now.target == then.target and now.reason == then.reason:
        same = f"stays at {now.target}" if now.target else f"is refused either way ({_reason(now)})"
        head = Text(f"NO CHANGE  the request {same}", style="bold")
    else:
        head = Text(f"CHANGES  the request goes {_to(then)} instead of {_to(now)}", style="bold yellow")
    age = age_words(told.age_s if told.HasField("age_s") else None)
    tables = ", ".join(f"{name} {version}" for name, version in sorted(told.tables.items()))
    parts: list[RenderableType] = [head]
    parts += [Text(f"  if {change}") for change in told.changes] or [Text("  if nothing were otherwise")]
    for word, choice in (("now", now), ("then", then)):
        parts += [Text(), Text(f"{word}: {choice.sentence}")]
        if choice.excluded:
            removed = ", ".join(f"{n} {name}" for name, n in sorted(choice.excluded.items()))
            parts.append(Text(f"  removed by filters: {removed}"))
        if choice.candidates:
            parts.append(_candidates(choice))
    parts += [Text(), Text(f"on {told.pool}, telemetry {age}; tables {tables}")]
    parts.append(Text("nothing was placed or recorded; waiting is as predicted now"))
    return Group(*parts)


def explanation(request_id: str, found: audit_pb2.ExplainResponse) -> RenderableType:
    """All that is known of one logical request, in order."""
    parts: list[RenderableType] = [Text(f"request {request_id}", style="bold")]
    if found.decisions:
        first = found.decisions[0]
        who = f"tenant {first.tenant} asked for {first.model} at {first.origin}"
        parts.append(Text(f"{who}, {first.prompt_tokens:,} prompt tokens"))
    for decision in found.decisions:
        parts += [Text(), decision_words(decision)]
    if found.outcomes:
        parts += [Text(), _outcomes(found.outcomes)]
    return Group(*parts)


def decisions_table(decisions: Iterable[decision_pb2.Decision]) -> RenderableType:
    """The newest first, a line each."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("request", "at", "verdict", "class", "tenant", "for", "why"):
        table.add_column(name, no_wrap=name != "why")
    for each in decisions:
        verdict = verdict_of(each)
        said = Text(verdict, style=VERDICT_STYLES.get(verdict, ""))
        where = each.target or each.site
        table.add_row(
            each.request, moment(each.at_wall_s)[11:], said, each.request_class, each.tenant, where, each.sentence
        )
    return table


def _agreed(admission: decision_pb2.Admission) -> str:
    """The service level in words."""
    terms = (
        f"first token within {admission.ttft_max_s:.1f} s" if admission.HasField("ttft_max_s") else "",
        f"{admission.tpot_max_s * 1000:.0f} ms a token" if admission.HasField("tpot_max_s") else "",
        f"end within {admission.end_max_s:.0f} s" if admission.HasField("end_max_s") else "",
    )
    return ", ".join(term for term in terms if term) or "nothing"


def _to(choice: scheduler_pb2.Choice) -> str:
    return f"to {choice.target}" if choice.target else f"nowhere ({_reason(choice)})"


def _reason(choice: scheduler_pb2.Choice) -> str:
    return decision_pb2.Reason.Name(choice.reason).removeprefix("REASON_").lower()


def _candidates(decision: decision_pb2.Decision | scheduler_pb2.Choice) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("  instance", *CANDIDATE_TERMS, "KV", "hit", "age", "why not"):
        whole = name in ("  instance", "age")  # at 80 columns headings are cut, neither names nor figures
        table.add_column(name, justify="left" if name in ("  instance", "why not") else "right", no_wrap=whole)
    for c in decision.candidates:
        terms = (c.cost_s, c.ttft_s, c.wait_s, c.work_s, c.bias_s, c.margin_s, c.reuse_s, c.kv_s, c.decode_s)
        age = age_words(c.age_s if c.HasField("age_s") else None)
        use = f"{c.kv_use:.0%}" if c.HasField("kv_use") else "?"
        cells = (*(f"{term * 1000:.0f}" for term in terms), use, f"{c.hit_tokens}", age, c.filtered)
        table.add_row(f"  {c.instance}", *cells)
    table.caption = "  ms; ttft = wait + work + learned, cost = ttft + what follows; KV once it is there; hit in tokens"
    table.caption_justify = "left"
    return table


def _options(decision: decision_pb2.Decision) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("  site", "cost", "ttft", "wait", "network", "hit", "why not"):
        table.add_column(name, justify="left" if name in ("  site", "why not") else "right")
    for option in decision.sites:
        seconds = (
            f"{getattr(option, name) * 1000:.0f}" if option.HasField(name) else ""
            for name in ("ttft_s", "wait_s", "network_s")
        )
        cost = f"{option.cost:.6f}" if option.HasField("cost") else ""
        table.add_row(f"  {option.site}", cost, *seconds, str(option.hit_tokens or ""), option.refused)
    table.caption = "  cost of the request (latency, GPU, egress) in the policy's currency; times in ms; hit in tokens"
    table.caption_justify = "left"
    return table


def _outcomes(events: Iterable[outcomes_pb2.OutcomeEvent]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("what came of it", "at", "after", "instance", "ttft", "tpot", "prompt", "cached", "output", "stop"):
        table.add_column(name, justify="left" if name in ("what came of it", "instance", "stop") else "right")
    for event in events:
        kind = outcomes_pb2.OutcomeKind.Name(event.kind).removeprefix("OUTCOME_KIND_").lower()
        counts = (
            str(getattr(event, name)) if event.HasField(name) else "unknown"
            for name in ("prompt_tokens", "cached_tokens", "output_tokens")
        )
        ttft = f"{event.ttft_s * 1000:.0f} ms" if event.HasField("ttft_s") else ""
        tpot = f"{event.tpot_s * 1000:.1f} ms" if event.HasField("tpot_s") else ""
        at = moment(event.at_wall_s)[11:]
        after = f"{event.elapsed_s:.3f} s"
        table.add_row(f"{kind} (attempt {event.attempt})", at, after, event.instance, ttft, tpot, *counts, event.stop)
    return table
