"""TRL's GRPOTrainer on the task of profile local-m3: PyTorch on the CPU, adapter by peft, generation by transformers.

Model, adapter (rank, scale, layers), prompts, rewards, token limit and correctness rules are those of the profile. The
case sets the other hyperparameters. The defaults are the best that `bench.search` found for mlx-lm-lora, which has the
same loss, with two differences. There are eight groups, because with six groups one seed destroyed the policy. And the
learning rate is three times as high, which gives the same first step: MLX's Adam does not correct its bias by default,
so its first steps are sqrt(10) times as large as those of PyTorch's AdamW.
"""

from __future__ import annotations

import logging
import os
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from bench.contenders.arithmetic_task import ANSWER_WEIGHT, ARITHMETIC, FORMAT_WEIGHT, has_format, is_correct
from bench.contenders.semantics import SEMANTICS
from bench.contenders.training_task import Problem, TrainingClock, TrainingEnded
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve

SETTINGS: Case = {
    "learning_rate": 6e-3,
    "batch_size": 8,
    "group_size": 2,
    "loss": "bnpo",
    "target": None,
    "updates": 1000,
    "limit": 600.0,
}
MANY = 10**6
THREADS = "TRL_BENCH_THREADS"
"""Environment variable with the number of PyTorch threads; the default is one."""


def form_reward(completions: list[str], **others: Any) -> list[float]:
    """The format reward with TRL's signature."""
    return [has_format(text) for text in completions]


def answer_reward(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    """The correctness reward with TRL's signature."""
    return [is_correct(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def rendered(tokenizer: Any, question: Problem) -> str:
    """The text of the prompt."""
    return str(tokenizer.apply_chat_template(ARITHMETIC.messages(question), tokenize=False, add_generation_prompt=True))


def greedy_accuracy(model: Any, tokenizer: Any) -> float:
    """Held-out accuracy of the model."""
    asked = ARITHMETIC.held_out()
    prompts = [rendered(tokenizer, question) for question in asked]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        tokens_B_S = model.generate(**inputs, max_new_tokens=ARITHMETIC.max_tokens, do_sample=False)
    model.train(was_training)
    texts = tokenizer.batch_decode(tokens_B_S[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return ARITHMETIC.accuracy(texts, asked)


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


def configuration(case: Case, directory: str, seed: int) -> GRPOConfig:
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
        temperature=1.0,
        max_completion_length=ARITHMETIC.max_tokens,
        reward_weights=[FORMAT_WEIGHT, ANSWER_WEIGHT],
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
    tokenizer = AutoTokenizer.from_pretrained(ARITHMETIC.directory)
    model = AutoModelForCausalLM.from_pretrained(ARITHMETIC.directory, dtype=torch.float32)
    asked = ARITHMETIC.training()
    columns = {"prompt": [rendered(tokenizer, one) for one in asked], "answer": [one.answer for one in asked]}
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            args=configuration(case, directory, seed),
            reward_funcs=[form_reward, answer_reward],
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=ARITHMETIC.rank, lora_alpha=ARITHMETIC.scale * ARITHMETIC.rank, target_modules="all-linear"
            ),
        )
        clock = TrainingClock(
            evaluate=lambda: greedy_accuracy(trainer.model, tokenizer),
            target=case["target"],
            updates=case["updates"],
            limit=case["limit"],
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
