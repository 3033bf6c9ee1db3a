"""The differential runner itself: it must see what is wrong, and shrink it."""

import llama_cpp
import pytest

from tests.lab.differential import Mismatch, check
from tests.lab.history import Again, Append, Ask, Edit, Eval, History, Unrelated, random_history


class Miscounting(llama_cpp.Llama):
    """Counts one token more than it decoded."""

    def eval(self, tokens):
        super().eval(tokens)
        self.n_tokens += 1


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_stock_itself_passes(tiny_model, arch):
    verdict = check(random_history(1), llama_cpp.Llama, tiny_model(arch))
    assert verdict.requests >= 2
    assert verdict.bit_equal >= 1


def test_a_cut_that_did_not_happen_is_found_and_shrunk(tiny_model, forgetful):
    history = History(
        (
            Ask(Unrelated(new=60, seed=1), take=6),
            Ask(Append(new=10, seed=2), take=6),
            Eval(new=3, seed=3),
            Ask(Edit(percent=30, new=4, seed=4), take=6),
            Ask(Again(back=0), take=3),
        )
    )
    with pytest.raises(Mismatch) as caught:
        check(history, forgetful, tiny_model("mamba"))
    assert "operation 1" in str(caught.value)
    printed = str(caught.value).partition("\nHistory(")[2]
    assert printed.count("Ask(") == 2
    assert "Eval(" not in printed


def test_a_wrong_count_is_found(tiny_model):
    with pytest.raises(Mismatch, match=r"n_tokens is 21, .* expected 20 tokens"):
        check(History((Eval(new=20, seed=1),)), Miscounting, tiny_model("llama"))
