"""`peers`: runs that continue, pairs of equal seeds, and profiles of the tasks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench import peers
from bench.contenders import clotho_train
from bench.contenders.process import Contender
from bench.contenders.tasks import TASKS, learning, task_of
from bench.fingerprint import ROOT
from bench.measurement import read
from bench.peers import CLOTHO, QUICK, merged
from bench.studies import search
from clotho.settings.model import Lora
from tests.bench.made_measurements import measurement
from training_run.profile.load import load_profile
from training_run.profile.schema import HeldOutEvaluation

SETTINGS: search.Settings = {"learning_rate": 2e-3}


class MadeRuns:
    """Replaces the processes: seconds are the seed plus one, and ten times that for the others."""

    def __init__(self) -> None:
        self.cases: list[tuple[str, Any]] = []

    def __call__(
        self, question: str, contenders: Sequence[Contender], cases: Sequence[Any], *_: Any, **how: Any
    ) -> Any:
        (contender,), (case,) = contenders, cases
        self.cases.append((contender.name, case))
        seconds = (case["seed"] + 1.0) * (10 if contender.foreign else 1)
        made = {"seconds": seconds, "accuracy": 0.71 if case["seed"] < 2 else 0.5}
        return [
            measurement([value], contender=contender.name, metric=metric, unit="s", better="lower", **case)
            for metric, value in made.items()
        ]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> MadeRuns:
    """Made-up runs, with settings for every contender."""
    runs = MadeRuns()
    monkeypatch.setattr(peers, "measure_interleaved", runs)
    monkeypatch.setattr(search, "best_settings", lambda name: dict(SETTINGS))
    return runs


def run(out: Path, *words: str) -> int:
    """Run the plain task."""
    return peers.main(["--only", "until 0.7", "--out", str(out), *words])


@pytest.mark.parametrize("name", ["arithmetic", "learn", "learn-long-tail", "learn-slow-rewards"])
def test_every_measured_accuracy_of_clotho_is_of_all_held_out_problems(name: str) -> None:
    """As those of the other trainers are; a sample of the problems would reach the target by chance."""
    section = load_profile(str(clotho_train.PROFILES / f"{name}.toml"), {}).eval
    assert isinstance(section, HeldOutEvaluation)
    assert (section.problems, section.problems_between, section.samples) == (0, 0, 0)


def test_every_run_has_the_searched_settings_of_its_contender(made: MadeRuns, tmp_path: Path) -> None:
    """Seed by seed, so that contenders alternate; every line has the settings and the seed."""
    assert run(tmp_path / "out.jsonl", "--repeats", "2") == 0
    names = [runner.contender.name for runner in peers.TASKS["until 0.7"].runners]
    assert [(name, case["seed"]) for name, case in made.cases] == [(name, seed) for seed in (0, 1) for name in names]
    assert {case["learning_rate"] for _, case in made.cases} == {2e-3}
    assert [name for name, case in made.cases if case.get("asynchronous") == "true"] == ["clotho, asynchronous"] * 2
    lines = read(tmp_path / "out.jsonl")
    assert {one.case["seed"] for one in lines} == {0, 1}
    assert {one.versions["settings"] for one in lines} == {
        "learning_rate=0.002", "learning_rate=0.002 asynchronous=true"
    }  # fmt: skip


def test_runs_in_the_results_file_are_not_repeated(
    made: MadeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the settings have changed, or all are to be repeated."""
    out = tmp_path / "out.jsonl"
    run(out, "--repeats", "1")
    run(out, "--repeats", "2")
    assert len(made.cases) == 8
    monkeypatch.setattr(search, "best_settings", lambda name: {"learning_rate": 1e-3})
    run(out, "--repeats", "1", "--contenders", "clotho")
    run(out, "--repeats", "1", "--contenders", "clotho", "--again")
    assert [name for name, _ in made.cases[8:]] == ["clotho", "clotho"]


def test_only_seeds_of_all_contenders_are_compared(made: MadeRuns, tmp_path: Path) -> None:
    """The ratio of each seed is that of two runs with equal seeds; the case has no seed."""
    out = tmp_path / "out.jsonl"
    run(out, "--repeats", "1", "--contenders", "trl")
    run(out, "--repeats", "2", "--contenders", "clotho")
    found = {(one.contender, one.metric): one for one in peers.read(out)}
    assert {one.values[0] for (_, metric), one in found.items() if metric == "seconds"} == {1.0, 10.0}
    assert all(len(one.values) == 1 and "seed" not in one.case for one in found.values())
    assert "0.100" in peers.table(list(found.values()))


def test_a_newer_run_of_the_same_seed_counts() -> None:
    """It was repeated for a reason."""
    one = measurement([1.0], metric="seconds", unit="s", task="until 0.7", seed=0)
    assert [found.values for found in merged([one, replace(one, values=[3.0])])] == [[3.0]]


