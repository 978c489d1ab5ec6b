-- migrate:up

-- Every policy file that was published: put into force, or tried on a share of requests. A promoted canary has two rows.
-- `reason` says why: for the end of a canary, what its judge or operator found. The key makes a record sent twice one
-- row; `sha256` is part of it because a broker that lost its log lets numbers be given out again.
create table policy_revisions (
    revision bigint not null,
    canary boolean not null,
    sha256 text not null,
    published_by text not null,
    reason text not null,
    canary_share double precision not null,
    canary_for_s double precision not null,
    at timestamptz not null,
    toml text not null,
    recorded_at timestamptz not null default now(),
    primary key (revision, canary, sha256)
);

do $$
begin
    if exists (select from pg_roles where rolname = 'tokenfleet_audit') then
        grant select, insert on policy_revisions to tokenfleet_audit;
    end if;
end $$;

-- migrate:down

drop table policy_revisions;
