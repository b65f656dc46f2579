"""The optimizer step of AdaLoRA (arXiv:2303.10512): an adapter as P Lambda Q, with scores of its triplets and masks.

The policy computes with the matrices of LoRA, y = W x + scale (x A) B, where A = Q^T and B = Lambda P^T, so that decode
engine, checkpoints and other libraries read a plain LoRA. P, Lambda and Q are coordinates that the state of the
optimizer holds. The gradient of the loss in them follows from that of A and B:

    dQ^T = dA        dP^T = Lambda dB        d lambda_i = sum_j (dB)_ij (P^T)_ij

The optimizer of the run steps in these coordinates. The penalty gamma (|P^T P / n - I|^2 + |Q Q^T - I|^2) of each
module with n outputs (equation 4) is decoupled from the optimizer, as the weight decay of AdamW: a step of learning
rate eta also subtracts 4 eta gamma (M M^T / m - I) M from the rows M of P^T (m = n) and of Q (m = 1). Triplet i of a
module has the score

    S_i = s(lambda_i) + mean_j s(P_ji) + mean_j s(Q_ij),   s(w) = I(w) U(w)

with averages of the sensitivity |w dL/dw| and of its deviation (equations 7 to 10), at the weights before the step.
The lambda_i outside the budget become zero (equation 6). In the last updates those that are zero stay zero.

Departures: the sensitivity has the gradient that is clipped, as the optimizer has it, without the penalty. In the
gradient, the penalty is larger than the loss of RL, so that Adam would follow the penalty alone in P and Q. Q begins as
mlx-lm initialises A.
The entries of P begin with variance 1, and its columns have the norm sqrt(n) where the paper has 1: a step of Adam in
lambda then changes the entries of B by the learning rate, as with LoRA, and not by the sqrt(n)-th part of it. The
scores |w dL/dw| do not depend on this scale. An adapter that is not new begins with lambda_i = |B_i| / sqrt(n), which
keeps what it computes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from attachments.adalora.budget import Bools, best, budget
from attachments.adalora.sections import AdaLora
from clotho.models.parameters import Arrays
from clotho.settings.learner import LearnerSection
from clotho.storage.adapters import RANK_AXES
from clotho.training.optimizers import OptimizerState, StepRule, apply_step, initial_state

VALUES, SENSITIVITY, UNCERTAINTY = "adalora.value", "adalora.sensitivity", "adalora.uncertainty"
"""Slots of the state: P^T, Lambda and Q^T under `MODULE.lora_b`, `MODULE.lora_e`, `MODULE.lora_a`, and the averages."""

OWN = (VALUES, SENSITIVITY, UNCERTAINTY)

SMALLEST = 1e-30
"""Norm below which a row of B is not divided by its norm."""

COPIES = len(OWN)
"""Arrays of the size of the adapter in these slots, without Lambda, which is small."""


class Triplets(NamedTuple):
    """A module: rows of Q (..., R, inputs), of P^T (..., R, outputs), and Lambda (..., R, 1)."""

    q: mx.array
    p: mx.array
    e: mx.array


class AdaLoraRule(StepRule):
    """Steps in P, Lambda and Q, and prunes triplets. It has no state of its own."""

    keeps_zeros = True

    def __init__(self, settings: AdaLora, *, steps: int, seed: int) -> None:
        """steps: number of updates of the schedule. seed: of the initial P."""
        self._settings, self._steps, self._seed = settings, steps, seed

    def initial_state(self, parameters: Arrays, settings: LearnerSection) -> OptimizerState:
        """Return the state before the first step; lazy."""
        values = self._coordinates(parameters)
        inner = initial_state({**_others(parameters), **values}, settings)
        zeros = {name: mx.zeros(array.shape) for name, array in values.items()}
        return inner._replace(slots=inner.slots | {VALUES: values, SENSITIVITY: zeros, UNCERTAINTY: dict(zeros)})

    def gradient(self, gradients: Arrays, state: OptimizerState) -> Arrays:
        """Return the gradient of the loss by P, Lambda and Q; lazy."""
        values, found = state.slots[VALUES], _others(gradients)
        for module in _modules(values):
            at = _triplets(values, module)
            a, b = (rows(module, matrix, gradients) for matrix in ("lora_a", "lora_b"))
            found |= _named(module, Triplets(a, at.e * b, mx.sum(b * at.p, axis=-1, keepdims=True)))
        return found

    def apply(
        self,
        parameters: Arrays,
        gradients: Arrays,
        state: OptimizerState,
        *,
        step: int,
        learning_rate: float,
        scale: float,
        settings: LearnerSection,
    ) -> tuple[Arrays, OptimizerState]:
        """Take one step in the coordinates, and keep the triplets of the budget."""
        values, scored = state.slots[VALUES], self._scored(gradients, state, scale)
        inner = state._replace(slots={name: one for name, one in state.slots.items() if name not in OWN})
        updated, inner = apply_step(
            {**_others(parameters), **values},
            gradients,
            inner,
            learning_rate=learning_rate,
            scale=scale,
            settings=settings,
        )
        new = {name: updated[name] for name in values} | self._more_orthogonal(updated, values, learning_rate)
        for module, kept in self._kept(values, scored, step).items():
            name = f"{module}.lora_e"
            new[name] = mx.where(mx.array(kept), new[name], 0.0)
        return {**_others(updated), **_matrices(new)}, inner._replace(slots=inner.slots | {VALUES: new} | scored)

    def _more_orthogonal(self, updated: Arrays, values: Arrays, learning_rate: float) -> Arrays:
        """Return P and Q after the step of the penalty too; its gradient is that at the values before both steps.

        Arrays are contiguous, as those of a checkpoint: products with others can differ in the last bit.
        """
        found: Arrays = {}
        weight = 4.0 * learning_rate * self._settings.orthogonality
        for module in _modules(values):
            at = _triplets(values, module)
            excess = Triplets(_excess(at.q, squared_norm=1.0), _excess(at.p, squared_norm=at.p.shape[-1]), at.e)
            for name, array in _named(module, excess).items():
                if not name.endswith(".lora_e"):
                    found[name] = mx.contiguous(updated[name] - weight * array)
        return found

    def _coordinates(self, parameters: Arrays) -> Arrays:
        found: Arrays = {}
        for module in _modules(parameters):
            q, b = (rows(module, matrix, parameters).astype(mx.float32) for matrix in ("lora_a", "lora_b"))
            e = mx.sqrt(mx.mean(mx.square(b), axis=-1, keepdims=True))
            key = mx.random.key(zlib.crc32(f"{self._seed} {module}".encode()))
            random = mx.random.normal(b.shape, key=key)
            p = mx.where(e > 0, b / mx.maximum(e, SMALLEST), random)
            found |= _named(module, Triplets(q, p, e))
        return found

    def _scored(self, gradients: Arrays, state: OptimizerState, scale: float) -> dict[str, Arrays]:
        """Return the new averages of sensitivity and uncertainty of every coordinate."""
        beta1, beta2 = self._settings.sensitivity_decay, self._settings.uncertainty_decay
        sensitivity: Arrays = {}
        uncertainty: Arrays = {}
        for name, value in state.slots[VALUES].items():
            now = mx.abs(value * gradients[name] * scale)
            mean = beta1 * state.slots[SENSITIVITY][name] + (1.0 - beta1) * now
            deviation = mx.abs(now - mean)
            sensitivity[name] = mean
            uncertainty[name] = beta2 * state.slots[UNCERTAINTY][name] + (1.0 - beta2) * deviation
        return {SENSITIVITY: sensitivity, UNCERTAINTY: uncertainty}

    def _kept(self, values: Arrays, scored: Mapping[str, Arrays], step: int) -> dict[str, Bools]:
        """Return which triplets of each module stay; of no module if all stay. Evaluates the scores."""
        names = [f"{module}.lora_e" for module in _modules(values)]
        total = sum(values[name].size for name in names)
        places = sum(values[name].size // values[name].shape[-2] for name in names)
        last = min(total, self._settings.target_rank * places)
        wanted = budget(step, steps=self._steps, first=total, last=last, settings=self._settings)
        if step >= self._steps - self._settings.final_steps:
            in_use = [np.array(values[name]) != 0 for name in names]
            if 0 < sum(int(one.sum()) for one in in_use) <= last:
                return dict(zip(_modules(values), in_use, strict=True))
        elif wanted == total or (step - self._settings.warmup_steps) % self._settings.interval:
            return {}
        scores = [_scores(scored, module) for module in _modules(values)]
        mx.eval(scores)
        chosen = best([np.array(one, dtype=np.float64) for one in scores], wanted)
        return dict(zip(_modules(values), chosen, strict=True))


def rows(module: str, matrix: str, arrays: Arrays) -> mx.array:
    """Return A or B of a module, or what has its layout, with the rank as the last axis but one."""
    array = arrays[f"{module}.{matrix}"]
    return array if RANK_AXES[matrix, array.ndim] == array.ndim - 2 else array.swapaxes(-1, -2)


def ranks(values: Mapping[str, mx.array]) -> list[int]:
    """Return the number of triplets in use of each module, of each expert of a mixture."""
    in_use = (np.array(array) != 0 for name, array in values.items() if name.endswith(".lora_e"))
    return [int(rank) for one in in_use for rank in one.sum(axis=(-2, -1)).reshape(-1)]


def _modules(arrays: Iterable[str]) -> list[str]:
    return [name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")]


def _others(arrays: Arrays) -> Arrays:
    """Return what belongs to no triplet, such as embeddings that are trained beside the adapter."""
    return {name: one for name, one in arrays.items() if not name.endswith((".lora_a", ".lora_b", ".lora_e"))}


def _triplets(values: Arrays, module: str) -> Triplets:
    return Triplets(rows(module, "lora_a", values), rows(module, "lora_b", values), values[f"{module}.lora_e"])


def _named(module: str, found: Triplets) -> Arrays:
    """Return the arrays in the layout of mlx-lm: rows of A as columns, except in a mixture, whose B has columns."""
    is_stack = found.q.ndim == 3
    q, p = (found.q, found.p.swapaxes(-1, -2)) if is_stack else (found.q.swapaxes(-1, -2), found.p)
    return {f"{module}.lora_a": q, f"{module}.lora_b": p, f"{module}.lora_e": found.e}


def _matrices(values: Arrays) -> Arrays:
    """Return A and B of every module, which the policy computes with."""
    found: Arrays = {}
    for module in _modules(values):
        at = _triplets(values, module)
        found |= _named(module, at._replace(p=at.e * at.p))
        del found[f"{module}.lora_e"]
    return found


def _excess(rows_R_D: mx.array, *, squared_norm: float) -> mx.array:
    """Return (M M^T / m - I) M for rows M and m = `squared_norm`."""
    return (rows_R_D @ rows_R_D.swapaxes(-1, -2) / squared_norm - mx.eye(rows_R_D.shape[-2])) @ rows_R_D


def _scores(scored: Mapping[str, Arrays], module: str) -> mx.array:
    """Return the score of each triplet: (..., R, 1)."""
    names = (f"{module}.{matrix}" for matrix in ("lora_a", "lora_b", "lora_e"))
    product = {name: scored[SENSITIVITY][name] * scored[UNCERTAINTY][name] for name in names}
    at = _triplets(product, module)
    return at.e + mx.mean(at.p, axis=-1, keepdims=True) + mx.mean(at.q, axis=-1, keepdims=True)
