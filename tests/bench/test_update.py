"""`update`: equal rollouts for all contenders, and tables of their results."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from bench import update
from bench.contenders import clotho_update
from bench.contenders.rollouts import measured, rollouts
from bench.contenders.scored_groups import groups
from bench.contenders.worker import Case
from bench.measurement import read
from tests.bench.made_measurements import Calls, made_up

SMALL: Case = {
    "model": "embedded", "vocabulary": 384, "prompts": 2, "group": 4, "prompt_tokens": 5, "completion_tokens": 3,
}  # fmt: skip


@pytest.fixture
def measured_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces the measurement and records its arguments."""
    calls: Calls = []
    monkeypatch.setattr(update, "measure_interleaved", made_up(calls))
    return calls


def test_all_contenders_train_on_the_same_rollouts() -> None:
    """The same tokens in the same order, and the same rewards."""
    sampled, ours = rollouts(SMALL), groups(SMALL)
    assert [list(one.group.prompt.tokens) for one in ours] == sampled.prompts
    assert [list(c.tokens) for one in ours for c in one.group.completions] == sampled.completions
    assert [reward for one in ours for reward in one.rewards] == sampled.rewards
    assert (sampled.group, sampled.prompt_of, sampled.tokens) == (4, [0] * 4 + [1] * 4, 24)


def test_an_update_can_be_measured_repeatedly() -> None:
    """Every update is applied, and rate and time agree."""
    once = clotho_update.prepare(SMALL)
    for found in (once(), once()):
        assert found["tokens_per_second"] * found["seconds"] == pytest.approx(24)
        assert found["peak_bytes"] > 0


def test_peak_memory_excludes_earlier_allocations() -> None:
    """Both arrays that exist and peaks of earlier updates."""
    held = mx.zeros(10**6)
    mx.eval(held)

    def needs(numbers: int) -> int:
        return int(measured(lambda: mx.eval(mx.ones(numbers)), 1)["peak_bytes"])

    assert 4 * 10**5 <= needs(10**5) < 4 * 10**6
    assert needs(10**3) < needs(10**5)
    assert np.array(held).sum() == 0


def test_every_case_has_the_same_number_of_tokens(measured_calls: Calls) -> None:
    """Longer completions are fewer. Each case is measured once."""
    update.measure(5)
    cases = [case for _, cases, _ in measured_calls for case in cases]
    assert len(cases) == len({str(case) for case in cases})
    assert {case["prompts"] * case["group"] * case["completion_tokens"] for case in cases} == {2048}
    assert [repeats for _, _, repeats in measured_calls] == [3, 5, 2]
    assert all(contenders[0] is update.OURS for contenders, _, _ in measured_calls)


def test_quick_mode_writes_results_of_the_same_format(
    measured_calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints a table of speed and a table of memory."""
    path = tmp_path / "results.jsonl"
    assert update.main(["--quick", "--out", str(path)]) == 0
    expected = capsys.readouterr().out
    assert expected == update.table(read(path)) + "\n"
    assert [line.split(" (")[0] for line in expected.splitlines() if line.startswith("**")] == [
        "**tokens per second",
        "**peak bytes",
    ]
    assert {repeats for _, _, repeats in measured_calls} == {1}


def test_long_completions_can_be_measured_alone(
    measured_calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clotho on two completions per case, with the longest turn; other results of the file stay."""
    path = str(tmp_path / "results.jsonl")
    update.main(["--quick", "--out", path])
    update.main(["--only", "long", "--repeats", "2", "--out", path])
    contenders, cases, repeats = measured_calls[-1]
    assert (contenders, repeats) == ([update.OURS], 2)
    assert [case["completion_tokens"] for case in cases] == [1024, 2048, 4096, 8192, 16_384]
    assert "longest turn seconds" in capsys.readouterr().out
    assert len(read(Path(path))) > len(cases) * 4


def test_memory_can_be_drawn_against_the_vocabulary(measured_calls: Calls, tmp_path: Path) -> None:
    """For the cases of one model and one length."""
    pytest.importorskip("matplotlib")
    update.draw(update.measure(1), tmp_path / "image.svg")
    assert (tmp_path / "image.svg").read_text().startswith("<?xml")
