"""`make fuzz` and `make soak` in small."""

import pytest
import typer

import llamahybrid
from tests.lab import fuzz
from tests.lab.differential import check
from tests.lab.history import Reopen, random_history, restarted
from tests.lab.soak import WARM_UP, soak

LEAK = 4 << 20


@pytest.mark.full
def test_a_campaign_prints_the_worst_difference(capsys):
    fuzz.main(seconds=1, seed=1, arch=["mamba"])
    assert "worst difference" in capsys.readouterr().out


def test_a_history_of_restarts_goes_on_from_disk(tiny_model):
    history = random_history(1, length=10)
    restarts = sum(isinstance(each, Reopen) for each in restarted(history).operations)
    assert restarts >= 9
    assert check(restarted(history), llamahybrid.Llama, tiny_model("mamba")).from_disk > 0


@pytest.mark.full
def test_a_campaign_ends_at_a_mismatch_and_prints_a_short_history(forgetful, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "load", lambda name: forgetful)
    with pytest.raises(typer.Exit):
        fuzz.main(seconds=600, seed=1, arch=["mamba"])
    printed = capsys.readouterr().out
    assert "seed " in printed
    assert "History(" in printed
    assert printed.count("Ask(") <= 3


@pytest.mark.full
@pytest.mark.xdist_group("serial")
def test_a_soak_counts_what_the_cache_does_not_hold(tiny_model):
    result = soak(tiny_model("mamba"), llamahybrid.Llama, seconds=0, seed=1)
    assert result.histories == WARM_UP + 1
    assert result.verdict.requests > result.histories
    assert result.growth < LEAK