def test_runs_that_miss_the_target_are_named(
    made: MadeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their seconds are no time to the target."""
    run(tmp_path / "out.jsonl", "--repeats", "3")
    assert "until 0.7, `trl`: 1 of 3 seeds did not reach 0.7" in capsys.readouterr().out


def test_slow_rewards_are_measured_over_a_number_of_updates(
    made: MadeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no target, so none is missed."""
    words = ["--only", "slow rewards", "--out", str(tmp_path / "out.jsonl"), "--repeats", "3"]
    assert peers.main(words) == 0
    assert {case["updates"] for _, case in made.cases} == {10}
    assert not any("target" in case for _, case in made.cases)
    assert "did not reach" not in capsys.readouterr().out


def test_seconds_have_two_factors() -> None:
    """The number of completions, and the seconds of each; settings of a run say how many an update has."""
    settings = {"settings": "batch_size=4 group_size=8"}
    made = (("updates", 10.0), ("seconds", 16.0))
    lines = [replace(measurement([n], metric=m, task="until 0.7", seed=0), versions=settings) for m, n in made]
    found = {one.metric: one.values[0] for one in merged(lines)}
    assert found == {"updates": 10.0, "seconds": 16.0, "completions": 320.0, "seconds_per_completion": 0.05}


def test_without_a_search_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured."""
    monkeypatch.setattr(search, "best_settings", lambda name: None)
    assert run(tmp_path / "out.jsonl") == 2
    assert "python -m bench search --of clotho" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_quick_mode_measures_only_clotho(monkeypatch: pytest.MonkeyPatch, made: MadeRuns, tmp_path: Path) -> None:
    """Two small updates of every task, without searched settings; nothing is stored."""
    monkeypatch.setattr(search, "best_settings", lambda name: None)
    assert peers.main(["--quick", "--out", str(tmp_path / "out.jsonl")]) == 0
    assert {name for name, _ in made.cases} == {"clotho", "clotho, asynchronous", "clotho, synchronous"}
    assert {case["task"] for _, case in made.cases} == {*peers.TASKS}
    assert all(QUICK.items() <= case.items() for _, case in made.cases)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("task", peers.TASKS)
def test_every_task_has_a_valid_profile_and_the_target_of_the_benchmark(task: str) -> None:
    """And the interval of evaluations that the other trainers have."""
    case = peers.TASKS[task].case
    profile = load_profile(clotho_train.arguments(case, 0, [])[1], {})
    (options,) = (actor.options for actor in profile.actors if actor.at == "evaluator")
    if "evaluate_every" in case:
        assert options == {"target": search.TARGET, "interval": case["evaluate_every"]}


@pytest.mark.parametrize("runner", peers.TASKS["slow rewards"].runners, ids=lambda runner: runner.contender.name)
def test_slow_rewards_are_slow_for_every_contender(runner: peers.Runner) -> None:
    """Clotho has a reward function more, without weight; the others wait in a reward function of their own."""
    own = peers.TASKS["slow rewards"].case
    if runner.searched == CLOTHO.searched:
        slow, plain = (
            load_profile(clotho_train.arguments({"profile": name}, 0, [])[1]) for name in (own["profile"], "learn")
        )
        assert [one for one in slow.rewards if one.weight] == list(plain.rewards)
        assert [one.name for one in slow.rewards if not one.weight] == ["bench.contenders.long_tail:wait"]
    else:
        assert own["profile"] in TASKS
        assert task_of(dict(own)).rewards != learning().rewards


def test_the_learning_task_of_other_trainers_equals_the_profile() -> None:
    """Model, adapter, token limit, system message, problems and rewards."""
    found, profile = learning(), load_profile("learn-m3")
    assert isinstance(profile.policy.method, Lora)
    assert (found.rank, found.scale) == (profile.policy.method.rank, profile.policy.method.effective_scale)
    assert (found.max_tokens, found.system) == (profile.sampling.max_tokens, profile.data.system)
    assert str(found.directory) == str(Path(profile.model.path).resolve())
    assert [weight for weight, _ in found.rewards] == [reward.weight for reward in profile.rewards]
    assert [str(found.problems / name) for name in ("train.jsonl", "heldout.jsonl")] == [
        str(Path(path).resolve()) for path in (profile.data.train, profile.data.heldout)
    ]
    start = search.SUBJECTS["trl"].start
    assert start["learning_rate"] == profile.learner.optimizer.learning_rate
    assert (start["batch_size"], start["group_size"]) == (profile.learner.batch_size, profile.sampling.group_size)


def test_the_tasks_of_other_trainers_import_only_what_their_environment_has() -> None:
    """It has none of the packages that Clotho alone needs."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(('msgspec', 'structlog', 'anyio')); import bench.contenders.tasks"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_chart_is_drawn_from_the_results(tmp_path: Path) -> None:
    """One group of bars per task."""
    pytest.importorskip("matplotlib")
    peers.draw(peers.read(), tmp_path / "peers.svg")
    assert all(task in (tmp_path / "peers.svg").read_text(encoding="utf-8") for task in peers.TASKS)
