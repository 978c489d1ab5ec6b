"""Status shows each site once, whole names included, on 80 columns."""

from rich.console import Console

from tokenfleet.client.sites import sites_table
from tokenfleet.wire.v1 import scheduler_pb2

LONG = "an-organisation/a-model-with-a-long-name-instruct"
NAME = "an-instance-with-a-name-that-is-longer-than-its-column"


def pool(*instances: str, model: str = "m", digests: tuple[str, ...] = ()) -> scheduler_pb2.Pool:
    return scheduler_pb2.Pool(
        pool=f"{model}@b",
        model=model,
        model_digest="m@1",
        endpoints=2,
        ready=2,
        waits_s=[0.1],
        instances=[
            scheduler_pb2.Instance(
                instance=name, availability="ready", model_digest=digest, age_s=12.3, backlog_s=12.3456, queued=10
            )
            for name, digest in zip(instances, digests or ("m@1",) * len(instances), strict=True)
        ],
    )


def seen(by: str, *pools: scheduler_pb2.Pool) -> scheduler_pb2.SitesResponse:
    """By a replica of site `by`: `a` has no engines, `b` these pools, of `c` nothing was heard."""
    return scheduler_pb2.SitesResponse(
        site=by,
        replica="0",
        policy_revision=3,
        sites=[
            scheduler_pb2.Site(name="a", summary_age_s=0.4),
            scheduler_pb2.Site(name="b", summary_age_s=0.4, telemetry_age_s=1.5, pools=pools),
            scheduler_pb2.Site(name="c"),
        ],
    )


def text(*responses: scheduler_pb2.SitesResponse, silent: tuple[str, ...] = ()) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(sites_table(responses, silent=silent))
    return captured.get()


def test_each_site_stands_once_with_the_instances_that_its_own_replica_sees() -> None:
    shown = text(seen("a", pool()), seen("b", pool("b-0", "b-1")))
    assert shown.count("b-0") == 1
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("a ", "b ", "c "))] == ["a", "b", "c"]
    assert "12346 ms" in shown
    assert "each site as a replica of its own sees it, policy 3" in shown


def test_a_site_without_engines_is_ingress_only_whoever_looks_and_one_unheard_of_is_not() -> None:
    for by in "ab":
        lines = text(seen(by, pool())).splitlines()
        [ingress] = [line for line in lines if line.startswith("a ")]
        [unheard] = [line for line in lines if line.startswith("c ")]
        assert "ingress only" in ingress
        assert "400 ms" in ingress
        assert "never heard" in unheard


def test_names_are_never_cut() -> None:
    shown = text(seen("b", pool(NAME, model=LONG)))
    assert "…" not in shown
    lines = shown.splitlines()
    begin, end = lines[1].index("pool"), lines[1].index("state")
    names = "".join(line[begin:end].strip() for line in lines)
    assert LONG in names
    assert NAME in names
    assert all(len(line) <= 80 for line in lines)


def test_the_revision_is_told_only_where_a_pool_has_two() -> None:
    assert "m@1" not in text(seen("b", pool("b-0", "b-1")))
    shown = text(seen("b", pool("b-0", "b-1", digests=("m@1", "m@2"))))
    assert "b-0 m@1" in shown
    assert "b-1 m@2" in shown


def test_a_site_that_does_not_answer_is_shown_as_another_sees_it() -> None:
    shown = text(seen("a", pool()), silent=("b",))
    assert "no replica answers at b: as a sees it" in shown
    assert any(line.startswith("b ") and "2/2" in line for line in shown.splitlines())


def test_a_shared_book_is_told_with_who_owns_it() -> None:
    owner, other = seen("b", pool("b-0")), seen("c", pool("c-0"))
    owner.books.add(
        book="pool m@b", state="live", rest_units=4000, owned=True, limit_units=90_000, counted_units=70_000, in_line=3
    )
    other.books.add(book="pool m@c", state="degraded", waiting=2)
    lines = " ".join(text(owner, other).split())
    assert "pool m@b at b/0: 4,000 KV tokens to spend, live, 0 wait here; owns it: 70,000 of 90,000 count, 3" in lines
    assert "pool m@c at c/0: 0 KV tokens to spend, degraded, 2 wait here" in lines


def test_batch_tickets_are_told_once_a_pool_by_the_replica_that_grants_them() -> None:
    other, owner = seen("b", pool()), seen("b", pool())
    other.batch.add(model="m", waiting=9_000, waiting_gpu_s=100.0, closed="postgres_away")
    owner.batch.add(model="m", waiting=12_345, waiting_gpu_s=67_890.0, first_left_s=600.0, rate=1.25, owned=True)
    shown = " ".join(text(other, owner).split())
    assert "batch tickets of m at b: 12,345 wait, 67,890 GPU seconds at 1.25 a second" in shown
    assert "first deadline in 600.0 s" in shown
    assert "9,000" not in shown
    assert "none taken in: postgres_away" in " ".join(text(other).split())
