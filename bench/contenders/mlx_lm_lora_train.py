"""mlx-lm-lora's GRPO on the task of profile local-m3, with its own `train_grpo`, generation and batches.

Model, adapter (rank, scale, layers), prompts, rewards, token limit and correctness rules are those of the profile. The
case sets the other hyperparameters; the defaults are the best that `bench.search` found. The library is not modified:
its trainer takes the batch iterator as an argument. Between two batches the weights of the last update are in place,
and the held-out accuracy is measured with the clock stopped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm_lora.trainer.grpo_trainer import GRPOTrainingArgs, generate_grpo, iterate_grpo_batches, train_grpo

from bench.contenders import arithmetic_task as task
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve

BEST: Case = {
    "learning_rate": 2e-3,
    "batch_size": 6,
    "group_size": 2,
    "beta": 0.0,
    "loss": "bnpo",
    "epsilon": 1e-4,
    "optimizer": "adam",
    "stop": "",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "updates": 1000,
    "limit": 600.0,
}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {"adam": optim.Adam, "adamw": optim.AdamW}
MANY = 10**6
EVALUATION_BATCH = 256


def form_reward(prompts: list[str], completions: list[str], answer: list[str], types: list[str]) -> list[float]:
    """The format reward with mlx-lm-lora's signature."""
    return [task.has_format(text) for text in completions]


def answer_reward(prompts: list[str], completions: list[str], answer: list[str], types: list[str]) -> list[float]:
    """The correctness reward with mlx-lm-lora's signature."""
    return [task.is_correct(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def adapted() -> tuple[Any, Any]:
    """The policy with a new adapter on every linear layer of its blocks, and its tokenizer."""
    model, tokenizer = load(str(task.POLICY))[:2]
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": task.RANK, "scale": task.SCALE, "dropout": 0.0})
    mx.eval(model.parameters())
    return model, tokenizer


def rendered(tokenizer: Any, question: task.Problem) -> list[int]:
    """The tokens of the prompt."""
    message = [{"role": "user", "content": question.prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def greedy_accuracy(model: Any, tokenizer: Any, asked: list[task.Problem], prompts: list[list[int]]) -> float:
    """Held-out accuracy of the model."""
    _, texts, _ = generate_grpo(
        model=model,
        tokenizer=tokenizer,
        prompt_tokens=prompts,
        max_tokens=task.MAX_TOKENS,
        group_size=1,
        batch_size=EVALUATION_BATCH,
        end_token="",
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
    )
    return task.accuracy(texts, asked)


def training_clock(case: Case, model: Any, tokenizer: Any) -> task.TrainingClock:
    """The clock of this run, with its limits and its evaluation."""
    asked = task.read_problems("heldout.jsonl")
    prompts = [rendered(tokenizer, question) for question in asked]
    return task.TrainingClock(
        evaluate=lambda: greedy_accuracy(model, tokenizer, asked, prompts),
        target=case.get("target"),
        updates=case["updates"],
        limit=case["limit"],
    )


def arguments(case: Case, directory: str) -> GRPOTrainingArgs:
    """The trainer's arguments; reports and checkpoints are as rare as possible."""
    return GRPOTrainingArgs(
        batch_size=case["batch_size"],
        group_size=case["group_size"],
        iters=MANY,
        steps_per_report=MANY,
        steps_per_save=MANY,
        beta=case["beta"],
        epsilon=case["epsilon"],
        grpo_loss_type=case["loss"],
        temperature=case["temperature"],
        top_p=case["top_p"],
        top_k=case["top_k"],
        max_completion_length=task.MAX_TOKENS,
        reward_weights=[task.FORMAT_WEIGHT, task.ANSWER_WEIGHT],
        adapter_file=str(Path(directory, "adapters.safetensors")),
    )


def train(case: Case, seed: int) -> Metrics:
    """One run from the untrained policy."""
    np.random.seed(seed)
    mx.random.seed(seed)
    model, tokenizer = adapted()
    reference = load(str(task.POLICY))[0] if case["beta"] else None
    clock = training_clock(case, model, tokenizer)
    asked = task.read_problems("train.jsonl")
    dataset: list[tuple[list[int], list[int], str, str, str]] = [
        (rendered(tokenizer, one), [], one.prompt, one.answer, "") for one in asked
    ]

    def batches(**how: Any) -> Iterator[Any]:
        clock.begin()
        for batch in iterate_grpo_batches(**how):
            yield batch
            clock.updated()

    with tempfile.TemporaryDirectory() as directory, suppress(task.TrainingEnded):
        train_grpo(
            model=model,
            ref_model=reference,
            tokenizer=tokenizer,
            optimizer=OPTIMIZERS[case["optimizer"]](learning_rate=case["learning_rate"]),
            train_dataset=dataset,
            reward_funcs=[form_reward, answer_reward],
            args=arguments(case, directory),
            iterate_batches=batches,
            end_answer_token=case["stop"],
        )
    return clock.metrics()


def prepare(case: Case) -> MeasureOnce:
    """Runs of equal settings, each with the next seed, starting at the seed of the case or 0."""
    seeds = iter(range(case.get("seed", 0), MANY))
    settings = BEST | case
    return lambda: train(settings, next(seeds))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_lora_train"], packages=["mlx", "mlx-lm", "mlx-lm-lora"])
