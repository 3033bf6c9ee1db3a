"""Code that nobody called is told from code that somebody did."""

import gc
import threading

import pytest

from llamahybrid.request.finalisers import collecting, in_finaliser


class Cycle:
    """Says what its finaliser finds, in its own thread and in another one."""

    def __init__(self, found):
        self.found, self.me = found, self

    def __del__(self):
        thread = threading.Thread(target=lambda: self.found.append(collecting()))
        thread.start()
        thread.join(20)
        self.found += [collecting(), in_finaliser()]


def test_what_the_collector_finalises_knows_it_and_no_other_thread_takes_itself_for_it():
    found = []
    Cycle(found)
    gc.collect()
    assert found == [False, True, True]
    assert not collecting()


def test_what_goes_with_its_last_reference_is_called_by_whoever_let_go():
    found = []
    alone = Cycle(found)
    alone.me = None
    del alone
    assert found == [False, False, False]


def asked_below(*modules):
    """`in_finaliser()` as the last of these modules would ask, each called by the one before."""
    call = in_finaliser
    for name in reversed(modules):
        space = {"__name__": name, "call": call}
        exec("def run():\n    return call()", space)
        call = space["run"]
    return call()


GATE = "llamahybrid.request.gate"


@pytest.mark.parametrize(
    ("modules", "busy"),
    [
        (["__main__", "llamahybrid.llama", GATE], False),
        (["llamahybrid.request.runner", GATE], True),
        (["llamahybrid.request.checkpoints", GATE], True),
        (["llamahybrid.request.stoppable", GATE], True),
        (["llamahybrid.memory.sequence", "numpy", GATE], True),
        (["llamahybrid.prompt_cache.tree", "__main__", "llamahybrid.llama", GATE], True),
        (["llamahybrid.speculation.drafts", GATE], True),
        (["llamahybrid.capi.calls", GATE], True),
        ([GATE, GATE], False),  # its own steps are what it asks about
        (["llamahybrid.request.requests", GATE], False),
        ([None, GATE], False),
    ],
)
def test_what_runs_in_the_middle_of_our_own_code_was_not_called_by_it(modules, busy):
    assert asked_below(*modules) is busy
