"""What four clients at once make llamahybrid decode beyond the least possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llamahybrid.evaluate.compare import WORKLOADS
from tests.lab.parallel_oracle import play
from tests.lab.subjects import SUBJECTS

TinyModel = Callable[..., Path]
BOUND = 1.05
SAMPLE = [
    ("qwen35", "thinking stripped"),
    ("qwen35", "chat: regenerate x 6"),
    ("qwen35", "few-shot"),
    ("jamba", "thinking stripped"),
    ("mamba", "few-shot"),
]


@pytest.mark.parametrize(("arch", "workload"), SAMPLE)
def test_four_clients_at_once_decode_hardly_more_than_has_to_be(
    tiny_model: TinyModel, arch: str, workload: str
) -> None:
    subject = SUBJECTS[arch]
    crowd = play(tiny_model(arch, **subject.making), WORKLOADS[workload], **subject.options)
    assert crowd.ratio <= BOUND, crowd.account()
    assert len(crowd.asked) >= 28


def test_four_clients_that_say_the_same_decode_it_once(tiny_model: TinyModel) -> None:
    crowd = play(tiny_model("qwen35"), WORKLOADS["few-shot"], same=True)
    assert crowd.ratio <= BOUND, crowd.account()
    assert sum(crowd.least) < 4 * len(crowd.asked[0].prompt)


def test_what_is_decoded_twice_is_noticed(tiny_model: TinyModel) -> None:
    crowd = play(tiny_model("qwen35"), WORKLOADS["few-shot"], same=True, paging=False)
    assert crowd.ratio > BOUND
