"""Trials: runs side by side, recorded one by one, and continued after a stop."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench import trials
from bench.fingerprint import ROOT, working_tree
from bench.runs import Record
from bench.trials import SEARCH_SEED, Job, Method, Outcome, Plan, TrialBenchmark, merged
from tests.bench.made_measurements import HERE

COMMON = ("--profile", "local-m3", "--steps", "3")


def record(accuracy: float, *, status: int = 0, weights: str = "") -> Record:
    """Two steps of two groups of four completions each; the first starts two seconds after the run."""
    steps: list[dict[str, Any]] = [
        {
            "step": step, "policy_version": step, "time/run": 2.0 + step, "time/update": 0.75,
            "time/wait_for_rollouts": 0.25, "groups/trained": 1, "groups/discarded": 1,
            "completion_length/total": 100, "peak_memory_bytes": 10**6 * step, "weights_hash": f"{step} {weights}",
        }
        for step in (1, 2)
    ]  # fmt: skip
    evaluations = [
        {"step": step, "accuracy": accuracy * step / 2, "pass_at": {"8": {"value": accuracy}}} for step in (0, 1, 2)
    ]
    return Record(steps, [], {"sampling": {"group_size": 4}}, 0.0, evaluations, status, elapsed=60.0, cpu_seconds=50.0)


class MadeRuns:
    """Starts runs whose accuracy is their learning rate; they end when `limit` are running or none is left to start.

    `failing`: a learning rate without an update. `weights`: what the sources at ROOT compute. `earlier`: other sources.
    """

    def __init__(self, failing: float | None = None, weights: str = "", earlier: str = "") -> None:
        self.weights, self.earlier = weights, earlier
        self.started: list[Sequence[str]] = []
        self.running = self.most = self.closed = 0
        self.failing = failing

    def __call__(self, arguments: Sequence[str], root: Path) -> MadeRun:
        self.started.append(arguments)
        self.running += 1
        self.most = max(self.most, self.running)
        return MadeRun(self, arguments, self.weights if root == ROOT else self.earlier)

    def seeds(self) -> list[int]:
        """The seeds of the started runs."""
        return [int(arguments[list(arguments).index("--seed") + 1]) for arguments in self.started]


class MadeRun:
    """One made-up run."""

    def __init__(self, runs: MadeRuns, arguments: Sequence[str], weights: str) -> None:
        self._runs, self._weights = runs, weights
        self._rate = float(dict(zip(arguments[::2], arguments[1::2], strict=True)).get("--rate", "0.5"))

    def ended(self) -> bool:
        """At once."""
        return True

    def record(self) -> Record:
        """The accuracy is the learning rate."""
        if self._rate == self._runs.failing:
            raise subprocess.CalledProcessError(2, [])
        return record(self._rate, weights=self._weights)

    def close(self) -> None:
        """Count."""
        self._runs.running -= 1
        self._runs.closed += 1


def plan(path: Path, *methods: Method, seeds: Sequence[int] = (0, 1)) -> Plan:
    """A plan with one method by default."""
    return Plan(methods or [Method(name="one", flags=("--rate", "0.5"))], seeds, common=COMMON, path=path)


def run(made: MadeRuns, todo: Plan, parallel: int = 2) -> bool:
    """Run a plan with made-up runs."""
    return todo.run(parallel, made)  # type: ignore[arg-type]  # made-up processes


def test_a_trial_has_the_curve_the_costs_and_the_completions_of_its_run() -> None:
    """Seconds start at the first prompt. Completions of discarded groups count."""
    job = Job(method="one", flags=COMMON, seed=3)
    trial = trials.summarise(job, record(0.8), 2, "sources", HERE)
    assert [(point.step, point.seconds, point.rollouts, point.accuracy) for point in trial.curve] == [
        (0, 0.0, 0, 0.0),
        (1, 1.0, 8, 0.4),
        (2, 2.0, 16, 0.8),
    ]
    assert (trial.before, trial.after, trial.updates, trial.rollouts, trial.tokens) == (0.0, 0.8, 2, 16, 200)
    assert (trial.seconds, trial.elapsed, trial.cpu_seconds, trial.peak_bytes) == (2.0, 60.0, 50.0, 2 * 10**6)
    assert (trial.first_weights, trial.pass_at) == (("1 ", "2 "), {"8": 0.8})
    assert trial.command == "python pipeline.py --profile local-m3 --steps 3 --seed 3"
    reached = trial.reached(0.4)
    assert reached is not None
    assert reached.step == 1
    assert trial.reached(0.81) is None


def test_trials_in_the_results_file_are_not_repeated(tmp_path: Path) -> None:
    """A measurement that was stopped continues where it stopped."""
    path = tmp_path / "results" / "trials.jsonl"
    assert run(made := MadeRuns(), plan(path, seeds=[0]))
    assert run(made, plan(path, seeds=[0, 1]))
    assert made.seeds() == [0, 1]
    assert [trial.seed for trial in trials.read_trials(path)] == [0, 1]


@pytest.mark.parametrize(
    ("present", "earlier", "sources_of_commit", "checks", "repeated"),
    [
        ("same", "", "before", [1], []),
        ("other", "same", "before", [1, 1], [0, 1]),
        ("of this processor", "of this processor", "before", [1, 1], []),
        ("of this processor", "of this processor", "without uncommitted changes", [1], [0, 1]),
    ],
)
def test_trials_of_other_sources_count_if_the_present_sources_compute_the_same_weights(
    present: str,
    earlier: str,
    sources_of_commit: str,
    checks: list[int],
    repeated: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One short run per method decides, and on another processor a second one with the sources of the trial."""
    path = tmp_path / "trials.jsonl"
    monkeypatch.setattr(trials, "training_sources", lambda *_: "before")
    run(MadeRuns(weights="same"), plan(path))
    monkeypatch.setattr(trials, "training_sources", lambda root=ROOT: "after" if root == ROOT else sources_of_commit)
    monkeypatch.setattr(trials, "working_tree", lambda commit: nullcontext(tmp_path / commit))
    assert "fewer if 1 methods" in plan(path, seeds=range(3)).describe(2)
    run(made := MadeRuns(weights=present, earlier=earlier), plan(path, seeds=range(3)))
    assert made.seeds() == [*checks, *repeated, 2]
    assert ["--steps", str(trials.CHECKED_UPDATES)] == made.started[0][2:4]
    (found,) = trials.outcomes([Method(name="one", flags=("--rate", "0.5"))], COMMON, path)
    assert [trial.sources for trial in found.trials] == [*["after" if repeated else "before"] * 2, "after"]


