"""The directory of a task: problems, tokenizer, configuration and trained weights, from a seed.

Importing this module imports MLX: call `clotho.process.load_blas` before.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
from tokenizers import Tokenizer

from profiles.maker import pretrain
from profiles.maker.evaluate import Measurement, measure
from profiles.maker.pretrain import Demonstrator, Lesson, Schedule, Shape
from profiles.maker.problem import Generator, Problem, write_problems
from profiles.maker.tokenizer import save_tokenizer, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The problems, and how a policy is trained on demonstrations of them."""

    problems: tuple[list[Problem], list[Problem]]
    """For training, and held out."""
    draw: Generator
    """Draws the problems of the demonstrations."""
    shape: Shape
    schedule: Schedule


@dataclass(frozen=True, kw_only=True)
class Made:
    """The policy, and its accuracy on the held-out problems."""

    model: nn.Module
    tokenizer: Tokenizer
    measurement: Measurement
    seed: int
    seconds: float
    """Duration of the training."""


def make_directory(out: Path, recipe: Recipe, demonstrate: Demonstrator, seed: int) -> Made:
    """Write everything but the card; the same seed writes the same problems and tokenizer, byte for byte."""
    out.mkdir(parents=True, exist_ok=True)
    training, held_out = recipe.problems
    write_problems(out / "train.jsonl", training)
    write_problems(out / "heldout.jsonl", held_out)
    tokenizer = train_tokenizer(problem.prompt for problem in training)
    save_tokenizer(tokenizer, out, context=recipe.shape["max_position_embeddings"])
    model = make_model(recipe, tokenizer, seed)
    seconds = teach(model, tokenizer, recipe, demonstrate, seed)
    pretrain.save_model(model, tokenizer, recipe.shape, out)
    measurement = measure(model, tokenizer, held_out)
    sys.stdout.write(f"{table(measurement)}\nwritten to {out} in {seconds:.0f} s of training\n")
    return Made(model=model, tokenizer=tokenizer, measurement=measurement, seed=seed, seconds=seconds)


def make_model(recipe: Recipe, tokenizer: Tokenizer, seed: int) -> nn.Module:
    """Make a model with random weights."""
    return pretrain.make_model(recipe.shape, tokenizer.get_vocab_size(), seed)


def teach(model: nn.Module, tokenizer: Tokenizer, recipe: Recipe, demonstrate: Demonstrator, seed: int) -> float:
    """Train `model` in place on demonstrations, none of a held-out problem; return the seconds that it took."""
    exclude = {problem.prompt for problem in recipe.problems[1]}
    lesson = Lesson(draw=recipe.draw, demonstrate=demonstrate, exclude=exclude)
    began = time.perf_counter()
    pretrain.pretrain(model, tokenizer, lesson, recipe.schedule, seed=seed)
    return time.perf_counter() - began


def table(measurement: Measurement) -> str:
    """Show the measured accuracies as a Markdown table, one row for each kind."""
    lines = ["| kind | greedy | sampled at temperature 1 | right in 8 samples |", "|---|---|---|---|"]
    for kind, greedy in measurement.accuracy.items():
        sampled, passed = measurement.sampled_accuracy[kind], measurement.pass_at_k[kind]
        lines.append(f"| {kind} | {greedy:.3f} | {sampled:.3f} | {passed:.3f} |")
    return "\n".join(lines)
