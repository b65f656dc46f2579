"""mlx-lm-lora's policy update: the work of `step` in its `train_grpo` after rewards are known.

`step` is nested inside the trainer's function, so its lines are repeated here. All functions that it calls are the
library's: gradients by micro-batch, the check for finite values, the optimizer.
"""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm_lora.trainer.grpo_trainer import (
    _grpo_value_and_grad,
    calculate_rewards_and_advantages,
    grad_checkpoint,
    grpo_loss,
)

from bench.contenders.rollouts import RANK, RATE, SCALE, Rollouts, measured, rollouts
from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model
from bench.contenders.worker import Case, MeasureOnce, serve

CHECKPOINTED = "MLX_LM_LORA_CHECKPOINTED"
"""Environment variable that selects gradient checkpointing of each block."""
ROWS = 4
"""Completions per micro-batch; its trainer uses the number of prompts."""


def adapted(case: Case) -> Any:
    """The model with a new trainable adapter."""
    model, _ = named_model(case["model"], vocabulary=case["vocabulary"])
    return trainable(model)


def trainable(model: Any) -> Any:
    """Add a new trainable adapter to a model."""
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    model.train()
    if os.environ.get(CHECKPOINTED):
        _checkpoint_once(model.layers[0])
    mx.eval(model.parameters())
    return model


def _checkpoint_once(layer: Any) -> None:
    """Enable checkpointing once: the library replaces a method of the layer's class, which outlives the model."""
    if not hasattr(type(layer), "checkpointed"):
        grad_checkpoint(layer)
        type(layer).checkpointed = True


def advantages_of(sampled: Rollouts) -> tuple[mx.array, dict[str, mx.array]]:
    """Advantages and metrics, computed by its trainer's function from the rewards."""
    prompt_of = sampled.prompt_of

    def reward(**_: Any) -> list[float]:
        return sampled.rewards

    advantages, found = calculate_rewards_and_advantages(
        [reward], [""] * len(prompt_of), [""] * len(prompt_of), [""] * len(prompt_of), [], prompt_of,
        list(range(len(sampled.prompts))),
    )  # fmt: skip
    return advantages, found


def prepare(case: Case) -> MeasureOnce:
    """A model, its optimizer, and one batch that every run trains on."""
    return updates(adapted(case), case)


def updates(model: Any, case: Case) -> MeasureOnce:
    """The update of a model with an adapter on the rollouts of the case."""
    sampled = rollouts(case)
    optimizer = optim.Adam(learning_rate=RATE)
    completions = [mx.array(tokens, dtype=mx.int32) for tokens in sampled.completions]
    gradient_of = nn.value_and_grad(model, grpo_loss)
    mx.eval(completions)

    def update() -> None:
        advantages, reward_metrics = advantages_of(sampled)
        (loss, tokens, found), gradient = _grpo_value_and_grad(
            gradient_of,
            model,
            ROWS,
            batch=(sampled.prompts, None, None, None, None),
            completions=completions,
            completion_texts=[""] * len(completions),
            batch_indices=sampled.prompt_of,
            advantages=advantages,
            reward_metrics=reward_metrics,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.2,
            ref_model=None,
            grpo_loss_type="grpo",
            importance_sampling_level="token",
            max_tokens=case["completion_tokens"],
        )
        arrays: Any = tree_flatten(gradient)
        finite = mx.isfinite(loss) & mx.all(mx.stack([mx.all(mx.isfinite(array)) for _, array in arrays]))
        if not finite.item():
            raise FloatingPointError("loss or gradient is not finite")
        optimizer.update(model, gradient)
        mx.eval(model.state, optimizer.state, loss, tokens, found)

    return lambda: measured(update, sampled.tokens)


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_lora_update"], packages=["mlx", "mlx-lm", "mlx-lm-lora"])
