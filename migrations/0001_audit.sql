-- migrate:up

-- What was decided and how it ended, for audit and replay. Both tables are append-only and partitioned by `day`, the
-- UTC day of the label that the record itself carries, so that a record sent twice meets its own key in the same
-- partition, and old days go by dropping partitions. A label without a partition (a clock far off) is in `*_other`.
--
-- Keys: a decision's id is unique within its day, and its label is written once, with the id. An outcome is unique by
-- (request, attempt, kind, at_origin) over all days: inside a day by the key, across midnight by the one writer, which
-- looks at the days beside (adapters/audit_store.py). `at_origin` tells apart the origin's word and the serving site's.

create table decisions (
    day date not null,
    id text not null,
    request text not null,
    attempt bigint not null,
    tenant text not null,
    model text not null,
    request_class text not null,
    verdict text not null,
    reason text not null,
    mode text not null,
    origin text not null,
    site text not null,
    pool text not null,
    target text not null,
    replica text not null,
    policy_revision bigint not null,
    at timestamptz not null,
    body jsonb not null,
    recorded_at timestamptz not null default now(),
    primary key (day, id)
) partition by range (day);
create table decisions_other partition of decisions default;
create index decisions_request on decisions (request);
create index decisions_tenant_at on decisions (tenant, at desc);
create index decisions_at on decisions (at desc);

create table outcomes (
    day date not null,
    request text not null,
    attempt bigint not null,
    kind text not null,
    at_origin boolean not null,
    decision text not null,
    tenant text not null,
    model text not null,
    request_class text not null,
    origin text not null,
    site text not null,
    pool text not null,
    instance text not null,
    replica text not null,
    output_tokens bigint,
    at timestamptz not null,
    body jsonb not null,
    recorded_at timestamptz not null default now(),
    primary key (day, request, attempt, kind, at_origin)
) partition by range (day);
create table outcomes_other partition of outcomes default;
create index outcomes_request on outcomes (request);
create index outcomes_tenant_at on outcomes (tenant, at desc);

-- Rows that PostgreSQL refused: where the record lies, which row of it, and why; never its content.
create table quarantine (
    topic text not null,
    partition integer not null,
    "offset" bigint not null,
    item integer not null,
    reason text not null,
    recorded_at timestamptz not null default now(),
    primary key (topic, partition, "offset", item)
);

-- Partial sums; the greatest version of a key stands. Times are Unix seconds of event time.
create table goodput (
    width_s double precision not null,
    start_s double precision not null,
    request_class text not null,
    tenant text not null,
    pool text not null,
    cluster text not null,
    site text not null,
    partition integer not null,
    version bigint not null,
    goodput_tokens bigint not null,
    output_tokens bigint not null,
    waste_tokens bigint not null,
    prefill_waste_tokens bigint not null,
    unknown_tokens_requests bigint not null,
    met bigint not null,
    missed bigint not null,
    rejected bigint not null,
    excluded bigint not null,
    met_arrived bigint not null,
    offered_arrived bigint not null,
    late_dropped bigint not null,
    gpu_seconds double precision not null,
    cost double precision not null,
    recorded_at timestamptz not null default now(),
    primary key (width_s, start_s, request_class, tenant, pool, cluster, site, partition)
);

-- Partials added up. A pool's cost stands in rows without class and tenant and is borne by the others by output tokens.
create view goodput_sums as
select width_s, start_s, request_class, tenant, pool,
    sum(goodput_tokens)::bigint as goodput_tokens,
    sum(output_tokens)::bigint as output_tokens,
    sum(waste_tokens)::bigint as waste_tokens,
    sum(prefill_waste_tokens)::bigint as prefill_waste_tokens,
    sum(unknown_tokens_requests)::bigint as unknown_tokens_requests,
    sum(met)::bigint as met,
    sum(missed)::bigint as missed,
    sum(rejected)::bigint as rejected,
    sum(excluded)::bigint as excluded,
    sum(met_arrived)::bigint as met_arrived,
    sum(offered_arrived)::bigint as offered_arrived,
    sum(late_dropped)::bigint as late_dropped,
    sum(gpu_seconds) as gpu_seconds,
    sum(cost) as cost
from goodput
group by width_s, start_s, request_class, tenant, pool;

create view goodput_borne as
select sums.*,
    case when bearing then gpu_seconds when pool_output > 0 then pool_gpu_seconds * output_tokens / pool_output else 0 end
        as gpu_seconds_borne,
    case when bearing then cost when pool_output > 0 then pool_cost * output_tokens / pool_output else 0 end
        as cost_borne
from (
    select *,
        request_class = '' and tenant = '' as bearing,
        sum(output_tokens) over pool_window as pool_output,
        sum(gpu_seconds) over pool_window as pool_gpu_seconds,
        sum(cost) over pool_window as pool_cost
    from goodput_sums
    window pool_window as (partition by width_s, start_s, pool)
) as sums
where not bearing or pool_output = 0;

