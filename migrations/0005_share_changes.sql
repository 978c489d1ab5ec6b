-- migrate:up

-- What each policy revision of the controller changed of a pool's class shares and admission ceiling: from what
-- (`before`) to what (`after`), on the windows until `window_end`, and why. The file is in policy_revisions; the key
-- begins as that table's does.
create table share_changes (
    revision bigint not null,
    sha256 text not null,
    pool text not null,
    kind text not null,
    before jsonb not null,
    after jsonb not null,
    why text not null,
    window_end timestamptz not null,
    recorded_at timestamptz not null default now(),
    primary key (revision, sha256, pool)
);

do $$
begin
    if exists (select from pg_roles where rolname = 'tokenfleet_audit') then
        grant select, insert on share_changes to tokenfleet_audit;
    end if;
end $$;

-- migrate:down

drop table share_changes;
