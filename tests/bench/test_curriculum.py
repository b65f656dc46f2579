"""`python -m bench curriculum`: the mixture of problems, and rollouts at the target."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench import curriculum
from bench.curriculum import CurriculumRun, mixture, ratios, read, rollouts_at, store, table
from bench.fingerprint import fingerprint
from bench.runs import Record
from profiles.times_table_maker.problems import long_multiplication
from training_run.profile.load import load_profile


def made(name: str, seed: int, rollouts: float | None, too_hard: str = "too long") -> CurriculumRun:
    """Return a run of a way of choosing."""
    return CurriculumRun(
        too_hard=too_hard, curriculum=name, seed=seed, target=0.7, rollouts=rollouts, zero_variance=0.5, updates=10,
        seconds=1.0, accuracy=((0, 0.2),), load=0.5, command="", fingerprint=fingerprint(),
    )  # fmt: skip


def test_half_of_the_mixed_problems_are_useless() -> None:
    """Equally many are solved and too hard; the seed decides which."""
    rates = {str(i): rate for i, rate in enumerate([1.0] * 30 + [0.0] * 20 + [0.1, 0.9] * 40)}
    problems = [{"prompt": prompt} for prompt in rates]

    def mixed(seed: int) -> list[dict[str, Any]]:
        return mixture(problems, rates, too_hard="never solved", seed=seed)

    counts = Counter(rates[problem["prompt"]] for problem in mixed(0))
    assert (counts[1.0], counts[0.0], counts[0.1] + counts[0.9]) == (20, 20, 40)
    assert mixed(0) == mixed(0) != mixed(1)
    with pytest.raises(ValueError, match="hard problems"):
        mixture(problems, dict.fromkeys(rates, 1.0), too_hard="never solved", seed=0)


def test_problems_that_are_too_long_take_more_tokens_than_a_completion_has() -> None:
    """They replace the problems that were never solved, which are among the others."""
    rates = {str(i): rate for i, rate in enumerate([1.0] * 20 + [0.0] * 30 + [0.5] * 30)}
    mixed = mixture([{"prompt": prompt} for prompt in rates], rates, too_hard="too long", seed=0)
    long = [problem for problem in mixed if problem["prompt"] not in rates]
    assert len(long) == 20
    assert len([problem for problem in mixed if rates.get(problem["prompt"]) == 1.0]) == 20
    profile = load_profile("learn-m3")
    tokenizer = Tokenizer.from_file(str(Path(profile.model.path, "tokenizer.json")))
    for problem in long:
        number, row = (int(text) for text in re.findall(r"\d+", problem["prompt"]))
        work, answer = long_multiplication(number, row)
        assert answer == problem["answer"] == str(number * row)
        text = f"<think>{','.join(work)}</think><answer>{answer}"
        assert len(tokenizer.encode(text).ids) > profile.sampling.max_tokens


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
    found = curriculum.measure("too long", "uniform", 3, problems=tmp_path / "train.jsonl", target=0.7, flags=())
    own = load_profile("learn-m3").data.heldout
    assert given[given.index("--data.heldout") + 1] == own
    assert found.rollouts == pytest.approx(32 * 0.2 / 0.3)
    assert found.zero_variance == 0.25


def test_the_table_compares_seed_by_seed(tmp_path: Path) -> None:
    """For each kind of too hard problems. A run that did not reach the target counts as infinitely long."""
    runs = [made("uniform", 0, 1000.0), made("success_rate", 0, 400.0), made("uniform", 1, None)]
    runs += [made("success_rate", 1, 500.0), made("uniform", 0, 900.0, "never solved")]
    runs += [made("uniform", 2, 900.0), made("success_rate", 2, None), made("uniform", 3, None)]
    runs.append(made("success_rate", 3, None))
    found = ratios([run for run in runs if run.too_hard == "too long"])
    assert found == {0: pytest.approx(0.4), 1: 0.0, 2: math.inf}
    heading, rule, *rows = [line for line in table(runs).splitlines() if line.startswith("|")]
    assert {len(line.split("|")) for line in (rule, *rows)} == {len(heading.split("|"))}
    assert len(rows) == 4
    path = tmp_path / "runs.jsonl"
    for run in (*runs, runs[0]):
        store(run, path)
    assert read(path) == [*runs[1:], runs[0]]


def test_the_exit_status_says_whether_the_bar_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways of choosing get the same problems. Every kind of too hard problems must meet it."""
    seen: list[str] = []
    rollouts: list[float] = []

    def measured(too_hard: str, name: str, seed: int, *, problems: Path, **other: Any) -> CurriculumRun:
        seen.append(problems.read_text())
        ours = rollouts[-1] if too_hard == "too long" else 500.0
        return made(name, seed, {"uniform": 1000.0, "success_rate": ours}[name], too_hard)

    def rates(samples: int) -> dict[str, float]:
        lines = Path(load_profile("learn-m3").data.train).read_text().splitlines()
        return {json.loads(line)["prompt"]: (0.0, 0.4, 0.5, 1.0)[i % 4] for i, line in enumerate(lines)}

    monkeypatch.setattr(curriculum, "measure", measured)
    monkeypatch.setattr(curriculum, "success_rates", rates)
    arguments = ["--seeds", "3", "--out", str(tmp_path / "runs.jsonl")]
    for ours, status in ((600.0, 0), (700.0, 1)):
        rollouts.append(ours)
        assert curriculum.main(arguments) == status
    assert len(set(seen)) == len(curriculum.TOO_HARD)
    assert "success_rate" in capsys.readouterr().out
