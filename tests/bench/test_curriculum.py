"""`python -m bench curriculum`: the mixture of problems, and rollouts at the target."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import curriculum
from bench.curriculum import CurriculumRun, mixture, ratios, read, rollouts_at, table
from bench.fingerprint import fingerprint
from bench.runs import Record
from clotho.config.load import load_profile


def made(name: str, seed: int, rollouts: float | None) -> CurriculumRun:
    """Return a run of a way of choosing."""
    return CurriculumRun(
        profile="p", curriculum=name, seed=seed, target=0.7, rollouts=rollouts, zero_variance=0.5, updates=10,
        seconds=1.0, accuracy=((0, 0.2),), load=0.5, command="", fingerprint=fingerprint(),
    )  # fmt: skip


def test_half_of_the_mixed_problems_are_useless() -> None:
    """Equally many are solved and too hard; the seed decides which."""
    rates = {str(i): rate for i, rate in enumerate([1.0] * 30 + [0.0] * 20 + [0.1, 0.9] * 40)}
    problems = [{"prompt": prompt} for prompt in rates]
    mixed = mixture(problems, rates, seed=0)
    counts = Counter(rates[problem["prompt"]] for problem in mixed)
    assert (counts[1.0], counts[0.0], counts[0.1] + counts[0.9]) == (20, 20, 40)
    assert mixture(problems, rates, seed=0) == mixed != mixture(problems, rates, seed=1)
    with pytest.raises(ValueError, match="hard problems"):
        mixture(problems, dict.fromkeys(rates, 1.0), seed=0)


@pytest.mark.parametrize(
    ("curve", "rollouts"),
    [
        ([(0, 0.2), (100, 0.6), (200, 0.8), (300, 0.5)], 150.0),
        ([(0, 0.8)], 0.0),
        ([(0, 0.2), (100, 0.7)], 100.0),
        ([(0, 0.2), (100, 0.6)], None),
    ],
)
def test_rollouts_at_the_target_are_interpolated(curve: list[tuple[int, float]], rollouts: float | None) -> None:
    """Between the two evaluations around it."""
    assert rollouts_at(curve, 0.7) == (None if rollouts is None else pytest.approx(rollouts))


def test_runs_are_evaluated_on_the_held_out_problems_of_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with other problems for training would hold out some of them."""
    given: list[str] = []

    def run(arguments: Sequence[str], *, accuracy: float) -> Record:
        given.extend(arguments)
        line = {
            "step": 1, "policy_version": 1, "time/run": 2.0, "groups/trained": 2, "groups/discarded": 2,
            "groups/discarded_by_reason": {"zero_variance": 1},
        }  # fmt: skip
        evaluations = [{"step": 0, "accuracy": 0.5}, {"step": 1, "accuracy": accuracy + 0.1}]
        profile = {"sampling": {"group_size": 8}}
        return Record(metrics=[line], log=[], profile=profile, launched=0.0, evaluations=evaluations)

    monkeypatch.setattr(curriculum, "run_until", run)
    found = curriculum.measure("learn-m3", "uniform", 3, problems=tmp_path / "train.jsonl", target=0.7, flags=())
    own = load_profile("learn-m3").data.heldout
    assert given[given.index("--data.heldout") + 1] == own
    assert found.rollouts == pytest.approx(32 * 0.2 / 0.3)
    assert found.zero_variance == 0.25


def test_the_table_compares_seed_by_seed(tmp_path: Path) -> None:
    """A run that did not reach the target has no ratio."""
    runs = [made("uniform", 0, 1000.0), made("success_rate", 0, 400.0), made("uniform", 1, None)]
    runs.append(made("success_rate", 1, 500.0))
    assert ratios(runs) == {0: pytest.approx(0.4)}
    heading, rule, *rows = [line for line in table(runs).splitlines() if line.startswith("|")]
    assert {len(line.split("|")) for line in (rule, *rows)} == {len(heading.split("|"))}
    assert len(rows) == 3
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in runs))
    assert read(path) == runs


def test_the_exit_status_says_whether_the_bar_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways of choosing get the same problems."""
    seen: list[tuple[str, str]] = []
    rollouts: list[float] = []

    def measured(profile: str, name: str, seed: int, *, problems: Path, **other: Any) -> CurriculumRun:
        seen.append((name, problems.read_text()))
        return made(name, seed, {"uniform": 1000.0, "success_rate": rollouts[-1]}[name])

    def rates(profile: str, samples: int) -> dict[str, float]:
        lines = Path(load_profile(profile).data.train).read_text().splitlines()
        return {json.loads(line)["prompt"]: (0.0, 0.4, 0.5, 1.0)[i % 4] for i, line in enumerate(lines)}

    monkeypatch.setattr(curriculum, "measure", measured)
    monkeypatch.setattr(curriculum, "success_rates", rates)
    arguments = ["--profile", "local-m3", "--seeds", "3", "--out", str(tmp_path / "runs.jsonl")]
    for ours, status in ((600.0, 0), (700.0, 1)):
        rollouts.append(ours)
        assert curriculum.main(arguments) == status
    assert len({text for _, text in seen}) == 1
    assert "success_rate" in capsys.readouterr().out
