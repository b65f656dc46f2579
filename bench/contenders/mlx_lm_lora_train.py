"""mlx-lm-lora's GRPO on the task of a profile, with its own `train_grpo`, generation and batches.

Model, adapter (rank, scale, layers), prompts, rewards, token limit and correctness rules are those of the profile. The
case sets the other hyperparameters. The library is not
modified: its trainer takes the batch iterator as an argument. Between two batches the weights of the last update
are in place, and the held-out accuracy is measured with the clock stopped.
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
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_tokenizer
from mlx_lm_lora.trainer.grpo_trainer import GRPOTrainingArgs, generate_grpo, iterate_grpo_batches, train_grpo

from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model
from bench.contenders.tasks import task_of
from bench.contenders.training_task import Problem, Reward, TrainingClock, TrainingEnded, TrainingTask
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve

DEFAULTS: Case = {
    "profile": "arithmetic",
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
    "limit": 1e9,
    "limit_seconds": 1e9,
    "floor": 0.0,
    "evaluated": 1,
    "evaluate_every": 1,
}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {"adam": optim.Adam, "adamw": optim.AdamW}
MANY = 10**6
EVALUATION_BATCH = 256


def reward_function(reward: Reward) -> Callable[..., list[float]]:
    """The reward with mlx-lm-lora's signature."""

    def rewards(prompts: list[str], completions: list[str], answer: list[str], types: list[str]) -> list[float]:
        return [reward(text, wanted) for text, wanted in zip(completions, answer, strict=True)]

    return rewards


def adapted(task: TrainingTask) -> Any:
    """The policy with a new adapter on every linear layer of its blocks."""
    model, _ = named_model(task.model)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": task.rank, "scale": task.scale, "dropout": 0.0})
    mx.eval(model.parameters())
    return model


def rendered(tokenizer: Any, task: TrainingTask, question: Problem) -> list[int]:
    """The tokens of the prompt."""
    text = tokenizer.apply_chat_template(task.messages(question), tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def greedy_accuracy(model: Any, tokenizer: Any, task: TrainingTask) -> float:
    """Held-out accuracy of the model."""
    asked = task.held_out()
    _, texts, _ = generate_grpo(
        model=model,
        tokenizer=tokenizer,
        prompt_tokens=[rendered(tokenizer, task, question) for question in asked],
        max_tokens=task.max_tokens,
        group_size=1,
        batch_size=EVALUATION_BATCH,
        end_token="",
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
    )
    return task.accuracy(texts, asked)


def arguments(case: Case, task: TrainingTask, directory: str) -> GRPOTrainingArgs:
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
        max_completion_length=task.max_tokens,
        reward_weights=[weight for weight, _ in task.rewards],
        adapter_file=str(Path(directory, "adapters.safetensors")),
    )


def train(case: Case, seed: int) -> Metrics:
    """One run from the untrained policy."""
    np.random.seed(seed)
    mx.random.seed(seed)
    task = task_of(case)
    loader: Any = load_tokenizer
    model, tokenizer = adapted(task), loader(task.directory)
    reference = named_model(task.model)[0] if case["beta"] else None
    clock = TrainingClock(
        evaluate=(lambda: greedy_accuracy(model, tokenizer, task)) if case["evaluated"] else None,
        target=case.get("target"),
        updates=case["updates"],
        limit=case["limit"],
        limit_seconds=case["limit_seconds"],
        floor=case["floor"],
        interval=case["evaluate_every"],
    )
    dataset: list[tuple[list[int], list[int], str, str, str]] = [
        (rendered(tokenizer, task, one), [], one.prompt, one.answer, "") for one in task.training()
    ]

    def batches(**how: Any) -> Iterator[Any]:
        clock.begin()
        for batch in iterate_grpo_batches(**how):
            yield batch
            clock.updated()

    with tempfile.TemporaryDirectory() as directory, suppress(TrainingEnded):
        train_grpo(
            model=model,
            ref_model=reference,
            tokenizer=tokenizer,
            optimizer=OPTIMIZERS[case["optimizer"]](learning_rate=case["learning_rate"]),
            train_dataset=dataset,
            reward_funcs=[reward_function(reward) for _, reward in task.rewards],
            args=arguments(case, task, directory),
            iterate_batches=batches,
            end_answer_token=case["stop"],
        )
    return clock.metrics()


def prepare(case: Case) -> MeasureOnce:
    """Runs of equal settings, each with the next seed, starting at the seed of the case or 0."""
    seeds = iter(range(case.get("seed", 0), MANY))
    settings = DEFAULTS | case
    return lambda: train(settings, next(seeds))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_lora_train"], packages=["mlx", "mlx-lm", "mlx-lm-lora"])
