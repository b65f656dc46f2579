"""The runner of studies: trials in turns, recorded one by one, and tables of them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench.fingerprint import ROOT, working_tree
from bench.runs import Record
from bench.studies import runner
from bench.studies.runner import Arm, Column, Study, average, column, read_trials, run_study
from tests.bench.made_measurements import made_trial


def record(accuracy: float, *, status: int = 0) -> Record:
    """Two steps of two groups of four completions each; the first starts two seconds after the run."""
    steps: list[dict[str, Any]] = [
        {
            "step": step, "policy_version": step, "time/run": 2.0 + step, "time/update": 0.75,
            "time/wait_for_rollouts": 0.25, "groups/trained": 1, "groups/discarded": 1,
            "groups/discarded_by_reason": {"zero_variance": 1}, "completion_length/total": 100,
            "peak_memory_bytes": 10**6 * step, "time/weight_swap": None if step == 1 else 0.5,
        }
        for step in (1, 2)
    ]  # fmt: skip
    evaluations = [{"step": step, "accuracy": accuracy * step / 2} for step in (0, 1, 2)]
    return Record(steps, [], {"sampling": {"group_size": 4}}, 0.0, evaluations, status, elapsed=60.0, cpu_seconds=50.0)


class MadeRuns:
    """Replaces the runs: their accuracy is the value of --rate. failing: a rate without an update."""

    def __init__(self, failing: float | None = None) -> None:
        self.started: list[tuple[Sequence[str], Path]] = []
        self.failing, self.running, self.most, self.drained = failing, 0, 0, 0

    def __call__(self, arguments: Sequence[str], *, root: Path, **_: object) -> MadeRun:
        self.started.append((arguments, root))
        self.running += 1
        self.most = max(self.most, self.running)
        return MadeRun(self, float(arguments[list(arguments).index("--rate") + 1]))

    def order(self) -> list[tuple[str, str, bool]]:
        """Rate and seed of every run, and whether its sources are those of this checkout."""
        words = [(dict(zip(words[::2], words[1::2], strict=True)), root) for words, root in self.started]
        return [(given["--rate"], given["--seed"], root == ROOT) for given, root in words]


class MadeRun:
    """One made-up run, which goes on until it is drained if it has a target to reach."""

    def __init__(self, runs: MadeRuns, rate: float) -> None:
        self._runs, self._rate, self._status = runs, rate, 0

    def __enter__(self) -> MadeRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ended(self, *, wait: bool = False) -> bool:
        return wait or self._rate < 0.9

    def best_accuracy(self) -> float:
        return self._rate

    def drain(self) -> None:
        self._runs.drained += 1
        self._status = 130
        self._rate = 0.8

    def record(self) -> Record:
        if self._rate == self._runs.failing:
            raise subprocess.CalledProcessError(2, [])
        return record(self._rate, status=self._status)

    def close(self) -> None:
        self._runs.running -= 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> MadeRuns:
    """Made-up runs."""
    runs = MadeRuns()
    monkeypatch.setattr(runner, "PipelineRun", runs)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.0)
    return runs


STUDY = Study(
    name="made-up",
    about=None,
    arms=(Arm(name="low", flags=("--rate", "0.2")), Arm(name="high", flags=("--rate", "0.4"), reference="low")),
    flags=("--profile", "local-m3"),
    quick="--steps 1",
    seeds=(0, 1),
    columns=(column("after", "after", compare="ratio"), column("completions", "rollouts")),
    note="A note.",
)


def run(out: Path, *words: str, study: Study = STUDY) -> int:
    """Run the study."""
    return run_study(study, ["--out", str(out), *words])


def test_a_trial_has_the_curve_the_costs_and_the_completions_of_its_run() -> None:
    """Seconds start at the first prompt. Completions of discarded groups count."""
    curve, values = runner.standard_values(record(0.8))
    assert [(point.step, point.seconds, point.rollouts, point.accuracy) for point in curve] == [
        (0, 0.0, 0, 0.0),
        (1, 1.0, 8, 0.4),
        (2, 2.0, 16, 0.8),
    ]
    assert values == {
        "updates": 2, "rollouts": 16, "tokens": 200, "seconds": 2.0, "elapsed": 60.0, "cpu_seconds": 50.0,
        "peak_bytes": 2 * 10**6, "zero_variance": 0.5, "swap_median": 0.5, "swap_longest": 0.5, "before": 0.0,
        "after": 0.8, "average": pytest.approx(0.4),
    }  # fmt: skip


def test_a_stage_of_demonstrations_has_no_completions() -> None:
    """The number of rollouts is that of the stages that sample."""
    both = record(0.8)
    stages = {"stages": [{"kind": "sft"}, {"kind": "rl"}]}
    lines = [line | {"stages/stage": line["step"]} for line in both.metrics]
    curve, values = runner.standard_values(both._replace(profile=both.profile | stages, metrics=lines))
    assert ([point.rollouts for point in curve], values["rollouts"]) == ([0, 0, 8], 8)


def test_arms_take_turns_in_both_orders(made: MadeRuns, tmp_path: Path) -> None:
    """A slow change of the machine touches all of them."""
    assert run(tmp_path / "out.jsonl") == 0
    assert made.order() == [("0.2", "0", True), ("0.4", "0", True), ("0.4", "1", True), ("0.2", "1", True)]


def test_every_arm_runs_next_to_the_sources_of_another_commit(
    made: MadeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has both, and compares them seed by seed."""

    @contextmanager
    def tree(commit: str) -> Iterator[Path]:
        yield tmp_path / commit

    monkeypatch.setattr(runner, "working_tree", tree)
    assert run(tmp_path / "out.jsonl", "--against", "abc", "--arms", "low", "--seeds", "0") == 0
    assert made.order() == [("0.2", "0", True), ("0.2", "0", False)]
    assert "| `low at abc` and `low` | 1 |" in capsys.readouterr().out


