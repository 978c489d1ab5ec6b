"""The shard under kills, pauses, zombies, delays, copies, drift and cuts: what it promises holds at every step.

The log is simulated: the order of appends is the truth. Any replica may be told that it owns the partition at any time
and keep believing it; a paused one goes on from where it was, whatever has happened meanwhile.
"""

from collections.abc import Callable
from random import Random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.core.shards import Replica, World

NAMES = st.sampled_from("abc")
STEPS = st.sampled_from((1, 2, 1_000))
ACTS: dict[str, Callable[[Replica], object]] = {
    "read": lambda replica: replica.read(),
    "read placements": lambda replica: replica.read_placements(),
    "ask": lambda replica: replica.ask(12),
    "turn": lambda replica: replica.turn(),
    "land": lambda replica: replica.land(),
    "land twice": lambda replica: replica.land(copies=True),
    "send": lambda replica: replica.send(),
    "spend": lambda replica: spend_all(replica),
    "use": lambda replica: use_all(replica),
    "keep": lambda replica: replica.keep(),
    "assign": lambda replica: replica.assigned(),
}
DOINGS = st.lists(st.sampled_from(sorted(ACTS)), max_size=7)


def spend_all(replica: Replica) -> None:
    while replica.spend():
        pass


def use_all(replica: Replica) -> None:
    for ticket in replica.waiting.granted(replica.now_s):
        replica.use(ticket)


STORM_STEPS = 100
WEIGHTS = {
    "read": 6,
    "read one": 3,
    "read placements": 5,
    "ask": 4,
    "turn": 6,
    "land": 6,
    "land one": 3,
    "land twice": 1,
    "late": 2,
    "send": 4,
    "spend": 8,
    "use": 3,
    "keep": 3,
    "queue": 1,
    "unused": 1,
    "show": 0.4,
    "withdraw": 0.5,
    "end": 3,
    "wait": 6,
    "wait long": 0.25,
    "work": 1,
    "assign": 0.5,
    "kill": 0.2,
    "pause": 0.3,
    "cut": 0.3,
    "heal": 1,
}


def storm_step(shard: "Shard", rng: Random) -> None:
    """One act of one replica, or one fault, or time."""
    world, name = shard.world, rng.choice("abc")
    [act] = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    if act in ("kill", "pause", "cut", "heal", "late", "wait", "wait long", "work"):
        match act:
            case "kill":
                shard.kill(name, rng.random() < 0.5)
            case "pause":
                shard.pause(name)
            case "cut":
                shard.cut(name)
            case "late":
                for record in rng.sample(world.late, min(1, len(world.late))):
                    world.late.remove(record)
                    world.append(record)
            case "work":
                shard.work(0.3, spends=rng.random() < 0.5)
            case "heal":
                shard.heal()
            case _:
                world.now_s += rng.choice((0.02, 0.2, 0.6) if act == "wait" else (2.0, 6.0, 35.0))
        return
    if (replica := shard.awake(name)) is None:
        return
    match act:
        case "read one":
            replica.read(1)
        case "land one":
            replica.land(1)
        case "ask":
            replica.ask(rng.randint(0, 12))
        case "spend":
            spend_all(replica) if rng.random() < 0.8 else replica.spend(rng.randint(1, 3))
        case "queue":
            shard.queue(name, rng.randint(1, 4))
        case "unused":
            shard.use(name, False)
        case "show":
            if ticket := shard.shown(rng):
                shard.come_back(replica, ticket)
        case "withdraw":
            for ticket in rng.sample(sorted(replica.waiting._tickets), min(1, len(replica.waiting))):
                shard.leave(replica, ticket)
        case "end":
            for work in rng.sample(world.running, min(2, len(world.running)) if world.running_units() > 5 else 0):
                replica.end(work)
        case _:
            ACTS[act](replica)


