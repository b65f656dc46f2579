"""Runs with a critic: the whole program with the embedded policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.critic import attachment
from tests.e2e.pipeline_process import PROBLEMS, adapter, continued, killed_and_continued, metrics, run
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import load_profile

SMALL = {
    "--profile": "local-m3", "--critic": "value_head", "--critic.warmup-steps": "2", "--learner.batch-size": "4",
    "--sampling.group-size": "4", "--server": "off", "--async": "false", "--learner.schedule": "constant",
    "--eval": "off", "--sampling.max-tokens": "48", "--checkpoint.interval": "1",
    "--data.train": str(PROBLEMS / "train.jsonl"), "--data.heldout": str(PROBLEMS / "heldout.jsonl"),
}  # fmt: skip


def words(flags: dict[str, str]) -> list[str]:
    """Return the command line of a small run with further flags."""
    return [word for pair in (SMALL | flags).items() for word in pair]


def test_a_run_with_a_critic_resumes_bit_for_bit(tmp_path: Path) -> None:
    """In its warm-up: the state of the critic is part of the checkpoint. Groups with equal rewards are trained on."""
    whole = run(tmp_path / "whole", *words({"--steps": "3"}), small=())
    assert whole.status == 0, whole.err
    assert whole.accounting.trained == 12
    found = metrics(tmp_path / "whole")
    assert all(line["critic/value_loss"] > 0 for line in found)
    assert found[0]["critic/mean_value"] == 0.0
    assert found[-1]["critic/mean_value"] != 0.0
    assert "explained variance" in " ".join(attachment.shown(found[-1]))
    resumed = continued(tmp_path / "whole", tmp_path / "run", *words({"--steps": "3"}), step=1)
    assert resumed == adapter(tmp_path / "whole")


@pytest.mark.slow  # three runs in processes of their own
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_killed_run_resumes_bit_for_bit(step: int, tmp_path: Path) -> None:
    """In the warm-up, at its end and after it."""
    flags = words({"--steps": "4"})
    assert run(tmp_path / "whole", *flags, small=()).status == 0
    assert killed_and_continued(tmp_path / "run", *flags, step=step) == adapter(tmp_path / "whole")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("policy.method", "full", "policy.method"),
        ("learner.objective.dynamic-sampling-max-ratio", "4", "dynamic_sampling_max_ratio"),
        ("learner.kl-penalty", "reward", "learner.kl_penalty"),
        ("replay", "uniform", "replay"),
        ("critic", "value", "critic"),
    ],
)
def test_settings_that_cannot_work_are_refused(key: str, value: str, said: str, tmp_path: Path) -> None:
    """With the key, and before anything is trained."""
    result = run(tmp_path / "run", *words({"--steps": "1", f"--{key}": value}), small=())
    assert result.status == 2
    assert said in result.err
    assert not (tmp_path / "run").exists()


def test_the_estimate_of_memory_counts_the_critic() -> None:
    """A second adapter, and two numbers of the optimizer for each of its own."""
    profiles = [load_profile("local-m3", {"critic.type": kind}) for kind in ("off", "value_head")]
    off, on = (estimate_memory(profile.model, profile) for profile in profiles)
    assert on.optimizer - off.optimizer == pytest.approx(3 * off.trained, rel=0.05)
