-- migrate:up

-- Few decisions are sampled for shadows; this finds them.
create index decisions_shadowed on decisions (policy_revision) where body @> '{"shadows": [{}]}';

-- What each shadow would have done, under each policy revision that named it. Regret is the predicted time to first
-- token at the shadow's choice minus that at the decision's, under the decision's weights: below 0 the shadow's is
-- earlier. Tokens are of those decisions whose outcome told how much was cached: `available` on the best instance able,
-- `captured` where the decision went, `shadow_captured` where the shadow would have gone, `delivered` by the engine.
create view shadow_regret as
select policy_revision, shadow,
    count(*) as decisions,
    count(*) filter (where instance <> target) as differing,
    avg(regret_s) as mean_regret_s,
    avg(decision_regret_s) as mean_decision_regret_s,
    count(delivered) as told,
    coalesce(sum(available) filter (where delivered is not null), 0)::bigint as available_tokens,
    coalesce(sum(captured) filter (where delivered is not null), 0)::bigint as captured_tokens,
    coalesce(sum(shadow_captured) filter (where delivered is not null), 0)::bigint as shadow_captured_tokens,
    coalesce(sum(delivered), 0)::bigint as delivered_tokens
from (
    select d.policy_revision, d.target, s.shadow, s.instance, s.regret_s, s.hit_tokens as shadow_captured,
        (d.body -> 'regret' ->> 'ttft_s')::double precision as decision_regret_s,
        (d.body -> 'regret' ->> 'available_tokens')::bigint as available,
        (d.body -> 'regret' ->> 'captured_tokens')::bigint as captured,
        (select max((o.body ->> 'cached_tokens')::bigint) from outcomes o
            where o.request = d.request and o.decision = d.id) as delivered
    from decisions d,
        jsonb_to_recordset(d.body -> 'shadows')
            as s (shadow text, instance text, regret_s double precision, hit_tokens bigint)
    where d.body @> '{"shadows": [{}]}' and d.verdict = 'admit'
) as sampled
group by policy_revision, shadow;

do $$
begin
    if exists (select from pg_roles where rolname = 'tokenfleet_audit') then
        grant select on shadow_regret to tokenfleet_audit;
    end if;
end $$;

-- migrate:down

drop view shadow_regret;
drop index decisions_shadowed;
