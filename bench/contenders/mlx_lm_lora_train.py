"""mlx-lm-lora's GRPO on the task of profile local-m3: its own `train_grpo`, its own generation, its own batches.

The model, the adapter (rank, scale, layers), the prompts, the rewards, the limit of tokens and the verdicts are those
of the profile. Its other settings come with the case; those left out are the best that `bench.search` found. Nothing of
the library is changed: the trainer takes the function that makes batches as an argument, and between two of them,
where the weights of the last update stand, held-out accuracy is measured with the clock stopped.
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
from bench.contenders.loop import Case, Metrics, Once, serve

SEMANTICS = (
    "Seconds of training, without loading and without evaluations, until greedy accuracy on all held-out problems "
    "reaches the target; one process that samples and learns by turns. From the command: from the start of the "
    "process, imports and loading included."
)
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
ROWS_OF_A_LOOK = 256


def form_reward(prompts: list[str], completions: list[str], answer: list[str], types: list[str]) -> list[float]:
    """The form, as mlx-lm-lora calls rewards."""
    return [task.has_form(text) for text in completions]


def answer_reward(prompts: list[str], completions: list[str], answer: list[str], types: list[str]) -> list[float]:
    """The right answer, as mlx-lm-lora calls rewards."""
    return [task.is_right(text, wanted) for text, wanted in zip(completions, answer, strict=True)]


def adapted() -> tuple[Any, Any]:
    """The policy with a fresh adapter over every linear layer of its blocks, and its tokenizer."""
    model, tokenizer = load(str(task.POLICY))[:2]
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": task.RANK, "scale": task.SCALE, "dropout": 0.0})
    mx.eval(model.parameters())
    return model, tokenizer


def rendered(tokenizer: Any, question: task.Question) -> list[int]:
    """The prompt's tokens."""
    message = [{"role": "user", "content": question.prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def greedy_accuracy(model: Any, tokenizer: Any, asked: list[task.Question], prompts: list[list[int]]) -> float:
    """Held-out accuracy of the model as it is."""
    _, texts, _ = generate_grpo(
        model=model,
        tokenizer=tokenizer,
        prompt_tokens=prompts,
        max_tokens=task.MAX_TOKENS,
        group_size=1,
        batch_size=ROWS_OF_A_LOOK,
        end_token="",
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
    )
    return task.accuracy(texts, asked)


def course_of(case: Case, model: Any, tokenizer: Any) -> task.Course:
    """How far this run is to go, and where it is looked at."""
    asked = task.questions("heldout.jsonl")
    prompts = [rendered(tokenizer, question) for question in asked]
    return task.Course(
        evaluate=lambda: greedy_accuracy(model, tokenizer, asked, prompts),
        target=case.get("target"),
        updates=case["updates"],
        limit=case["limit"],
    )


def arguments(case: Case, directory: str) -> GRPOTrainingArgs:
    """The trainer's own settings; it reports and saves as seldom as it can."""
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
        reward_weights=[task.FORM_WEIGHT, task.ANSWER_WEIGHT],
        adapter_file=str(Path(directory, "adapters.safetensors")),
    )


def train(case: Case, seed: int) -> Metrics:
    """One run from the untrained policy."""
    np.random.seed(seed)
    mx.random.seed(seed)
    model, tokenizer = adapted()
    reference = load(str(task.POLICY))[0] if case["beta"] else None
    course = course_of(case, model, tokenizer)
    asked = task.questions("train.jsonl")
    dataset: list[tuple[list[int], list[int], str, str, str]] = [
        (rendered(tokenizer, one), [], one.prompt, one.answer, "") for one in asked
    ]

    def batches(**how: Any) -> Iterator[Any]:
        course.begin()
        for batch in iterate_grpo_batches(**how):
            yield batch
            course.updated()

    with tempfile.TemporaryDirectory() as directory, suppress(task.Over):
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
    return course.metrics()


def prepare(case: Case) -> Once:
    """Runs of equal settings; each has the next seed, from that of the case, or 0."""
    seeds = iter(range(case.get("seed", 0), MANY))
    settings = BEST | case
    return lambda: train(settings, next(seeds))


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm", "mlx-lm-lora"])
