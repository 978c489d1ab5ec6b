-- migrate:up

-- Batch work that was handed in and waits, durably, for its turn: one row an attempt, whoever hands it in and however
-- often. `deadline` is on this server's clock. States: `waiting` from `not_before` on for a grant, which moves it when it
-- has gone unused; `granted` until `granted_until`, or placed since `used_at` by `decision`; then `done`, `withdrawn`
-- (it ended otherwise, `ended_as` says how), or `expired`: its deadline passed first. `will_miss`: beside those that
-- can be in time it can't. Each change of a grant bears the `epoch` of the owner that made it.
create table batch_tickets (
    tenant text not null,
    request text not null,
    attempt integer not null,
    site text not null,
    model text not null,
    kv_tokens bigint not null,
    gpu_s double precision not null,
    deadline timestamptz not null,
    state text not null default 'waiting'
        check (state in ('waiting', 'granted', 'done', 'withdrawn', 'expired')),
    will_miss boolean not null default false,
    unused integer not null default 0,
    epoch bigint,
    decision text not null default '',
    ended_as text not null default '',
    handed_in_at timestamptz not null default now(),
    not_before timestamptz not null default now(),
    granted_until timestamptz,
    used_at timestamptz,
    ended_at timestamptz,
    primary key (tenant, request, attempt)
);
create index batch_tickets_line on batch_tickets (site, model, will_miss, deadline) where state = 'waiting';
create index batch_tickets_granted on batch_tickets (site, model, deadline) where state = 'granted';
create index batch_tickets_ended on batch_tickets (site, ended_at) where ended_at is not null;

-- Who grants the tickets of a pool. An owner that another one has followed finds its epoch gone and grants nothing.
create table batch_owners (
    site text not null,
    model text not null,
    owner text not null,
    epoch bigint not null,
    renewed_at timestamptz not null default now(),
    primary key (site, model)
);

-- The tickets by pool, tenant and state. `late`: ended past their deadlines, or expired.
create view batch_backlog as
select site, model, tenant, state,
    count(*) as tickets,
    sum(gpu_s) as gpu_s,
    min(deadline) as first_deadline,
    count(*) filter (where will_miss and state = 'waiting') as will_miss,
    count(*) filter (where state = 'expired' or (state = 'done' and ended_at > deadline)) as late
from batch_tickets
group by site, model, tenant, state;

-- A decide process needs no more than this role: `grant tokenfleet_decide to <login>`.
do $$
begin
    create role tokenfleet_decide nologin;
exception
    when duplicate_object or unique_violation then null;
    when insufficient_privilege then
        raise notice 'role tokenfleet_decide was not created: ask an administrator, then run the grants of this file';
end $$;
do $$
begin
    if exists (select from pg_roles where rolname = 'tokenfleet_decide') then
        grant select, insert, update, delete on batch_tickets to tokenfleet_decide;
        grant select, insert, update on batch_owners to tokenfleet_decide;
    end if;
    if exists (select from pg_roles where rolname = 'tokenfleet_audit') then
        grant select on batch_tickets, batch_owners, batch_backlog to tokenfleet_audit;
    end if;
end $$;

-- migrate:down

drop view batch_backlog;
drop table batch_owners;
drop table batch_tickets;
