"""TRL's policy update: one step of its GRPOTrainer on given rollouts, PyTorch on the CPU.

The trainer is not modified. `rollout_func`, its interface for external completions, returns those of the case, and a
reward function returns their rewards. The clock runs from scored rollouts to the end of the optimizer step.
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

from bench.contenders.rollouts import RANK, RATE, SCALE, Rollouts, metrics, rollouts
from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import DIRECTORY, SHAPES, configuration
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve

THREADS = "TRL_THREADS"
"""Environment variable with the number of PyTorch threads; the default is one, as for the BLAS of the other
contenders.
"""
ROWS = 8
"""Completions per backward pass, the trainer's default; passes accumulate to one optimizer step."""


class ResidentMemory:
    """The peak of the process's resident set, from Linux's counter, which can be reset."""

    def reset(self) -> None:
        """Reset the peak."""
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    def peak(self) -> int:
        """Peak bytes since the reset, minus the bytes at the reset."""
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # the library has no types in our environment
    """Calls `ready` when rollouts are prepared."""

    ready: Callable[[], None] | None = None

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if self.ready is not None:
            self.ready()
            self.ready = None
        return inputs


class StepTimer(TrainerCallback):
    """Records when the optimizer step ended."""

    seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Record the time."""
        self.seconds = time.perf_counter()


def make_model(case: Case) -> Any:
    """The same shape as for the other contenders, with its own random weights."""
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


def make_trainer(case: Case, sampled: Rollouts, directory: str) -> TimedTrainer:
    """A trainer that receives the rollouts of the case."""

    def bring(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [sampled.prompts[number] for number in sampled.prompt_of],
            "completion_ids": sampled.completions,
            "logprobs": None,
        }

    def reward(completions: list[Any], **others: Any) -> list[float]:
        return sampled.rewards

    return TimedTrainer(
        model=make_model(case),
        args=configured(sampled, directory),
        reward_funcs=[reward],
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(sampled.prompts))]}),
        processing_class=AutoTokenizer.from_pretrained(DIRECTORY),
        peft_config=LoraConfig(r=RANK, lora_alpha=SCALE * RANK, target_modules="all-linear"),
        rollout_func=bring,
    )


def prepare(case: Case, directory: str) -> MeasureOnce:
    """A trainer that trains for one step per run."""
    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    logging.disable(logging.WARNING)
    sampled, memory, ended = rollouts(case), ResidentMemory(), StepTimer()
    trainer = make_trainer(case, sampled, directory)
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
        serve(
            partial(prepare, directory=here),
            semantics=SEMANTICS["trl_update"],
            packages=["torch", "transformers", "trl", "peft"],
        )
