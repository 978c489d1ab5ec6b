"""Class room: whether a request's class may take more of its pool, where the policy shares pools out between classes.

Seen from the tables of one replica: what others placed counts as soon as it is heard of.
"""

import numpy as np

from tokenfleet.core.asked import Asked
from tokenfleet.core.credit import ready
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.lending import Holdings, beyond_share


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
    waiting = site.held.of(asked.request.model)
    by_class = {name: float(tokens[serving].sum()) for name, tokens in columns.classes_kv.items()}
    if not asked.paces:  # what is held was let in, and goes within moments
        for each in waiting:
            kv_tokens = each.request.prompt_tokens + each.output_tokens
            by_class[each.request_class] = by_class.get(each.request_class, 0.0) + kv_tokens
    holds = Holdings(
        capacity=float(told.mean()) * len(sizes),
        held=max(float(np.nansum(columns.kv_held[serving])), sum(by_class.values())),
        by_class=by_class,
    )
    return beyond_share(
        asked.classified.request_class,
        asked.kv_tokens,
        holds=holds,
        setting=terms.setting(asked.pool.pool),
        terms=terms,
        wanting=site.wanting.of(asked.request.model, asked.now_s) | {each.request_class for each in waiting},
    )
