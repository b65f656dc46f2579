"""`update`: that all contenders are given the same to learn, and what is made of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from bench import update
from bench.contenders import clotho_update
from bench.contenders.clotho_learn import groups
from bench.contenders.loop import Case
from bench.contenders.process import Contender, Metric
from bench.contenders.rollouts import measured, rollouts
from bench.measurement import Measurement, read
from tests.bench.measured import measurement

SMALL: Case = {
    "model": "embedded", "vocabulary": 384, "prompts": 2, "group": 4, "prompt_tokens": 5, "completion_tokens": 3,
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[Contender], Sequence[Case], int]]:
    """What is to be measured by turns, which is made up instead."""
    calls: list[tuple[Sequence[Contender], Sequence[Case], int]] = []

    def made_up(
        question: str,
        contenders: Sequence[Contender],
        cases: Sequence[Case],
        metrics: Sequence[Metric],
        *,
        repeats: int,
        command: str,
    ) -> list[Measurement]:
        calls.append((contenders, cases, repeats))
        return [
            measurement([1.0] * repeats, contender=who.name, metric=metric.name, unit=metric.unit, **case)
            for case in cases
            for who in contenders
            for metric in metrics
        ]

    monkeypatch.setattr(update, "by_turns", made_up)
    return calls


def test_we_learn_from_the_rollouts_that_the_others_learn_from() -> None:
    """The same tokens in the same order, and the same rewards."""
    sampled, ours = rollouts(SMALL), groups(SMALL)
    assert [list(one.group.prompt.tokens) for one in ours] == sampled.prompts
    assert [list(c.tokens) for one in ours for c in one.group.completions] == sampled.completions
    assert [reward for one in ours for reward in one.rewards] == sampled.rewards
    assert (sampled.group, sampled.prompt_of, sampled.tokens) == (4, [0] * 4 + [1] * 4, 24)


def test_an_update_is_measured_each_time_anew() -> None:
    """Every run learns, and says the same in two ways."""
    once = clotho_update.prepare(SMALL)
    for found in (once(), once()):
        assert found["tokens_per_second"] * found["seconds"] == pytest.approx(24)
        assert found["peak_bytes"] > 0


def test_memory_that_was_held_before_an_update_is_not_its_own() -> None:
    """Nor what an earlier one needed."""
    held = mx.zeros(10**6)
    mx.eval(held)

    def needs(numbers: int) -> int:
        return int(measured(lambda: mx.eval(mx.ones(numbers)), 1)["peak_bytes"])

    assert 4 * 10**5 <= needs(10**5) < 4 * 10**6
    assert needs(10**3) < needs(10**5)
    assert np.array(held).sum() == 0


def test_every_case_trains_as_many_tokens_and_is_measured_once(
    asked: list[tuple[Sequence[Contender], Sequence[Case], int]],
) -> None:
    """Longer completions are fewer, so that the work of the head stays the same."""
    update.measure(5)
    cases = [case for _, cases, _ in asked for case in cases]
    assert len(cases) == len({str(case) for case in cases})
    assert {case["prompts"] * case["group"] * case["completion_tokens"] for case in cases} == {2048}
    assert [repeats for _, _, repeats in asked] == [3, 5, 2]
    assert all(contenders[0] is update.OURS for contenders, _, _ in asked)


def test_a_quick_look_writes_results_of_the_same_form(
    asked: list[tuple[Sequence[Contender], Sequence[Case], int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where it is told to, and says them: a table of speed, and one of memory."""
    path = tmp_path / "results.jsonl"
    assert update.main(["--quick", "--out", str(path)]) == 0
    said = capsys.readouterr().out
    assert said == update.table(read(path)) + "\n"
    assert [line.split(" (")[0] for line in said.splitlines() if line.startswith("**")] == [
        "**tokens per second",
        "**peak bytes",
    ]
    assert {repeats for _, _, repeats in asked} == {1}


def test_memory_can_be_drawn_against_the_vocabulary(
    asked: list[tuple[Sequence[Contender], Sequence[Case], int]], tmp_path: Path
) -> None:
    """In the cases of one model and one length."""
    pytest.importorskip("matplotlib")
    update.draw(update.measure(1), tmp_path / "image.svg")
    assert (tmp_path / "image.svg").read_text().startswith("<?xml")
