"""The line of a book: who goes next."""

from tests.core.shards import BOOK
from tokenfleet.core.shard.line import Line
from tokenfleet.core.shard.records import Holder, Order, Ticket


def place(
    line: Line,
    name: str,
    tenant: str,
    work_s: float = 1.0,
    *,
    rank: int = 0,
    came_s: float | None = None,
    again: bool = False,
) -> None:
    order = Order(cluster="k", claim=0, n=1)
    me = Holder(replica="b", start="1")
    ticket = Ticket(
        book=BOOK,
        order=order,
        holder=me,
        n=1,
        ticket=name,
        tenant=tenant,
        request_class="chat",
        rank=rank,
        units=1,
        work_s=work_s,
        virtual_start=line.start(rank, tenant, came_s=came_s if again else None),
        token="",
    )
    line.put(ticket, holder=me, n=1, heard_s=0.0, heard_live_s=0.0, came_s=came_s)


def names(line: Line) -> list[str]:
    return [place.ticket.ticket for place in line.first(99)]


def test_tenants_take_turns_by_work_and_an_idle_one_banks_nothing() -> None:
    line = Line()
    for number in range(4):
        place(line, f"many{number}", "many")
    place(line, "few0", "few")
    assert names(line) == ["many0", "few0", "many1", "many2", "many3"]
    for _ in range(3):
        first = line.first(1)[0]
        line.serve(first)
        line.end(first.ticket.ticket)
    place(line, "idle0", "idle")
    place(line, "idle1", "idle")
    assert names(line) == ["many2", "idle0", "many3", "idle1"]


def test_a_lesser_rank_goes_first_and_what_came_back_before_all() -> None:
    line = Line()
    place(line, "batch", "t", rank=2)
    place(line, "chat", "t", rank=0)
    assert names(line) == ["chat", "batch"]
    assert line.ahead(1, 0.0) == 1
    batch = line.places["batch"]
    line.serve(batch)
    assert names(line) == ["chat"]
    line.give_back(batch)
    assert names(line) == ["batch", "chat"]


def test_who_comes_again_goes_before_those_of_its_tenant_who_came_later_and_takes_no_turn_of_another_s() -> None:
    line = Line()
    for number, came_s in enumerate((1.0, 3.0, 4.0)):
        place(line, f"own{number}", "own", came_s=came_s)
    for number in range(3):
        place(line, f"other{number}", "other", came_s=5.0)
    place(line, "again", "own", came_s=2.0, again=True)
    assert names(line) == ["own0", "other0", "again", "own1", "other1", "own2", "other2"]
    line.serve(line.places["own1"])
    place(line, "last", "own", came_s=9.0, again=True)
    assert names(line)[-1] == "last"
