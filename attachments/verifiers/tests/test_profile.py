"""Profiles with a taskset: what cannot work is refused with its key, before anything is started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from attachments.verifiers.sections import TASKSET, VerifiersSection
from attachments.verifiers.tasks import listed
from protocols.errors import DatasetError
from tests.e2e.pipeline_process import lines, metrics, run
from tests.extras import VERIFIERS
from training_run.profile.data import DataSection
from training_run.profile.load import PROFILES

GAME = ("--profile", "verifiers-guessing", "--server.port", "0")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--data.heldout", "heldout.jsonl"), "data.heldout"),
        (("--data.system", "Be short."), "data.system"),
        (("--sampling.stop", '["x"]'), "sampling.stop"),
        (("--agent", "python", "--agent.environment", "guessing:Guessing"), "agent"),
        (("--data.train", "verifiers:"), "data.train"),
        (("--data.verifiers.python", "/nowhere/python"), "data.verifiers.python"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags: tuple[str, ...], key: str, tmp_path: Path) -> None:
    """With the key, and status 2."""
    result = run(tmp_path / "run", *GAME, *flags, small=())
    assert result.status == 2
    assert key in result.err
    assert not (tmp_path / "run").exists()


def test_a_table_without_a_taskset_has_no_effect_and_is_refused(tmp_path: Path) -> None:
    """As every setting without an effect."""
    result = run(tmp_path / "run", "--profile", "local-m3", "--data.verifiers.tasks", "3", small=())
    assert result.status == 2
    assert "data.verifiers.tasks" in result.err


def test_an_interpreter_that_cannot_be_executed_is_refused(tmp_path: Path) -> None:
    """With the key."""
    file = tmp_path / "python"
    file.write_bytes(b"\0")
    file.chmod(0o700)
    with pytest.raises(DatasetError, match=r"data\.verifiers\.python"):
        listed(section(str(file)), "verifiers:guessing_taskset", seed=0)


@pytest.mark.slow  # a run with the library
@pytest.mark.needs_extra("verifiers")
def test_a_run_trains_on_a_taskset_and_evaluates_with_it(tmp_path: Path) -> None:
    """What the sampler recorded of several turns equals what the learner computes; no conversation forks."""
    python = os.environ.get(VERIFIERS, "")
    flags = ("--data.verifiers.python", python, "--async", "false", "--learner.batch-size", "4")
    result = run(tmp_path / "run", *GAME, *flags, "--steps", "2", "--eval.problems", "4", small=())
    assert result.status == 0, result.err
    assert result.accounting.prompted == 8
    for line in metrics(tmp_path / "run"):
        assert 1 < line["verifiers/turns"] <= 3
        assert (line["verifiers/failed"], line["verifiers/forked"]) == (0, 0)
        assert line["mismatch_kl"] < 1e-9
    first, last = lines(tmp_path / "run" / "evaluations.jsonl")
    assert first["problems"] == last["problems"] == 4
    assert 0 <= first["rewards"]["environment"]["value"] <= 1


@pytest.mark.slow  # two runs, one with the library
@pytest.mark.needs_extra("verifiers")
def test_a_game_trains_the_same_policy_as_a_taskset_and_as_an_environment_in_python(tmp_path: Path) -> None:
    """Bit by bit, in synchronous runs with the same problems: the way does not change what is sampled and learned."""
    python = os.environ.get(VERIFIERS, "")
    problems = tmp_path / "games.jsonl"
    tasks = listed(section(python), "verifiers:guessing_taskset", seed=0)
    columns = [{"prompt": one.prompt, "answer": "", "type": one.type, **one.extra["story"]} for one in tasks]
    problems.write_text("".join(f"{json.dumps(one)}\n" for one in columns), encoding="utf-8")
    flags = ("--async", "false", "--server.port", "0", "--eval", "off", "--steps", "3", "--learner.batch-size", "4")
    games = ("--profile", "guessing", "--data.train", str(problems), "--data.heldout", "")
    split = ("--data.heldout-fraction", "0.2")
    for name, own in (("taskset", (*GAME, "--data.verifiers.python", python)), ("python", (*games, *split))):
        result = run(tmp_path / name, *own, *flags, small=())
        assert result.status == 0, result.err
    adapters = [(tmp_path / name / "adapters" / "adapters.safetensors").read_bytes() for name in ("taskset", "python")]
    assert adapters[0] == adapters[1]


def section(python: str) -> DataSection:
    """Return `[data]` of the profile."""
    taskset = VerifiersSection(python=python, directory=str(PROFILES / "environments"))
    return TASKSET.put(DataSection(train="verifiers:guessing_taskset"), taskset)