def test_trials_of_other_sources_are_checked_until_their_seed_is_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A repeated seed of the same method says nothing about the other seeds."""
    path = tmp_path / "trials.jsonl"
    for sources, seeds in (("before", [0, 1]), ("after", [0])):
        monkeypatch.setattr(trials, "training_sources", lambda *_, here=sources: here)
        run(MadeRuns(weights=f"of seeds {seeds}"), plan(path, seeds=seeds))
    (unchecked,) = plan(path, seeds=[0, 1, 2]).unchecked()
    assert (unchecked.sources, unchecked.seed) == ("before", 1)
    assert plan(path, seeds=[0]).unchecked() == []


def test_trials_of_a_commit_that_the_clone_does_not_have_are_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the present sources do not reproduce their weights."""
    path = tmp_path / "trials.jsonl"
    monkeypatch.setattr(trials, "training_sources", lambda *_: "before")
    run(MadeRuns(weights="same"), plan(path))
    monkeypatch.setattr(trials, "training_sources", lambda *_: "after")
    run(made := MadeRuns(weights="other"), plan(path))
    assert made.seeds() == [1, 0, 1]


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


def test_methods_with_equal_flags_share_their_trials(tmp_path: Path) -> None:
    """Both have an outcome."""
    path = tmp_path / "trials.jsonl"
    methods = [Method(name="profile"), Method(name="rank 16 (profile)")]
    run(made := MadeRuns(), plan(path, *methods))
    assert made.seeds() == [0, 1]
    assert [one.method.name for one in trials.outcomes(methods, COMMON, path)] == ["profile", "rank 16 (profile)"]


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_only_so_many_runs_are_started_at_the_same_time(parallel: int, tmp_path: Path) -> None:
    """Every run is closed at its end, so that its files are removed."""
    run(made := MadeRuns(), plan(tmp_path / "trials.jsonl", seeds=range(5)), parallel)
    assert made.most == parallel
    assert made.closed == 5


