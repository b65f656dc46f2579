"""Runs with AdaLoRA: the whole program with the embedded policy, and what other libraries read of its adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from attachments.adalora import attachment
from attachments.adalora.packed import packed
from attachments.adalora.rule import AdaLoraRule
from attachments.adalora.sections import AdaLora
from attachments.files.convert import convert
from attachments.files.merge import merge
from attachments.files.merging import MergeSettings
from attachments.files.tests import hub_models
from attachments.files.tests.hub_models import PYTHON, TOKENS, logits, python_with, run_jobs
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy, load_policy
from clotho.settings.engine import SamplingSection
from clotho.settings.model import Lora, ModelSection, PolicySection
from clotho.storage.adapters import write_adapter
from clotho.training.update import PolicyLearner
from tests.e2e.pipeline_process import FEW_PROBLEMS, PROBLEMS, adapter, continued, killed_and_continued, metrics, run
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import scored_group
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import load_profile

SMALL = {
    "--profile": "local-m3", "--policy.rank-budget": "adalora", "--policy.method.rank": "6",
    "--policy.rank-budget.target-rank": "3", "--policy.rank-budget.warmup-steps": "1",
    "--policy.rank-budget.final-steps": "2", "--learner.batch-size": "4", "--sampling.group-size": "4",
    "--server": "off", "--async": "false", "--learner.schedule": "constant", "--eval": "off",
    "--sampling.max-tokens": "48", "--checkpoint.interval": "1",
    "--data.train": str(PROBLEMS / "train.jsonl"), "--data.heldout": str(PROBLEMS / "heldout.jsonl"),
}  # fmt: skip


def words(flags: dict[str, str]) -> list[str]:
    """Return the command line of a small run with further flags."""
    return [word for pair in (SMALL | flags).items() for word in pair]


def test_ranks_fall_and_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Coordinates, scores and masks are part of the checkpoint; the final adapter has the ranks that were chosen."""
    flags = words({"--steps": "6", "--checkpoint.keep-last": "9"})
    whole = run(tmp_path / "whole", *flags, small=())
    assert whole.status == 0, whole.err
    found = metrics(tmp_path / "whole")
    means = [line["adalora/mean_rank"] for line in found]
    assert means[0] == 6.0
    assert means[-2:] == [3.0, 3.0]
    assert means == sorted(means, reverse=True)
    assert "mean rank 3" in " ".join(attachment.shown(found[-1]))
    config = json.loads((tmp_path / "whole" / "adapters" / "adapter_config.json").read_text())
    assert config["lora_parameters"]["rank"] == found[-1]["adalora/largest_rank"]
    assert config["fine_tune_type"] == "lora"
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000006"
    assert json.loads((checkpoint / "adapter_config.json").read_text())["lora_parameters"]["rank"] == 6
    assert continued(tmp_path / "whole", tmp_path / "run", *flags, step=3) == adapter(tmp_path / "whole")


@pytest.mark.slow  # three runs in processes of their own
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_killed_run_resumes_bit_for_bit(step: int, tmp_path: Path) -> None:
    """In the warm-up, while ranks fall, and at the end."""
    flags = words({"--steps": "6"})
    assert run(tmp_path / "whole", *flags, small=()).status == 0
    assert killed_and_continued(tmp_path / "run", *flags, step=step) == adapter(tmp_path / "whole")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("policy.method", "dora", "policy.method"),
        ("policy.method", "full", "policy.method"),
        ("policy.rank-budget.target-rank", "7", "policy.rank_budget.target_rank"),
        ("policy.rank-budget.warmup-steps", "4", "policy.rank_budget.warmup_steps"),
        ("policy.rank-budget.warmup-steps", "0", "warmup-steps must be an integer >= 1"),
        ("policy.method", "adalora", "policy.rank_budget = adalora"),
    ],
)
def test_settings_that_cannot_work_are_refused(key: str, value: str, said: str, tmp_path: Path) -> None:
    """With the key, in one line, and before anything is trained."""
    result = run(tmp_path / "run", *words({"--steps": "6", f"--{key}": value}), small=())
    assert result.status == 2
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_stage_that_is_too_short_is_refused(tmp_path: Path) -> None:
    """Its schedule has the steps of the stage, not those of the run."""
    (tmp_path / "stages.toml").write_text(
        'extends = "local-m3"\nserver = "off"\neval = "off"\n'
        "[learner]\nbatch_size = 4\n[sampling]\ngroup_size = 4\nmax_tokens = 48\n"
        '[policy.rank_budget]\ntype = "adalora"\nwarmup_steps = 2\nfinal_steps = 2\n'
        '[[stages]]\nkind = "rl"\nsteps = 5\n[[stages]]\nkind = "rl"\nsteps = 3\n'
    )
    flags = ("--profile", str(tmp_path / "stages.toml"), "--stage", "rl")
    result = run(tmp_path / "run", *flags, small=FEW_PROBLEMS)
    assert result.status == 2
    assert "stages[1]" in result.err