-- The figures of each (window, class, tenant, pool). A rate of nothing is null.
create view goodput_windows as
select width_s, start_s, to_timestamp(start_s) as start_at, request_class, tenant, pool,
    goodput_tokens, output_tokens, waste_tokens, prefill_waste_tokens, unknown_tokens_requests,
    met, missed, rejected, excluded, met_arrived, offered_arrived, late_dropped,
    goodput_tokens / width_s as goodput_tokens_per_s,
    output_tokens / width_s as output_tokens_per_s,
    met::double precision / nullif(met + missed, 0) as attainment_admitted,
    met::double precision / nullif(met + missed + rejected, 0) as attainment_offered,
    met_arrived::double precision / nullif(offered_arrived, 0) as attainment_arrived,
    gpu_seconds_borne as gpu_seconds,
    cost_borne as cost,
    cost_borne * waste_tokens / nullif(output_tokens, 0) as waste_cost,
    cost_borne * 1e6 / nullif(goodput_tokens, 0) as cost_per_million_goodput_tokens
from goodput_borne;

-- The same per class. Idle pools' cost stands under the empty class.
create view goodput_classes as
select width_s, start_s, to_timestamp(start_s) as start_at, request_class,
    sum(goodput_tokens)::bigint as goodput_tokens,
    sum(output_tokens)::bigint as output_tokens,
    sum(waste_tokens)::bigint as waste_tokens,
    sum(goodput_tokens) / width_s as goodput_tokens_per_s,
    sum(met)::double precision / nullif(sum(met + missed), 0) as attainment_admitted,
    sum(met)::double precision / nullif(sum(met + missed + rejected), 0) as attainment_offered,
    sum(met_arrived)::double precision / nullif(sum(offered_arrived), 0) as attainment_arrived,
    sum(gpu_seconds_borne) as gpu_seconds,
    sum(cost_borne) as cost,
    sum(cost_borne) * 1e6 / nullif(sum(goodput_tokens), 0) as cost_per_million_goodput_tokens
from goodput_borne
group by width_s, start_s, request_class;

-- Days are made and dropped by functions of the owner, so that the writer needs no right to alter tables.
create function audit_ensure_day(wanted date) returns void
language plpgsql security definer set search_path = public, pg_temp as $$
declare
    parent text;
begin
    foreach parent in array array['decisions', 'outcomes'] loop
        begin
            execute format('create table if not exists %I partition of %I for values from (%L) to (%L)',
                           parent || '_' || to_char(wanted, 'YYYYMMDD'), parent, wanted, wanted + 1);
        exception
            when check_violation then null;  -- labels of that day came long before it: they are in the other partition
            when duplicate_table or unique_violation then null;  -- two writers at once
        end;
    end loop;
end $$;

create function audit_drop_before(oldest date) returns integer
language plpgsql security definer set search_path = public, pg_temp as $$
declare
    child name;
    dropped integer := 0;
begin
    if oldest >= current_date then
        raise exception 'the present day is not dropped';
    end if;
    for child in
        select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
        where i.inhparent in ('decisions'::regclass, 'outcomes'::regclass)
            and c.relname ~ '_[0-9]{8}$' and to_date(right(c.relname, 8), 'YYYYMMDD') < oldest
    loop
        execute format('drop table %I', child);
        dropped := dropped + 1;
    end loop;
    delete from decisions_other where recorded_at < oldest;
    delete from outcomes_other where recorded_at < oldest;
    delete from quarantine where recorded_at < oldest;
    delete from goodput where recorded_at < oldest;
    return dropped;
end $$;
revoke execute on function audit_ensure_day(date), audit_drop_before(date) from public;

-- The audit process needs no more than this role: `grant tokenfleet_audit to <login>`. It adds rows to decisions,
-- outcomes and quarantine and can't change them; only goodput's sums are replaced by newer versions.
do $$
begin
    create role tokenfleet_audit nologin;
exception
    when duplicate_object or unique_violation then null;
    when insufficient_privilege then
        raise notice 'role tokenfleet_audit was not created: ask an administrator, then run the grants of this file';
end $$;
do $$
begin
    if exists (select from pg_roles where rolname = 'tokenfleet_audit') then
        grant select, insert on decisions, outcomes, quarantine to tokenfleet_audit;
        grant select, insert, update on goodput to tokenfleet_audit;
        grant select on goodput_sums, goodput_borne, goodput_windows, goodput_classes to tokenfleet_audit;
        grant execute on function audit_ensure_day(date), audit_drop_before(date) to tokenfleet_audit;
    end if;
end $$;

-- migrate:down

drop function audit_drop_before(date);
drop function audit_ensure_day(date);
drop view goodput_classes;
drop view goodput_windows;
drop view goodput_borne;
drop view goodput_sums;
drop table goodput;
drop table quarantine;
drop table outcomes;
drop table decisions;
