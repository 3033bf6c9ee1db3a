"""`make fuzz` and `make soak` in small."""

import pytest
import typer

import llamahybrid
from tests.lab import fuzz
from tests.lab.campaign import sweep
from tests.lab.differential import check
from tests.lab.history import Reopen, random_history, restarted


@pytest.mark.full
def test_a_campaign_prints_the_worst_difference(capsys):
    sweep(fuzz.play, ["mamba"], seconds=1, seed=1)
    assert "worst difference" in capsys.readouterr().out


def test_a_history_of_restarts_goes_on_from_disk(tiny_model):
    history = random_history(1, length=10)
    restarts = sum(isinstance(each, Reopen) for each in restarted(history).operations)
    assert restarts >= 9
    assert check(restarted(history), llamahybrid.Llama, tiny_model("mamba")).from_disk > 0


@pytest.mark.full
def test_a_campaign_ends_at_a_mismatch_and_prints_a_short_history(forgetful, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "Llama", forgetful)
    with pytest.raises(typer.Exit):
        sweep(fuzz.play, ["mamba"], seconds=600, seed=1)
    printed = capsys.readouterr().out
    assert "seed " in printed
    assert "History(" in printed
    assert printed.count("Ask(") <= 3


@pytest.mark.full
@pytest.mark.xdist_group("serial")
def test_histories_on_one_model_keep_to_the_budget_and_leave_no_memory_behind(tiny_model):
    life = fuzz.one_life(tiny_model("qwen35", **fuzz.LARGE["qwen35"]), 1, until=0, least=20)
    assert life.verdict.requests > life.histories
    assert life.evictions > 0
    assert life.budget / 2 < life.held <= life.budget
    assert life.grown <= life.allowed
