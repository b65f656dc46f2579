"""mlx-lm reproduces the accuracy of a run with its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm

from protocols.prompt import Problem
from tests.e2e.conftest import CompletedRun
from tests.e2e.pipeline_process import lines
from tests.rewards.groups import group
from training_run.profile.load import load_profile
from training_run.profile.schema import HeldOutEvaluation
from training_run.rewards.runner import RewardRunner


async def test_mlx_lm_reproduces_the_accuracy_of_the_run(synchronous: CompletedRun) -> None:
    """Greedily through the chat template: the base policy before and the adapter after."""
    profile = load_profile(str(synchronous.run_dir / "profile.toml"))
    rewards = RewardRunner(profile.rewards)
    assert isinstance(profile.eval, HeldOutEvaluation)
    held_out = lines(Path(profile.data.heldout))[: profile.eval.problems]
    measured = []
    for adapter in (None, str(synchronous.run_dir / "adapters")):
        loaded: Any = mlx_lm.load(profile.model.path, adapter_path=adapter)
        model, tokenizer = loaded[:2]
        right = 0
        for record in held_out:
            message = {"role": "user", "content": record["prompt"]}
            prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
            text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=profile.sampling.max_tokens)
            (grade,) = await rewards.grade(Problem(**record), group(text).completions)
            right += grade.correct is True
        measured.append(right / len(held_out))
    recorded = lines(synchronous.run_dir / "evaluations.jsonl")
    assert measured == [line["accuracy"] for line in recorded]
    for line in recorded:
        assert f"held-out accuracy {100 * line['accuracy']:.1f} %" in " ".join(synchronous.result.out.split())
