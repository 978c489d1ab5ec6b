"""Shard: who owns a pool's capacity, what a replica may spend of it, and who waits for more.

Everything here is a state machine: records in, records out, time and the log's order as arguments. Each pool, and each
tenant's quota, is a *book*. All records of a book lie on one partition of topic `tickets`, and that log is the only way
between a replica and the owner of its book: whoever needs credit appends a numbered message, the owner reads it and
appends its answer, and the replica has the answer when it reads it there and it is not void (`fence.Fence`). Nobody is
told by an acknowledgement or a call.

**Units.** The units of a pool are KV tokens: a request costs what the ledger counts for it until it ends
(`Entry.kv_tokens`: prompt + estimated output), a pool's capacity is the KV tokens of its ready instances. The units of
a quota are requests. Both are whole numbers, so a book adds up exactly.

**A replica asks** (`leases.Leases`, one for each pool and each tenant's quota that it serves):

    if leases.due(now_s):                                  # every second, and when a spend was refused
        wants = max(floor, 2 * leases.asked)               # floor 0 for a quota: an idle replica holds nothing of it
        append(leases.request(now_s, wants=wants, envelopes=desk.envelopes_written))
    leases.read(record, at, now_s=now_s)                   # every record of the book's partition, in order
    credit = leases.spend(units, now_s=now_s)              # no hop; None: queue, or refuse. credit.degraded: say so
    leases.refund(credit, now_s=now_s)                     # the request was not placed after all
    leases.ended(credit)                                   # degraded work only: its allowance is free again

What is spent must be an entry in a placements envelope before the next `request` (spend, decide, `_write`, in one
step): the request promises that all spent before it lies in envelopes ≤ `envelopes`.

**A request that found no credit waits** (`waiting.Waiting`, one for each pool):

    append(waiting.ask(ticket, ..., now_s=now_s))          # or waiting.show(token, ...), a caller that came back
    append(*waiting.turn(now_s))                           # ≥ 2 a second: keepalives, late grants that go back
    waiting.read(record, at, now_s=now_s)
    for ticket in waiting.granted(now_s):
        grant = waiting.use(ticket, now_s)                 # then place it: the entry is the word that it was used
        waiting.unused(grant)                              # if no placement was written
    waiting.token(ticket), waiting.ahead(ticket), waiting.ended()
    append(waiting.withdraw(ticket, now_s))                # the caller left

`purse.Purse` has both for all books of a replica, `core.credit` says what a decision does with them, and
`adapters.pool_shard` does the asking, reading and appending.

**The owner** (`owner.Owner`, one a book, in the process that holds the partition): `claim` once an assignment (one
record for all books of the partition), `read` for every record, `turn` for what to append next; `limit_units` =
⌊ceiling × capacity⌋ is told by whoever follows the capacity table. `entries` says what placements have told
(`entries.PoolEntries`, `quota.SpentCredit`).

| question | file |
|---|---|
| which records stand | fence |
| what is counted, and until when | book, entries, envelopes, quota |
| who goes next | line |
| what the owner does, and what it wrote and did not read back yet | owner, writer |
| what a replica may spend | leases; of all books, purse |
| what a gateway's tickets do | waiting |
| what a caller holds while it waits | token |
"""
