"""TRL's GRPOTrainer on the task of a profile: PyTorch on the CPU, adapter by peft, generation by transformers.

Model, adapter (rank, scale, layers), prompts, rewards, token limit and correctness rules are those of the profile. The
case sets the other hyperparameters.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from bench.contenders.semantics import SEMANTICS
from bench.contenders.tasks import task_of
from bench.contenders.training_task import Problem, Reward, TrainingClock, TrainingEnded, TrainingTask
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve

SETTINGS: Case = {
    "profile": "arithmetic",
    "learning_rate": 6e-3,
    "batch_size": 8,
    "group_size": 2,
    "loss": "bnpo",
    "temperature": 1.0,
    "target": None,
    "updates": 1000,
    "limit": 1e9,
    "limit_seconds": 1e9,
    "floor": 0.0,
    "evaluate_every": 1,
}
MANY = 10**6
THREADS = "TRL_BENCH_THREADS"
"""Environment variable with the number of PyTorch threads; the default is one."""


def reward_function(reward: Reward, name: str) -> Callable[..., list[float]]:
    """The reward with TRL's signature; TRL reports it under its name."""

    def rewards(completions: list[str], answer: list[str], **others: Any) -> list[float]:
        return [reward(text, wanted) for text, wanted in zip(completions, answer, strict=True)]

    rewards.__name__ = name
    return rewards


def rendered(tokenizer: Any, task: TrainingTask, question: Problem) -> str:
    """The text of the prompt."""
    return str(tokenizer.apply_chat_template(task.messages(question), tokenize=False, add_generation_prompt=True))


def greedy_accuracy(model: Any, tokenizer: Any, task: TrainingTask) -> float:
    """Held-out accuracy of the model."""
    asked = task.held_out()
    prompts = [rendered(tokenizer, task, question) for question in asked]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        tokens_B_S = model.generate(**inputs, max_new_tokens=task.max_tokens, do_sample=False)
    model.train(was_training)
    texts = tokenizer.batch_decode(tokens_B_S[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return task.accuracy(texts, asked)


class ClockCallback(TrainerCallback):
    """Reports every step to the clock, and ends training when the clock says so."""

    def __init__(self, clock: TrainingClock) -> None:
        self._clock = clock

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the clock."""
        self._clock.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Record an update."""
        try:
            self._clock.updated()
        except TrainingEnded:
            control.should_training_stop = True


def configuration(case: Case, task: TrainingTask, directory: str, seed: int) -> GRPOConfig:
    """The trainer's configuration; it reports and saves nothing."""
    return GRPOConfig(
        output_dir=directory,
        seed=seed,
        max_steps=MANY,
        per_device_train_batch_size=case["batch_size"] * case["group_size"],
        num_generations=case["group_size"],
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant",
        loss_type=case["loss"],
        beta=0.0,
        temperature=case["temperature"],
        max_completion_length=task.max_tokens,
        reward_weights=[weight for weight, _ in task.rewards],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(case: Case, seed: int) -> Metrics:
    """One run from the untrained policy."""
    set_seed(seed)
    task = task_of(case)
    tokenizer = AutoTokenizer.from_pretrained(task.directory)
    model = AutoModelForCausalLM.from_pretrained(task.directory, dtype=torch.float32)
    asked = task.training()
    columns = {"prompt": [rendered(tokenizer, task, one) for one in asked], "answer": [one.answer for one in asked]}
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            args=configuration(case, task, directory, seed),
            reward_funcs=[reward_function(one, f"reward_{number}") for number, (_, one) in enumerate(task.rewards)],
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=task.rank, lora_alpha=task.scale * task.rank, target_modules="all-linear"),
        )
        clock = TrainingClock(
            evaluate=lambda: greedy_accuracy(trainer.model, tokenizer, task),
            target=case["target"],
            updates=case["updates"],
            limit=case["limit"],
            limit_seconds=case["limit_seconds"],
            floor=case["floor"],
            interval=case["evaluate_every"],
        )
        trainer.add_callback(ClockCallback(clock))
        trainer.train()
    return clock.metrics()


def prepare(case: Case) -> MeasureOnce:
    """Runs of equal settings, each with the next seed, starting at the seed of the case or 0."""
    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    logging.disable(logging.WARNING)
    seeds = iter(range(case.get("seed", 0), MANY))
    settings = SETTINGS | case
    return lambda: train(settings, next(seeds))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["trl_train"], packages=["torch", "transformers", "trl", "peft"])
