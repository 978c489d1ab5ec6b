"""Sites: all sites of a fleet as people read them in a terminal of 80 columns."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from tokenfleet.client.words import age_words
from tokenfleet.wire.v1 import scheduler_pb2

COLUMNS = ("site", "pool / instance", "state", "ready", "wait", "queue", "run", "KV", "age")
WORDS = COLUMNS[:3]  # the others are figures


def sites_table(seen: Sequence[scheduler_pb2.SitesResponse], *, silent: Sequence[str] = ()) -> Table:
    """Each site once, as its own replica sees it if one is among `seen`, which alone knows its instances.

    `silent` are sites whose replicas did not answer: they are shown as the first of `seen` sees them.
    """
    table = Table(
        title=_title(seen),
        caption="\n".join([*_holding(seen), *_books(seen), *_batch(seen), *_silence(seen, silent)]) or None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for name in COLUMNS:
        words = name in WORDS  # folded where there is no room, never cut
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    own = {response.site: response for response in seen}
    for site in seen[0].sites:
        _add_site(table, _named(own.get(site.name, seen[0]), site.name) or site, own=site.name in own)
    return table


def _title(seen: Sequence[scheduler_pb2.SitesResponse]) -> str:
    revisions = ", ".join(str(revision) for revision in sorted({each.policy_revision for each in seen}))
    if blind := sorted({each.rule for each in seen} - {"", "cost"}):
        revisions += f", rule {', '.join(blind)}"
    if len(seen) == 1:
        return f"as {seen[0].site}/{seen[0].replica} sees it, policy {revisions}"
    return f"each site as a replica of its own sees it, policy {revisions}"


def _holding(seen: Sequence[scheduler_pb2.SitesResponse]) -> list[str]:
    """What late binding does at each site that has engines, or why it does nothing."""
    words: dict[str, list[str]] = {}
    for each in seen:
        own = _named(each, each.site)
        if own is not None and own.pools:
            said = f"nothing is held: {each.holds_none}" if each.holds_none else f"{each.held} requests held"
            words.setdefault(said, []).append(f"{each.site}/{each.replica}")
    return [f"late binding at {', '.join(replicas)}: {said}" for said, replicas in words.items()]


def _books(seen: Sequence[scheduler_pb2.SitesResponse]) -> list[str]:
    """Each replica's part of the books that its site shares."""
    words: list[str] = []
    for each in seen:
        for book in each.books:
            said = f"{book.rest_units:,} KV tokens to spend, {book.state}, {book.waiting} wait here"
            if book.owned:
                said += f"; owns it: {book.counted_units:,} of {book.limit_units:,} count, {book.in_line} in line"
            words.append(f"{book.book} at {each.site}/{each.replica}: {said}")
    return words


def _batch(seen: Sequence[scheduler_pb2.SitesResponse]) -> list[str]:
    """The batch work that waits in PostgreSQL, by pool, as the replica tells it that grants it, else one that knows."""
    told: dict[tuple[str, str], scheduler_pb2.Batch] = {}
    for each in seen:
        for pool in each.batch:
            if pool.owned or (each.site, pool.model) not in told:
                told[each.site, pool.model] = pool
    return [_batch_words(site, pool) for (site, _), pool in sorted(told.items(), key=lambda item: item[0])]


def _batch_words(site: str, pool: scheduler_pb2.Batch) -> str:
    said = f"batch tickets of {pool.model} at {site}: {pool.waiting:,} wait, {pool.waiting_gpu_s:,.0f} GPU seconds"
    if pool.HasField("rate"):
        said += f" at {pool.rate:.2f} a second"
    if pool.HasField("first_left_s"):
        said += f", first deadline in {age_words(pool.first_left_s)}"
    return f"{said}; none taken in: {pool.closed}" if pool.closed else said


def _silence(seen: Sequence[scheduler_pb2.SitesResponse], silent: Sequence[str]) -> list[str]:
    return [f"no replica answers at {', '.join(silent)}: as {seen[0].site} sees it"] if silent else []


def _named(seen: scheduler_pb2.SitesResponse, name: str) -> scheduler_pb2.Site | None:
    return next((site for site in seen.sites if site.name == name), None)


def _add_site(table: Table, site: scheduler_pb2.Site, *, own: bool) -> None:
    if not site.pools:
        heard = site.HasField("summary_age_s")
        age = age_words(site.summary_age_s) if heard else ""
        table.add_row(site.name, "", "ingress only" if heard or own else "never heard", *[""] * 5, age)
    age = age_words(site.telemetry_age_s if site.HasField("telemetry_age_s") else None)
    for pool in site.pools:
        digests = {each.model_digest for each in (*pool.instances, *site.pools) if _is_of(each, pool)}
        several = len(digests) > 1
        table.add_row(site.name, _with_digest(pool.model, pool, several), *_pool_cells(pool), age)
        for instance in pool.instances:
            table.add_row("", _with_digest(f"  {instance.instance}", instance, several), *_instance_cells(instance))


def _is_of(each: scheduler_pb2.Instance | scheduler_pb2.Pool, pool: scheduler_pb2.Pool) -> bool:
    return isinstance(each, scheduler_pb2.Instance) or each.pool == pool.pool


def _with_digest(name: str, of: scheduler_pb2.Instance | scheduler_pb2.Pool, several: bool) -> str:
    """The revision is told only where a pool has more than one."""
    return f"{name} {of.model_digest}" if several else name


def _pool_cells(pool: scheduler_pb2.Pool) -> tuple[str, ...]:
    used = f"{pool.kv.used / pool.kv.capacity:.0%}" if pool.kv.capacity else "?"
    wait = f"{min(pool.waits_s) * 1000:.0f} ms" if pool.waits_s else "-"
    ready = f"{pool.ready}/{pool.endpoints}"
    return ("", ready, wait, f"{pool.seats.queued:.0f}", f"{pool.seats.used:.0f}", used)


def _instance_cells(instance: scheduler_pb2.Instance) -> tuple[str, ...]:
    state = instance.availability + (" (suspect)" if instance.suspect else "")
    if instance.availability_reason:
        state += f": {instance.availability_reason}"
    total = instance.kv_total_tokens if instance.HasField("kv_total_tokens") else 0.0
    used = f"{instance.kv_held_tokens / total:.0%}" if total else "?"
    age = age_words(instance.age_s if instance.HasField("age_s") else None)
    wait = f"{instance.backlog_s * 1000:.0f} ms"
    return (state, "", wait, str(instance.queued), str(instance.decoding), used, age)
