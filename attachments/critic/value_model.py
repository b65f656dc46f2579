"""The critic: an adapter of its own over the base model, and a linear head on the last hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from attachments.critic.sections import ValueHead
from clotho.models.parameters import Arrays, flat, nested
from clotho.models.policy import Policy
from clotho.models.turns import TurnBudget
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import MicroBatch, scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.learner import AdamW, LearnerSection
from clotho.training.learner_state import with_prefix
from clotho.training.optimizers import (
    OptimizerState,
    apply_step,
    clip_scale,
    global_norm,
    initial_state,
    state_arrays,
    state_from_arrays,
)

TRUNK, HEAD, BIAS = "trunk.", "head.weight", "head.bias"
OPTIMIZER = "optimizer."


def value_loss(
    value_N: mx.array, before_N: mx.array, return_N: mx.array, weight_N: mx.array, *, value_clip: float
) -> mx.array:
    """Return the clipped value loss: sum_t c_t max((V_t - R_t)^2, (clip(V_t, V'_t - e, V'_t + e) - R_t)^2) / 2.

    V' is the value at the start of the batch, e is `value_clip`; 0: no clip. As in the code of PPO (arXiv:1707.06347;
    baselines, ppo2). weight_N: c, 0 for padding. All (N,) float32.
    """
    error_N = mx.square(value_N - return_N)
    if value_clip > 0:
        near_N = before_N + mx.clip(value_N - before_N, -value_clip, value_clip)
        error_N = mx.maximum(error_N, mx.square(near_N - return_N))
    return 0.5 * mx.sum(weight_N * error_N)


class ValueModel:
    """Computes values and learns them. It belongs to the learner's thread.

    The trunk begins as the policy of the start of the run, and the head with zeros, so that all values are 0 at first.
    """

    def __init__(self, policy: Policy, settings: ValueHead, learner: LearnerSection, turns: TurnBudget) -> None:
        """Raises ModelError if blocks and head of the model cannot be separated."""
        self._model, self._settings, self._turns = policy.copy_model(), settings, turns
        self._learner = replace(learner, optimizer=AdamW(learning_rate=settings.learning_rate), lora_plus=1.0)
        self._forcing = TeacherForcing(self._model.model, self._model.vocab_size, layout=learner.layout)
        self.layout = self._forcing.layout
        width = self._width()
        trunk = {f"{TRUNK}{name}": array for name, array in flat(policy.trainable()).items()}
        self._parameters: Arrays = trunk | {HEAD: mx.zeros((width,)), BIAS: mx.zeros((1,))}
        self._optimizer: OptimizerState = initial_state(self._parameters, self._learner)

    def values(self, micro: MicroBatch) -> mx.array:
        """Return the value of the state before each token of the table: (N,) float32, evaluated."""
        with self._turns.recorded(self._model.model, gradients=False) as stages:
            value_N = self._value_N(self._parameters, micro)
        self._turns.evaluate(stages.take(), value_N)
        return value_N

    def gradient(
        self, micro: MicroBatch, before_N: mx.array, return_N: mx.array, weight_N: mx.array
    ) -> tuple[mx.array, Arrays]:
        """Return the value loss of a micro-batch and its gradient by parameter name, evaluated."""

        def loss(arrays: Arrays) -> mx.array:
            value_N = self._value_N(arrays, micro)
            return value_loss(value_N, before_N, return_N, weight_N, value_clip=self._settings.value_clip)

        try:
            with self._model.training_mode(), self._turns.recorded(self._model.model, gradients=True) as stages:
                value, arrays = mx.value_and_grad(loss)(dict(self._parameters))
        finally:
            self._use(self._parameters)
        gradient = {name: array.astype(mx.float32) for name, array in arrays.items()}
        self._turns.evaluate(stages.take(gradient), (gradient, value))
        return value, gradient

    def step(self, gradient: Arrays) -> bool:
        """Take an optimizer step, whose gradient is clipped to `learner.max_grad_norm`; False if it is not finite."""
        norm = float(np.array(global_norm(gradient)))
        if not norm < inf:
            return False
        self._parameters, self._optimizer = apply_step(
            self._parameters,
            gradient,
            self._optimizer,
            learning_rate=self._settings.learning_rate,
            scale=clip_scale(norm, self._learner.max_grad_norm),
            settings=self._learner,
        )
        mx.eval(self._parameters, self._optimizer)
        return True

    def release(self) -> None:
        """Let the modules refer to no parameters until the next computation."""
        self._model.release()

    def arrays(self) -> Arrays:
        """Name all arrays for a checkpoint; evaluated, and never changed later."""
        named = self._parameters | {f"{OPTIMIZER}{name}": one for name, one in state_arrays(self._optimizer).items()}
        mx.eval(named)
        return named

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Restore what `arrays` named. Raises ValueError, and changes nothing, if it does not fit the policy."""
        shapes = {name: array.shape for name, array in arrays.items() if not name.startswith(OPTIMIZER)}
        if shapes != {name: array.shape for name, array in self._parameters.items()}:
            raise ValueError("the critic of the checkpoint does not fit the trainable parameters")
        self._optimizer = state_from_arrays(with_prefix(arrays, OPTIMIZER), self._parameters, self._learner)
        self._parameters = {name: arrays[name] for name in self._parameters}  # sums of the norm keep their order

    def _width(self) -> int:
        (micro,) = build_micro_batches([scored_only((0,), (0,))], layout="padded", budget=2)
        return int(self._forcing.hidden(micro).shape[-1])

    def _value_N(self, arrays: Arrays, micro: MicroBatch) -> mx.array:
        self._use(arrays)
        hidden_N_D = self._forcing.hidden(micro).astype(mx.float32)
        return hidden_N_D @ arrays[HEAD] + arrays[BIAS]

    def _use(self, arrays: Arrays) -> None:
        self._model.use(nested(with_prefix(arrays, TRUNK)))
