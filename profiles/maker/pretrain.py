"""Supervised learning from demonstrations, and the files of the model.

Cross-entropy in nats over the completion's tokens, the end token included, the prompt excluded. The same seed gives the
same weights where MLX's results are reproducible.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from clotho.models.loading import INSTALL_LAYERS
from profiles.maker.problem import Generator, Problem
from profiles.maker.tokenizer import END, PAD, chat_prompt, token_id, write_json

Shape = dict[str, Any]
"""The keys of config.json that determine the model; the size of the vocabulary is that of the tokenizer."""

SHAPE: Shape = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
"""The shape of the embedded policy."""

TEACHER_SHAPE: Shape = SHAPE | {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""The shape of teachers: 6 million parameters."""

Demonstrator = Callable[[Problem, Random, int], str]
"""Returns a completion of a problem; the number is that of the update, from 0."""

LENGTH_STEP = 8
"""Batches are padded to multiples of this many tokens, so that few shapes occur."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how hard to train."""

    steps: int
    """Number of updates."""
    batch_size: int = 64
    """Demonstrations in an update."""
    parts: int = 2
    """Batches of like length into which an update is divided."""
    learning_rate: float = 3e-3
    """The peak, after the warm-up."""
    warmup_steps: int = 100
    """Updates until the peak."""


@dataclass(frozen=True)
class Batch:
    """Demonstrations, right-padded: `tokens_B_T` int32 and `mask_B_T` float32, 1 where the token is learned."""

    tokens_B_T: mx.array
    mask_B_T: mx.array
    learnt_from: int
    """The first column with a learned token."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Where demonstrations come from."""

    draw: Generator
    demonstrate: Demonstrator
    exclude: Collection[str]
    """Prompts that never occur in a demonstration."""


def make_model(shape: Shape, vocabulary: int, seed: int) -> nn.Module:
    """Make a fresh float32 policy with `vocabulary` token ids, whose head is tied to its embeddings."""
    architecture = importlib.import_module(f"mlx_lm.models.{shape['model_type']}")
    INSTALL_LAYERS()
    mx.random.seed(seed)
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict({**shape, "vocab_size": vocabulary}))
    embeddings = text_layers(model).embed_tokens
    embeddings.weight = mx.random.normal(embeddings.weight.shape, scale=0.05)
    mx.eval(model.state)
    return model


def text_layers(model: nn.Module) -> Any:
    """Return the embeddings and the blocks, which compute hidden states."""
    return model.get("language_model", model).model


def pad_batch(rows: list[tuple[list[int], int]], pad: int) -> Batch:
    """Pad rows of (tokens, length of the prompt) on the right to one batch."""
    longest = max(len(tokens) for tokens, _ in rows)
    width = -(-longest // LENGTH_STEP) * LENGTH_STEP
    tokens = [tokens + [pad] * (width - len(tokens)) for tokens, _ in rows]
    mask = [[float(start <= t < len(tokens)) for t in range(width)] for tokens, start in rows]
    return Batch(mx.array(tokens, dtype=mx.int32), mx.array(mask), min(start for _, start in rows))


def batches(tokenizer: Tokenizer, lesson: Lesson, schedule: Schedule, seed: int) -> Iterator[list[Batch]]:
    """Draw the demonstrations of one update after another.

    An update's demonstrations come as `Schedule.parts` batches, from short to long, which saves padding.
    """
    rng = Random(seed)
    pad, end = token_id(tokenizer, PAD), token_id(tokenizer, END)
    size = schedule.batch_size // schedule.parts
    for step in range(schedule.steps):
        rows: list[tuple[list[int], int]] = []
        while len(rows) < schedule.parts * size:
            problem = lesson.draw(rng)
            if problem.prompt not in lesson.exclude:
                prompt = tokenizer.encode(chat_prompt(problem.prompt)).ids
                text = lesson.demonstrate(problem, rng, step)
                rows.append(([*prompt, *tokenizer.encode(text).ids, end], len(prompt)))
        rows.sort(key=lambda row: len(row[0]))
        yield [pad_batch(rows[i : i + size], pad) for i in range(0, len(rows), size)]


def demonstration_loss(model: nn.Module, parts: list[Batch]) -> mx.array:
    """Average the negative log-likelihood over all learned tokens of an update, in nats."""
    total, count, layers = mx.array(0.0), mx.array(0.0), text_layers(model)
    for part in parts:
        hidden_B_T_D = layers(part.tokens_B_T[:, :-1])[:, part.learnt_from - 1 :]
        logits_B_T_V = layers.embed_tokens.as_linear(hidden_B_T_D)
        weight_B_T = part.mask_B_T[:, part.learnt_from :]
        total += (nn.losses.cross_entropy(logits_B_T_V, part.tokens_B_T[:, part.learnt_from :]) * weight_B_T).sum()
        count += weight_B_T.sum()
    return total / count


def make_optimizer(schedule: Schedule) -> optim.Optimizer:
    """Make AdamW with bias correction; its rate warms up linearly, then falls to zero along a cosine."""
    up = optim.linear_schedule(0.0, schedule.learning_rate, schedule.warmup_steps)
    down = optim.cosine_decay(schedule.learning_rate, schedule.steps - schedule.warmup_steps)
    rate = optim.join_schedules([up, down], [schedule.warmup_steps])
    return optim.AdamW(rate, betas=[0.9, 0.98], weight_decay=0.01, bias_correction=True)


def pretrain(
    model: nn.Module,
    tokenizer: Tokenizer,
    lesson: Lesson,
    schedule: Schedule,
    *,
    seed: int,
    objective: Callable[[Any, list[Batch]], mx.array] = demonstration_loss,
) -> None:
    """Train `model` in place by `schedule`; progress goes to standard error."""
    optimizer = make_optimizer(schedule)
    clip: Any = optim.clip_grad_norm
    gradient = value_and_grad(model, objective)
    began, recent = time.perf_counter(), deque[float](maxlen=100)
    for step, parts in enumerate(batches(tokenizer, lesson, schedule, seed), start=1):
        loss, gradients = gradient(model, parts)
        gradients, _ = clip(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, loss)
        recent.append(loss.item())
        if step % 100 == 0:
            seconds = time.perf_counter() - began
            sys.stderr.write(f"step {step:5d}  loss {sum(recent) / len(recent):.4f}  {seconds:6.1f} s\n")


def parameter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """List the weights by their names in the file."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.state)))


def save_model(model: nn.Module, tokenizer: Tokenizer, shape: Shape, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (float32) as mlx-lm reads them."""
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    config = {
        **shape,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
        **ids,
    }
    write_json(directory / "config.json", config)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    write_json(directory / "generation_config.json", {"eos_token_id": [end], "pad_token_id": pad, **sampling})
    mx.save_safetensors(str(directory / "model.safetensors"), parameter_arrays(model), metadata={"format": "mlx"})
