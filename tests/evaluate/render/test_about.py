"""What names stand for."""

from __future__ import annotations

from llamahybrid.evaluate.check import KINDS, WORKLOADS
from llamahybrid.evaluate.render import about
from llamahybrid.evaluate.render.html import html
from tests.evaluate.reports import report, target, workload


def test_each_workload_is_told_and_told_apart_from_those_that_end_as_it_does() -> None:
    for each in WORKLOADS:
        for name in (each.name, f"qwen35: {each.name}"):
            assert (about.workload(name) or "").startswith(" ".join((each.start.__doc__ or "-").split()))
    assert about.workload("chat: thinking stripped") != about.workload("thinking stripped")
    assert about.workload("4 clients: four users each") == (
        f"{about.workload('four users')} 4 clients do so at once."
    )
    assert about.workload("trace.jsonl") is None


def test_models_are_told_where_the_harness_made_them() -> None:
    told = about.models([kind.arch for kind in KINDS])
    assert told is not None
    assert all(f"{kind.arch}: " in told for kind in KINDS)
    assert about.models(["qwen35"]) is None


def test_targets_are_told() -> None:
    assert about.target("stock+ram") == "llama_cpp.Llama with LlamaRAMCache"
    assert about.target("class:/x/y.py:Z") == "a Python class"
    assert about.target("newer") == "newer"


def test_the_page_tells_them() -> None:
    page = html(report(target("stock", workload("five turns")), models=[kind.arch for kind in KINDS]))
    assert "llama_cpp.Llama of llama-cpp-python" in page
    assert "The five prompts of llama.cpp PR 22534" in page
    assert "Models are tiny and random" in page