def test_trials_in_the_results_file_are_not_repeated(made: MadeRuns, tmp_path: Path) -> None:
    """A measurement that was stopped continues where it stopped, unless everything is to be repeated."""
    path = tmp_path / "results" / "trials.jsonl"
    run(path, "--seeds", "0")
    run(path)
    assert len(made.started) == 4
    run(path, "--again", "--seeds", "0")
    assert len(made.started) == 6
    assert len(read_trials(path)) == 4


def test_arms_with_equal_flags_share_their_trials(made: MadeRuns, tmp_path: Path) -> None:
    """Unless the study prepares different data for them."""
    same = (Arm(name="low", flags=("--rate", "0.2")), Arm(name="the same", flags=("--rate", "0.2")))
    study = replace(STUDY, arms=(*same, Arm(name="other data", data="other", flags=("--rate", "0.2"))))
    run(tmp_path / "out.jsonl", "--seeds", "0", study=study)
    assert len(made.started) == 2
    assert [one.arm for one in study.read(tmp_path / "out.jsonl")] == ["low", "the same", "other data"]


@pytest.mark.parametrize("parallel", [1, 3])
def test_only_so_many_runs_are_started_at_the_same_time(parallel: int, made: MadeRuns, tmp_path: Path) -> None:
    """Every run is closed at its end, so that its files are removed."""
    run(tmp_path / "out.jsonl", "--parallel", str(parallel))
    assert (made.most, made.running) == (parallel, 0)


def test_a_run_without_an_update_does_not_stop_the_others(made: MadeRuns, tmp_path: Path) -> None:
    """The exit status says that the measurement is not complete."""
    made.failing = 0.2
    assert run(tmp_path / "out.jsonl", "--seeds", "0") == 1
    assert [one.arm for one in read_trials(tmp_path / "out.jsonl").values()] == ["high"]


def test_a_run_is_drained_at_its_target(made: MadeRuns, tmp_path: Path) -> None:
    """Its exit status is then no failure."""
    study = replace(STUDY, target=0.9, arms=(Arm(name="learns", flags=("--rate", "0.95")),))
    run(tmp_path / "out.jsonl", "--seeds", "0", study=study)
    assert made.drained == 1
    assert [one.status for one in study.read(tmp_path / "out.jsonl")] == [0]


def test_prepared_files_are_given_to_the_run_and_not_recorded(made: MadeRuns, tmp_path: Path) -> None:
    """They are in a temporary directory."""
    study = replace(STUDY, prepare=lambda arm, seed, scratch: ("--data", str(scratch)))
    run(tmp_path / "out.jsonl", "--seeds", "0", study=study)
    assert all("--data" in words for words, _ in made.started)
    assert all("--data" not in one.flags for one in study.read(tmp_path / "out.jsonl"))


