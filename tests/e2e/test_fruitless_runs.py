"""Runs from which nothing can be learned end early, with the cause, exit status 1, a checkpoint and the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pipeline_process import RunResult, lines, run
from tests.training_run.built_context import tiny_profile
from training_run.profile.load import write_profile


def ended(directory: Path, reward: str, **sections: Any) -> RunResult:
    """Run a tiny model with a reward; the limits are 2 and 4 batches."""
    made = tiny_profile(
        directory,
        eval="off",
        rewards=[{"name": reward, "run_in": "thread"}],
        learner={"batch_size": 2, "max_failed_batches": 2, "max_equal_batches": 4},
        steps=40,
        **sections,
    )
    write_profile(made, directory / "mine.toml")
    return run(directory / "run", "--profile", str(directory / "mine.toml"), small=("--model.dtype", "float32"))


FAILING = ("tests.e2e.custom_components:failing_reward", 2, "learner.max_failed_batches")
EQUAL = ("tests.e2e.constant_rewards:zero", 4, "learner.max_equal_batches")
CURRICULUM = {"data": {"curriculum": "success_rate"}}


@pytest.mark.parametrize(
    ("reward", "limit", "key", "sections"),
    [(*FAILING, {}), (*EQUAL, {}), (*EQUAL, {"async": False}), (*FAILING, CURRICULUM)],
    ids=["failing", "equal", "equal, synchronous", "failing, curriculum"],
)
def test_a_run_without_a_signal_ends_after_a_number_of_batches(
    tmp_path: Path, reward: str, limit: int, key: str, sections: dict[str, Any]
) -> None:
    """The groups in flight are carried over, so that a resumed run prompts them again."""
    result = ended(tmp_path, reward, **sections)
    assert result.status == 1, result
    (end,) = (line for line in lines(tmp_path / "run" / "log.jsonl") if line["event"] == "run_ends_early")
    assert key in end["cause"]
    assert ("raised by the test" in end["cause"]) == (key == "learner.max_failed_batches")
    assert end["cause"].split()[0] in result.err + result.out
    steps = [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert limit <= steps[-1] < 40
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps[-1]:06d}").is_dir()
    assert (tmp_path / "run" / "adapters" / "adapters.safetensors").is_file()
    assert result.accounting.trained == 0
