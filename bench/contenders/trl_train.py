"""TRL's GRPOTrainer on the task of profile local-m3: PyTorch on the CPU, adapter by peft, generation by transformers.

The model, the adapter (rank, scale, layers), the prompts, the rewards, the limit of tokens and the verdicts are those
of the profile. Its other settings come with the case; those left out are the ones that `bench.search` found best for
mlx-lm-lora, whose loss is the same, but for eight groups, as with six a seed destroyed the policy here, and at a rate
that makes the same first step: MLX's Adam does not correct its bias by default, so that its first steps are sqrt(10)
times as large as those of PyTorch's AdamW at the same rate.
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

from bench.contenders import arithmetic_task as task
from bench.contenders.loop import Case, Metrics, Once, serve

SEMANTICS = (
    "Seconds of training, without loading and without evaluations, until the update in question; PyTorch on the CPU, "
    "one process that samples (transformers, without vLLM) and learns by turns. From the command: from the "
    "start of the process, imports and loading included."
)
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
"""Variable with the number of PyTorch's threads; one where it is not set."""


def form_reward(completions: list[str], **others: Any) -> list[float]:
    """The form, as TRL calls rewards."""
    return [task.has_form(text) for text in completions]


def answer_reward(completions: list[str], answer: list[str], **others: Any) -> list[float]:
    """The right answer, as TRL calls rewards."""
    return [task.is_right(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def rendered(tokenizer: Any, question: task.Question) -> str:
    """The prompt's text."""
    message = [{"role": "user", "content": question.prompt}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def greedy_accuracy(model: Any, tokenizer: Any) -> float:
    """Held-out accuracy of the model as it is."""
    asked = task.questions("heldout.jsonl")
    prompts = [rendered(tokenizer, question) for question in asked]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        tokens_B_S = model.generate(**inputs, max_new_tokens=task.MAX_TOKENS, do_sample=False)
    model.train(was_training)
    texts = tokenizer.batch_decode(tokens_B_S[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return task.accuracy(texts, asked)


class Clocked(TrainerCallback):
    """Tells the course of every step, and ends the training where it says so."""

    def __init__(self, course: task.Course) -> None:
        self._course = course

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The clock runs."""
        self._course.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """An update is done."""
        try:
            self._course.updated()
        except task.Over:
            control.should_training_stop = True


def configuration(case: Case, directory: str, seed: int) -> GRPOConfig:
    """The trainer's own settings; it reports and saves nothing."""
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
        max_completion_length=task.MAX_TOKENS,
        reward_weights=[task.FORM_WEIGHT, task.ANSWER_WEIGHT],
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
    tokenizer = AutoTokenizer.from_pretrained(task.POLICY)
    model = AutoModelForCausalLM.from_pretrained(task.POLICY, dtype=torch.float32)
    asked = task.questions("train.jsonl")
    columns = {"prompt": [rendered(tokenizer, one) for one in asked], "answer": [one.answer for one in asked]}
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            args=configuration(case, directory, seed),
            reward_funcs=[form_reward, answer_reward],
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=task.RANK, lora_alpha=task.SCALE * task.RANK, target_modules="all-linear"),
        )
        course = task.Course(
            evaluate=lambda: greedy_accuracy(trainer.model, tokenizer),
            target=case["target"],
            updates=case["updates"],
            limit=case["limit"],
        )
        trainer.add_callback(Clocked(course))
        trainer.train()
    return course.metrics()


def prepare(case: Case) -> Once:
    """Runs of equal settings; each has the next seed, from that of the case, or 0."""
    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    logging.disable(logging.WARNING)
    seeds = iter(range(case.get("seed", 0), MANY))
    settings = SETTINGS | case
    return lambda: train(settings, next(seeds))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS, packages=["torch", "transformers", "trl", "peft"])