def test_quick_runs_are_small_and_not_kept(
    made: MadeRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their table is printed."""
    monkeypatch.setattr(runner, "results_path", lambda name: tmp_path / name)
    assert run_study(STUDY, ["--quick", "--seeds", "0"]) == 0
    assert all(words[list(words).index("--steps") + 1] == "1" for words, _ in made.started)
    assert list(tmp_path.iterdir()) == []
    assert "| high | 0.400 |" in capsys.readouterr().out


def test_the_quick_form_has_one_seed_and_the_quick_flags_of_its_arm(made: MadeRuns, tmp_path: Path) -> None:
    """Those of an arm come in the place of those of the study."""
    study = replace(STUDY, arms=(Arm(name="usual", flags=("--rate", "0.2")), Arm(name="own", quick="--rate 0.3")))
    assert run_study(study, ["--quick", "--out", str(tmp_path / "out.jsonl")]) == 0
    assert made.order() == [("0.2", "0", True), ("0.3", "0", True)]
    assert ["--steps" in words for words, _ in made.started] == [True, False]


def test_cells_say_how_many_seeds_have_a_value() -> None:
    """A column that no trial fills is left out."""
    trials = [made_trial([0.3, accuracy], seed=seed) for seed, accuracy in enumerate((0.8, 0.5, 0.9))]
    reached = Column(title="reached", value=lambda trial: point.step if (point := trial.reached(0.7)) else None)
    table = runner.rows_of(trials, ["one"], [reached, column("nothing", "nothing")])
    assert table.splitlines()[-1] == "| one | 10 (10 to 10), 2 of 3 seeds | 3 |"
    unreached = runner.rows_of(trials[1:2], ["one"], [reached, column("after", "after")])
    assert unreached.splitlines()[-1] == "| one | 0.500 | 1 |"


@pytest.mark.parametrize(
    ("mine", "shown"),
    [
        ((0.9, 0.8), "**+0.600 (0.100, 0.100)**"),
        ((0.35, 0.25), "+0.050 (0.100, 0.100)"),
        ((0.9,), "+0.650 (0.000, 0.100)"),
    ],
)
def test_a_difference_is_bold_if_it_is_larger_than_both_ranges(mine: tuple[float, ...], shown: str) -> None:
    """And if both arms have several seeds."""
    one = replace(column("after", "after", compare="difference"), middle=statistics.mean)
    ours, theirs = (
        [made_trial([0.1, value], seed=seed) for seed, value in enumerate(values)] for values in (mine, (0.2, 0.3))
    )
    assert runner.comparison(one, ours, theirs) == shown


def test_ratios_are_taken_seed_by_seed() -> None:
    """Seeds that one of the arms lacks are left out."""
    ours, theirs = (
        [made_trial([0.1, value], seed=seed) for seed, value in values.items()]
        for values in ({0: 0.2, 1: 0.4, 7: 0.9}, {1: 0.5, 0: 0.4})
    )
    assert runner.comparison(column("after", "after", compare="ratio"), ours, theirs) == "0.650 (0.500 to 0.800)"


def test_the_average_over_a_run_is_the_area_under_its_learning_curve() -> None:
    """Divided by the number of updates. A curve of one evaluation has its accuracy."""
    assert average(made_trial([0.2, 0.6, 0.8]).curve) == pytest.approx((0.4 * 10 + 0.7 * 10) / 20)
    assert average(made_trial([0.2]).curve) == 0.2


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_working_tree_of_a_commit_exists_until_the_end_of_the_block(tmp_path: Path) -> None:
    """It has the files of the commit, and not the changes after it."""
    named = ("-c", "user.name=one", "-c", "user.email=one@example.com")
    for command in (["init", "-q"], ["add", "."], [*named, "commit", "-q", "-m", "one"]):
        (tmp_path / "profile.toml").write_text("steps = 1")
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "profile.toml").write_text("steps = 2")
    with working_tree("HEAD", clone=tmp_path) as root:
        assert (root / "profile.toml").read_text() == "steps = 1"
    assert not root.exists()
