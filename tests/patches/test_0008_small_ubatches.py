"""0008: a context whose ubatches are too small for its rollback planes is not made."""

from __future__ import annotations

from capi import Context, continued


def too_small(path):
    try:
        context = Context(path, n_rs_seq=8, n_ubatch=9, n_batch=64)
    except RuntimeError:
        return "refused"
    return context.feed(0, 12)


def just_enough(path):
    shape = {"n_rs_seq": 8, "n_ubatch": 10, "n_batch": 64}
    context = Context(path, **shape)
    context.feed(0, 12)
    return continued(context, path, 12, **shape)


def test_it_is_refused_where_it_is_asked_for(run, tiny_model):
    assert run(too_small, tiny_model("qwen35")) == "refused"
    assert run(just_enough, tiny_model("qwen35")) == 0
