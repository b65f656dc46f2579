"""TRL's policy update: one step of its GRPOTrainer, PyTorch on the CPU, whose rollouts come from us.

The trainer runs as it is: `rollout_func`, its own way to bring completions from elsewhere, returns those of the case,
and a reward function says what they earned. The clock runs from when the trainer has them scored until its optimizer
has stepped.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from bench.contenders.loop import Case, Metrics, Once, serve
from bench.contenders.rollouts import RANK, RATE, SCALE, Rollouts, metrics, rollouts
from bench.contenders.shapes import DIRECTORY, SHAPES, configuration

THREADS = "TRL_THREADS"
"""How many PyTorch may use; one where it is not set, as BLAS has in the other contenders."""
ROWS = 8
"""Completions per gradient pass, the trainer's default; passes accumulate to one optimizer step."""
SEMANTICS = (
    f"A step of its GRPOTrainer, from scored rollouts to new weights: {ROWS} completions at a time, its ratio 1, "
    "entropy and other metrics, clipping of the gradient, AdamW. Its memory is that of the process's resident set "
    "beyond what it was before the step; what the allocator had kept from earlier steps does not count."
)


class ResidentMemory:
    """The peak of a process's resident set, by Linux's own count, which can be reset."""

    def reset(self) -> None:
        """Count from here."""
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    def peak(self) -> int:
        """Bytes at most, beyond those at the reset."""
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # the library has no types in our environment
    """Says when rollouts are ready."""

    ready: Callable[[], None] | None = None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if self.ready is not None:
            self.ready()
            self.ready = None
        return inputs


class Ended(TrainerCallback):
    """Remembers when the optimizer had stepped."""

    seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The update is done."""
        self.seconds = time.perf_counter()


def model_of(case: Case) -> Any:
    """The same shape as the others', with random weights of its own."""
    shape = SHAPES[case["model"]]._replace(vocabulary=case["vocabulary"])
    set_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**configuration(shape))).to(torch.float32)


def configured(sampled: Rollouts, directory: str) -> GRPOConfig:
    """One optimizer step on all rollouts; the trainer reports and saves nothing."""
    return GRPOConfig(
        output_dir=directory,
        max_steps=1,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=len(sampled.completions) // ROWS,
        num_generations=sampled.group,
        max_completion_length=len(sampled.completions[0]),
        learning_rate=RATE,
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trainer_of(case: Case, sampled: Rollouts, directory: str) -> TimedTrainer:
    """A trainer that is handed the rollouts of the case, whatever it asks."""

    def bring(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [sampled.prompts[number] for number in sampled.prompt_of],
            "completion_ids": sampled.completions,
            "logprobs": None,
        }

    def reward(completions: list[Any], **others: Any) -> list[float]:
        return sampled.rewards

    return TimedTrainer(
        model=model_of(case),
        args=configured(sampled, directory),
        reward_funcs=[reward],
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(sampled.prompts))]}),
        processing_class=AutoTokenizer.from_pretrained(DIRECTORY),
        peft_config=LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules="all-linear"),
        rollout_func=bring,
    )


def prepare(case: Case, directory: str) -> Once:
    """A trainer that trains for one step, again and again."""
    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    logging.disable(logging.WARNING)
    sampled, memory, ended = rollouts(case), ResidentMemory(), Ended()
    trainer = trainer_of(case, sampled, directory)
    trainer.add_callback(ended)

    def once() -> Metrics:
        began = 0.0

        def ready() -> None:
            nonlocal began
            memory.reset()
            began = time.perf_counter()

        trainer.ready = ready
        trainer.train()
        return metrics(ended.seconds - began, sampled.tokens, memory.peak())

    return once


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        serve(partial(prepare, directory=here), semantics=SEMANTICS, packages=["torch", "transformers", "trl", "peft"])
