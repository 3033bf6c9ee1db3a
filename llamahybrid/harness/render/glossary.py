"""What the names in a report stand for, for those who read it without the docs."""

from __future__ import annotations

from collections.abc import Sequence

_TARGETS = {
    "stock": "llama_cpp.Llama of llama-cpp-python",
    "stock+ram": "llama_cpp.Llama with LlamaRAMCache",
    "stock+disk": "llama_cpp.Llama with LlamaDiskCache",
    "ours": "llamahybrid.Llama",
    "llama-server": "the server of llama.cpp, started anew for each conversation",
    "url": "a server that ran already",
}

_MEMORIES = {
    "qwen35": "a recurrent state beside attention (hybrid)",
    "gemma3": "attention over a sliding window",
    "llama": "plain attention",
}


def target(kind: str) -> str:
    """What a kind of target is."""
    return _TARGETS.get(kind, "a Python class" if kind.startswith("class:") else kind)


def workload(name: str) -> str | None:
    """What happens in a workload of ours, in a sentence; None: it is of a trace, or of another version."""
    from llamahybrid.harness.check import WORKLOADS

    known = [each for each in WORKLOADS if f": {name}".endswith(f": {each.name}")]
    if not known:
        return None
    found = max(known, key=lambda each: len(each.name))
    said = " ".join((found.start.__doc__ or "").split())
    return f"{said} {found.clients} clients do so at once." if found.clients > 1 else said or None


def models(names: Sequence[str]) -> str | None:
    """What the models of `llamahybrid check` are, where it made them itself; None: they are somebody's."""
    from llamahybrid.harness.check import KINDS

    if list(names) != [kind.arch for kind in KINDS]:
        return None
    kinds = "; ".join(f"{kind.arch}: {_MEMORIES[kind.arch]}" for kind in KINDS)
    return f"Models are tiny and random, so texts are gibberish; each has another kind of memory. {kinds}."
