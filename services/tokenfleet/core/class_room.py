"""Class room: whether a request's class may take more of its pool, where the policy shares pools out between classes.

Seen from the tables of one replica: what others placed counts as soon as it is heard of.
"""

import numpy as np

from tokenfleet.core.asked import Asked
from tokenfleet.core.credit import ready
from tokenfleet.core.predict.work import request_work_s, uncached_tokens
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.lending import Holdings, beyond_share
from tokenfleet.core.slomax.spending import SPENT_WINDOW_S


def beyond_class_share(site: Site, asked: Asked) -> str:
    """Why not, empty if it may; empty too where nothing is shared out, or nobody knows how much KV the pool has."""
    terms = asked.policy.slomax.controller
    if not terms.classes:
        return ""
    columns, serving = asked.pool.columns, ready(asked.pool)
    sizes = columns.fixed.kv_total[serving]
    told = sizes[~np.isnan(sizes)]
    if not len(told):
        return ""
    model, name = asked.request.model, asked.classified.request_class
    waiting = site.held.of(model)
    by_class = {of: float(tokens[serving].sum()) for of, tokens in columns.classes_kv.items()}
    if not asked.paces:  # what is held was let in, and goes within moments
        for each in waiting:
            kv_tokens = each.request.prompt_tokens + each.output_tokens
            by_class[each.request_class] = by_class.get(each.request_class, 0.0) + kv_tokens
    kv = Holdings(
        of="KV tokens",
        capacity=float(told.mean()) * len(sizes),
        held=max(float(np.nansum(columns.kv_held[serving])), sum(by_class.values())),
        by_class=by_class,
    )
    spent = site.spending.of(model, asked.now_s)
    time = Holdings(
        of=f"GPU seconds in {SPENT_WINDOW_S:.0f}",
        capacity=SPENT_WINDOW_S * len(sizes),
        held=sum(spent.values()),
        by_class=spent,
        passes=True,
    )
    prompt_tokens = asked.request.prompt_tokens
    uncached = uncached_tokens(prompt_tokens, min(columns.most_hit_tokens, prompt_tokens))
    work_s = request_work_s(uncached, prompt_tokens, asked.output_q50, asked.policy.model(model))
    setting = terms.setting(asked.pool.pool)
    wanting = site.wanting.of(model, asked.now_s) | {each.request_class for each in waiting}
    for need, holds in ((float(asked.kv_tokens), kv), (work_s, time)):
        if why := beyond_share(name, need, holds=holds, setting=setting, terms=terms, wanting=wanting):
            return why
    return ""