def test_the_estimate_of_memory_counts_the_coordinates_and_their_scores() -> None:
    """Three numbers for each number of the adapter, and its gradient in other coordinates."""
    profiles = [load_profile("local-m3", {"policy.rank_budget.type": kind}) for kind in ("off", "adalora")]
    off, on = (estimate_memory(profile.model, profile) for profile in profiles)
    assert on.optimizer - off.optimizer == 3 * off.trained
    assert on.update > off.update


def pruned(base: Path) -> tuple[Policy, Parameters]:
    """Return a policy and what AdaLoRA has learned and pruned in six updates."""
    section = PolicySection(method=Lora(rank=6, scale=2.0))
    policy = load_policy(ModelSection(path=str(base)), section, seed=0, keep_reference=False)
    settings = learner_settings(learning_rate=1e-2, schedule="constant", warmup_steps=0)
    budget = AdaLora(target_rank=2, warmup_steps=1, final_steps=2)
    learner = PolicyLearner(policy, settings, SamplingSection(), steps=6, rule=AdaLoraRule(budget, steps=6, seed=0))
    groups = [scored_group([[3, 4, 5], [6, 7]], [1.0, 0.0])]
    for step in range(6):
        assert learner.update(groups, step=step).applied
    return policy, learner.parameters


def saved_adapter(directory: Path, base: Path) -> tuple[Path, np.ndarray[Any, Any]]:
    """Write a pruned adapter, and return the logits of the policy."""
    policy, parameters = pruned(base)
    policy.pack = packed
    write_adapter(directory, *policy.loadable(parameters))
    model = policy.copy_model()
    model.use(parameters)
    return directory, np.array(model.model(mx.array([list(TOKENS)]))[0].astype(mx.float32))


@pytest.mark.needs_float32
def test_mlx_lm_reads_a_lora_of_the_largest_rank_that_computes_the_same(tmp_path: Path) -> None:
    """Smaller ranks are padded with zeros; conversions keep the ranks, and merging gives the same weights."""
    base = hub_models.save(tmp_path / "base", "qwen3")
    place, expected = saved_adapter(tmp_path / "adapter", base)
    found = logits(load_adapters(load_model(base)[0], str(place)))
    assert np.abs(found - expected).max() <= 1e-4
    config = json.loads((place / "adapter_config.json").read_text())
    assert 1 <= min(config["ranks"].values()) < config["lora_parameters"]["rank"] <= 6
    convert(place, tmp_path / "peft", "peft")
    theirs = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert theirs["r"] == config["lora_parameters"]["rank"]
    assert set(theirs["rank_pattern"].values()) == set(config["ranks"].values())
    convert(tmp_path / "peft", tmp_path / "again", "mlx")
    again = logits(load_adapters(load_model(base)[0], str(tmp_path / "again")))
    np.testing.assert_array_equal(again, found)
    merge("", place, tmp_path / "merged", MergeSettings(dtype="float32"))
    assert np.abs(logits(load_model(tmp_path / "merged")[0]) - expected).max() <= 1e-4


@pytest.mark.slow  # PEFT in an interpreter of its own
@pytest.mark.needs_float32
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_peft_reads_the_ranks_of_every_module(architecture: str, tmp_path: Path) -> None:
    """PEFT computes with the converted adapter what the policy computes, within 1e-4."""
    python, base = python_with(PYTHON), hub_models.save(tmp_path / "base", architecture)
    place, expected = saved_adapter(tmp_path / "adapter", base)
    convert(place, tmp_path / "peft", "peft")
    job = {"kind": "logits", "model": str(base), "adapter": str(tmp_path / "peft"), "tokens": list(TOKENS)}
    run_jobs(python, "hugging_face", [{**job, "out": str(tmp_path / "peft.npy")}], tmp_path)
    assert np.abs(np.load(tmp_path / "peft.npy") - expected).max() <= 1e-4
    plain = logits(load_model(base)[0])
    assert np.abs(plain - expected).max() > 1e-3