class Shard(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World("abc", limit_units=8, rates=(1.0, 1.01, 0.99))
        self.tickets = 0
        self.tokens: dict[str, str] = {}
        self.world["a"].assigned()
        self.world.run(2.0)

    def awake(self, name: str) -> Replica | None:
        replica = self.world[name]
        return None if replica.paused else replica

    @rule(seconds=st.sampled_from((0.05, 0.3, 1.1, 1.8, 4.0, 12.0)))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(seconds=st.sampled_from((0.2, 1.0, 3.0)), spends=st.booleans())
    def all_work(self, seconds: float, spends: bool) -> None:
        self.work(seconds, spends=spends)

    @rule(name=NAMES, owns=st.sampled_from("abc-"), first=DOINGS, last=DOINGS, seconds=st.sampled_from((0.3, 1.2, 9.0)))
    def one_lags(self, name: str, owns: str, first: list[str], last: list[str], seconds: float) -> None:
        """One does something, the others work on (and may have another owner), then it goes on with old beliefs."""
        lagging = self.world[name]
        for act in first:
            ACTS[act](lagging)
        was, lagging.paused = lagging.paused, True
        if owns not in ("-", name):
            self.world[owns].assigned()
        self.work(seconds, spends=True)
        lagging.paused = was
        for act in last:
            ACTS[act](lagging)

    @rule(share=st.integers(1, 4))
    def some_end(self, share: int) -> None:
        for work in self.world.running[::share]:
            self.world["a"].end(work)

    def work(self, seconds: float, *, spends: bool) -> None:
        for _ in range(round(seconds / 0.1)):
            self.world.move(0.1, wants=12)
            for replica in self.world.replicas.values():
                if spends and not replica.paused:
                    spend_all(replica)
                    use_all(replica)

    @rule(name=NAMES, most=STEPS, copies=st.booleans())
    def land(self, name: str, most: int, copies: bool) -> None:
        if replica := self.awake(name):
            replica.land(most, copies=copies)

    @rule(data=st.data())
    def late_copy(self, data: st.DataObject) -> None:
        if late := self.world.late:
            self.world.append(late.pop(data.draw(st.integers(0, len(late) - 1))))

    @rule(name=NAMES, most=STEPS)
    def read(self, name: str, most: int) -> None:
        if replica := self.awake(name):
            replica.read(most)

    @rule(name=NAMES, most=STEPS)
    def read_placements(self, name: str, most: int) -> None:
        if replica := self.awake(name):
            replica.read_placements(most)

    @rule(name=NAMES, most=STEPS, copies=st.booleans())
    def send(self, name: str, most: int, copies: bool) -> None:
        if replica := self.awake(name):
            replica.send(most, copies=copies)

    @rule(name=NAMES)
    def turn(self, name: str) -> None:
        if replica := self.awake(name):
            replica.turn()

    @rule(name=NAMES, wants=st.integers(0, 12))
    def ask(self, name: str, wants: int) -> None:
        if replica := self.awake(name):
            replica.ask(wants)

    @rule(name=NAMES, units=st.integers(1, 4))
    def spend(self, name: str, units: int) -> None:
        if replica := self.awake(name):
            replica.spend(units)

    @rule(name=NAMES, refunded=st.booleans())
    def spend_all(self, name: str, refunded: bool) -> None:
        if replica := self.awake(name):
            if refunded and (credit := replica.leases.spend(1, now_s=replica.now_s)) is not None:
                replica.leases.refund(credit, now_s=replica.now_s)
            spend_all(replica)

    @rule(data=st.data(), name=NAMES)
    def end(self, data: st.DataObject, name: str) -> None:
        if self.world.running and (replica := self.awake(name)):
            replica.end(data.draw(st.sampled_from(self.world.running)))

    @rule(name=NAMES, units=st.integers(1, 6))
    def queue(self, name: str, units: int) -> None:
        if replica := self.awake(name):
            replica.queue(f"q{self.tickets}#0", units)
            self.tickets += 1

    @rule(name=NAMES)
    def keep(self, name: str) -> None:
        if replica := self.awake(name):
            replica.keep()

    @rule(name=NAMES, placed=st.booleans())
    def use(self, name: str, placed: bool) -> None:
        if replica := self.awake(name):
            if placed:
                use_all(replica)
            for ticket in replica.waiting.granted(replica.now_s):
                if (grant := replica.waiting.use(ticket, replica.now_s)) and (
                    word := replica.waiting.unused(grant, replica.now_s)
                ):
                    replica.outbox.append(word)

    @rule(data=st.data(), name=NAMES)
    def withdraw(self, data: st.DataObject, name: str) -> None:
        replica = self.awake(name)
        if replica and len(replica.waiting):
            self.leave(replica, data.draw(st.sampled_from(sorted(replica.waiting._tickets))))

    def leave(self, replica: Replica, ticket: str) -> None:
        if word := replica.waiting.withdraw(ticket, replica.now_s):
            replica.outbox.append(word)

    @rule(seed=st.integers(0, 1000), name=NAMES)
    def show(self, seed: int, name: str) -> None:
        """A caller comes back with a token, through any replica."""
        if (replica := self.awake(name)) and (ticket := self.shown(Random(seed))):
            self.come_back(replica, ticket)

    def shown(self, rng: Random) -> str:
        for other in self.world.replicas.values():
            for ticket in other.waiting._tickets:
                if token := other.waiting.token(ticket):
                    self.tokens[ticket] = token
        unused = sorted(ticket for ticket in self.tokens if ticket not in self.world.used)
        return rng.choice(unused) if unused else ""

    def come_back(self, replica: Replica, ticket: str) -> None:
        replica.outbox.append(replica.waiting.show(ticket, self.tokens[ticket], left_s=30.0, now_s=replica.now_s))

    @rule(name=NAMES)
    def assign(self, name: str) -> None:
        """Whoever had it may keep believing that it is the owner."""
        if replica := self.awake(name):
            replica.assigned()

    @rule(name=NAMES, loses=st.booleans())
    def kill(self, name: str, loses: bool) -> None:
        self.world.kill(name, loses=loses)

    @rule(name=NAMES)
    def pause(self, name: str) -> None:
        self.world[name].paused = True

    @rule(name=NAMES)
    def cut(self, name: str) -> None:
        self.world[name].cut = True

    @rule()
    def heal(self) -> None:
        for replica in self.world.replicas.values():
            replica.paused = replica.cut = False

    @rule(seed=st.integers(0, 2**32))
    def storm(self, seed: int) -> None:
        """Many small steps at once, by chance: most faults need several in a row that nobody would think of."""
        rng = Random(seed)
        for _ in range(STORM_STEPS):
            storm_step(self, rng)
            self.never_more_at_large_than_the_limit()
            self.nothing_is_in_hand_but_what_stands_in_the_log()

    @invariant()
    def never_more_at_large_than_the_limit(self) -> None:
        assert self.world.units_at_large() <= self.world.limit_units

    @invariant()
    def nothing_is_in_hand_but_what_stands_in_the_log(self) -> None:
        assert self.world.in_hand() <= self.world.standing

    @invariant()
    def no_ticket_runs_twice(self) -> None:
        assert all(uses == 1 for uses in self.world.used.values())

    def teardown(self) -> None:
        """When faults stop, every ticket gets its turn or its end, and all credit comes back."""
        world = self.world
        for replica in world.replicas.values():
            replica.paused = replica.cut = False
            replica.owns = False
        world.log.extend(world.late)
        world.late.clear()
        world["b"].assigned()
        for _ in range(600):
            world.move(0.1)
            for replica in world.replicas.values():
                use_all(replica)
            for work in list(world.running):
                world["c"].end(work)
        assert not any(len(replica.waiting) for replica in world.replicas.values())
        assert all(replica.leases.state(replica.now_s) == "live" for replica in world.replicas.values())
        owner = world["b"].owner
        assert not owner.line.places
        assert owner.total_units() <= 3 * 2 * 4


TestShard = Shard.TestCase
TestShard.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
