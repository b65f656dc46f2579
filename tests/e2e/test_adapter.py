"""mlx-lm reproduces the accuracy of a run with its adapter."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.e2e.conftest import CompletedRun
from tests.e2e.pipeline_process import REPOSITORY, lines

MEASURE = """
import json, sys
from pathlib import Path
import anyio
from clotho.cpu import load_blas
load_blas()  # before the first import of MLX
import mlx_lm
from clotho.config.load import load_profile
from clotho.rewards.runner import RewardRunner
from protocols.prompt import Problem

run_dir = Path(sys.argv[1])
profile = load_profile(str(run_dir / "profile.toml"))
rewards = RewardRunner(profile.rewards)
held_out = [json.loads(line) for line in Path(profile.data.heldout).read_text().splitlines()][: profile.eval.problems]


async def measure(model, tokenizer):
    right = 0
    for record in held_out:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": record["prompt"]}], add_generation_prompt=True
        )
        text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=profile.sampling.max_tokens)
        right += await rewards.is_correct(Problem(**record), text)
    return right / len(held_out)


model, tokenizer = mlx_lm.load(profile.model.path, adapter_path=sys.argv[1] + "/adapters")
base, tokenizer = mlx_lm.load(profile.model.path)
print(json.dumps([anyio.run(measure, base, tokenizer), anyio.run(measure, model, tokenizer)]))
"""


def test_mlx_lm_reproduces_the_accuracy_of_the_run(synchronous: CompletedRun) -> None:
    """In another process, greedily through the chat template: the base policy before and the adapter after."""
    recorded = lines(synchronous.run_dir / "evaluations.jsonl")
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(synchronous.run_dir)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(measured.stdout) == [line["accuracy"] for line in recorded]
    for line in recorded:
        assert f"held-out accuracy {100 * line['accuracy']:.1f} %" in " ".join(synchronous.result.out.split())