def test_runs_are_ended_with_the_measurement(tmp_path: Path) -> None:
    """Whatever interrupts it."""
    jobs = [Job(method="one", flags=COMMON, seed=seed) for seed in range(3)]
    made = MadeRuns()
    ended = trials.run_side_by_side(jobs, 2, "sources", made)  # type: ignore[arg-type]  # made-up processes
    next(ended)
    ended.close()  # type: ignore[attr-defined]  # a generator
    assert made.running == 0
    assert len(made.started) == 2


def test_a_run_without_an_update_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The measurement reports that it is not complete."""
    path = tmp_path / "trials.jsonl"
    methods = [Method(name="bad", flags=("--rate", "0.1")), Method(name="good", flags=("--rate", "0.5"))]
    assert not run(MadeRuns(failing=0.1), plan(path, *methods, seeds=[0]))
    assert [trial.method for trial in trials.read_trials(path)] == ["good"]
    assert "bench: bad, seed 0: exit status 2 without an update" in capsys.readouterr().err


def test_the_best_choice_is_found_with_a_seed_that_is_not_measured(tmp_path: Path) -> None:
    """One run of each choice; then the seeds with the best of them."""
    path = tmp_path / "trials.jsonl"
    method = Method(name="full", choices=("--rate 0.2", "--rate 0.6", "--rate 0.4"))
    run(made := MadeRuns(), plan(path, method))
    assert made.seeds() == [SEARCH_SEED] * 3 + [0, 1]
    (found,) = trials.outcomes([method], COMMON, path)
    assert found.after.values == (0.6, 0.6)


def test_a_flag_of_a_method_replaces_the_common_flag() -> None:
    """pipeline.py refuses a flag that is given twice with different values."""
    assert merged(COMMON, "--steps 9 --seed 1") == ("--profile", "local-m3", "--steps", "9", "--seed", "1")


def test_the_list_of_missing_runs_has_an_estimate_of_the_time(tmp_path: Path) -> None:
    """Half of the mean duration of the known runs for each, because two run at the same time."""
    path = tmp_path / "trials.jsonl"
    assert "2 runs, time left unknown" in plan(path).describe(2)
    run(MadeRuns(), plan(path, seeds=[0]))
    lines = plan(path, seeds=range(7)).describe(2).splitlines()
    assert lines[0] == "one, seed 1: python pipeline.py --profile local-m3 --steps 3 --rate 0.5 --seed 1"
    assert lines[-1] == "6 runs, about 3 min left"


def outcome_names(found: Sequence[Outcome]) -> str:
    """A short table."""
    return " ".join(f"{one.method.name} {one.after.mean:.1f}" for one in found)


def test_the_command_line_selects_methods_and_seeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--quick` runs one seed of two methods with two small updates, and stores nothing."""
    asked: list[tuple[Sequence[str], Sequence[int], set[str], Path]] = []

    class Recorded(Plan):
        def __init__(self, methods: Sequence[Method], seeds: Sequence[int], *, common: Sequence[str], path: Path):
            super().__init__(methods, seeds, common=common, path=path)
            steps = {words[words.index("--steps") + 1] for words in (merged(common, one.flags) for one in methods)}
            asked.append(([method.name for method in methods], seeds, steps, path))

        def run(self, parallel: int, start: Any = None) -> bool:
            return run(MadeRuns(), super())  # type: ignore[arg-type]  # the same methods

    benchmark = TrialBenchmark(
        command="python -m bench made-up", about=None, results=tmp_path / "trials.jsonl", profile="local-m3",
        flags="--steps 5", methods=tuple(Method(name=name) for name in "abc"), table=outcome_names,
    )  # fmt: skip
    monkeypatch.setattr(trials, "Plan", Recorded)
    assert trials.run_trial_benchmark(benchmark, ["--quick"]) == 0
    names, seeds, steps, path = asked[-1]
    assert (names, seeds, steps) == (["a", "b"], [0], {"2"})
    assert path != benchmark.results
    assert trials.run_trial_benchmark(benchmark, ["--methods", "c", "--seeds", "7"]) == 0
    assert asked[-1][:2] == (["c"], [7])
    assert trials.read_trials(benchmark.results)[-1].seed == 7
    assert capsys.readouterr().out.splitlines() == ["a 0.5 b 0.5", "a 0.5 b 0.5 c 0.5"]
