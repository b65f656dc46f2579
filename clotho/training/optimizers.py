"""Optimizers: the update rules of `mlx.optimizers`, with float32 masters, LoRA+ rates and decoupled weight decay.

The learning rate of a step follows from the schedule, a function of the step alone.

A step is a function of arrays: parameters, gradients and state in, new parameters and new state out. No array that is
passed in changes, so the caller undoes a step by keeping the old arrays. The rule computes in float32. A parameter of
a narrower type (full-weight training in bfloat16) has a float32 master copy in the state, and the new parameter is the
master, rounded; without a master, updates below 1/256 of a weight would be lost.

For every optimizer: g is `scale` times the gradient; `lora_b` arrays use `lora_plus` times the learning rate (LoRA+,
arXiv:2402.12354); theta <- (1 - rate * weight_decay) * theta before the rule (decoupled decay, arXiv:1711.05101, with
PyTorch's factor `rate`). A rule sees the last two axes of a stack of matrices (experts) one matrix at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from clotho.models.parameters import Arrays
from clotho.settings.learner import (
    Adafactor,
    AdamW,
    ConstantSchedule,
    CosineSchedule,
    LearnerSection,
    LinearSchedule,
    Lion,
    Muon,
    Optimizer,
    Schedule,
    Sgd,
)

MUON_UPDATE_RMS = 0.2
"""Root mean square of a Muon update before the learning rate, which is about AdamW's (arXiv:2502.16982, equation 4)."""

NOT_HIDDEN = re.compile(r"embed|wte|wpe|lm_head|bias$")
"""Names of parameters that Muon leaves to AdamW, besides vectors: embeddings, the output head and biases."""

PER_MATRIX = ("adafactor", "muon")
"""Rules that read a parameter as a matrix; all other rules treat every element alike."""


class OptimizerState(NamedTuple):
    """What an optimizer carries from step to step, in float32.

    step: steps taken. slots: `RULE.SLOT` -> parameter name -> array, with the slot names of `mlx.optimizers`.
    master: full-precision copies of the parameters that are not float32 themselves.
    """

    step: int
    slots: dict[str, Arrays]
    master: Arrays


class FiniteAdafactor(optim.Adafactor):
    """MLX's Adafactor, whose factor stays finite for a row of zeros beside very large gradients: inf * 0 is NaN."""

    def _approximate_exp_moving_avg(self, exp_avg_sq_row: mx.array, exp_avg_sq_col: mx.array) -> mx.array:
        factor = super()._approximate_exp_moving_avg(exp_avg_sq_row, exp_avg_sq_col)  # type: ignore[no-untyped-call]
        return mx.minimum(factor, mx.finfo(mx.float32).max)


def make_rule(settings: Optimizer, *, step: int, rate: float) -> optim.Optimizer:
    """Return the rule of `mlx.optimizers` for step number `step` (from 1) at learning rate `rate`.

    adamw: Adam (arXiv:1412.6980, end of section 2), with the bias corrections in the learning rate and in epsilon,
    computed in float64: rate' = rate sqrt(1 - beta2^t) / (1 - beta1^t), epsilon' = epsilon sqrt(1 - beta2^t).
    adafactor (arXiv:1804.04235) takes its rate from the schedule: no relative steps, no parameter scale.
    muon: see `_rate_factor`. lion: arXiv:2302.06675. sgd: heavy-ball momentum without dampening.
    """
    rule: optim.Optimizer
    match settings:
        case AdamW():
            seen = math.sqrt(1.0 - settings.beta2**step)
            betas = [settings.beta1, settings.beta2]
            rule = optim.Adam(rate * seen / (1.0 - settings.beta1**step), betas, eps=settings.epsilon * seen)
        case Adafactor():
            rule = FiniteAdafactor(rate, scale_parameter=False, relative_step=False)
        case Lion():
            rule = optim.Lion(rate, [settings.beta1, settings.beta2])
        case Muon():
            rule = optim.Muon(rate, settings.momentum, weight_decay=0.0)
        case Sgd():
            rule = optim.SGD(rate, settings.momentum)
    rule.state["step"] = mx.array(step)
    return rule


def initial_state(parameters: Arrays, settings: LearnerSection) -> OptimizerState:
    """Return the state before the first step: zero slots, and masters equal to the parameters; lazy."""
    slots: dict[str, Arrays] = {}
    for name, parameter in parameters.items():
        rule, own = rule_settings(name, parameter, settings.optimizer), dict[str, mx.array]()
        make_rule(rule, step=1, rate=0.0).init_single(mx.zeros(parameter.shape), own)
        for slot, array in own.items():
            slots.setdefault(f"{rule_name(rule)}.{slot}", {})[name] = array
    master = {name: p.astype(mx.float32) for name, p in parameters.items() if p.dtype != mx.float32}
    return OptimizerState(step=0, slots=slots, master=master)


def apply_step(
    parameters: Arrays,
    gradients: Arrays,
    state: OptimizerState,
    *,
    learning_rate: float,
    scale: float,
    settings: LearnerSection,
) -> tuple[Arrays, OptimizerState]:
    """Step against `scale` times the gradients of all parameters; return them, in their types, and the state; lazy."""

    @cache
    def rule_at(rule: Optimizer, rate: float) -> optim.Optimizer:
        return make_rule(rule, step=state.step + 1, rate=rate)

    decay = settings.optimizer.weight_decay
    updated, new_slots, new_master = {}, {slot: dict[str, mx.array]() for slot in state.slots}, {}
    for name, parameter in parameters.items():
        rate = learning_rate * (settings.lora_plus if name.endswith("lora_b") else 1.0)
        theta, g = state.master.get(name, parameter), gradients[name].astype(mx.float32)
        theta = theta * (1.0 - rate * decay) if decay else theta
        g = g * scale if scale != 1.0 else g
        chosen = rule_settings(name, parameter, settings.optimizer)
        rule = rule_name(chosen)
        own = {s.partition(".")[2]: a[name] for s, a in state.slots.items() if s.startswith(f"{rule}.") and name in a}
        theta, own = _apply_rule(rule_at(chosen, rate * _rate_factor(rule, parameter)), rule, g, theta, own)
        for slot, array in own.items():
            new_slots[f"{rule}.{slot}"][name] = array
        if name in state.master:
            new_master[name] = theta
        updated[name] = theta.astype(parameter.dtype)
    return updated, OptimizerState(state.step + 1, new_slots, new_master)


class StepRule:
    """How an optimizer step moves the trainable parameters; this one applies the rule of the optimizer to them.

    A subclass may hold other coordinates of the parameters in the state, and step in these. keeps_zeros: whether it may
    leave the B of an adapter at zero although it has a gradient.
    """

    keeps_zeros = False

    def initial_state(self, parameters: Arrays, settings: LearnerSection) -> OptimizerState:
        """Return the state before the first step; lazy."""
        return initial_state(parameters, settings)

    def gradient(self, gradients: Arrays, state: OptimizerState) -> Arrays:
        """Return the gradient that is clipped and applied, from that of the parameters; zeros for zeros; lazy."""
        return gradients

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
        """Take one step against `scale` times what `gradient` returned; lazy. step: number of updates before."""
        return apply_step(parameters, gradients, state, learning_rate=learning_rate, scale=scale, settings=settings)


PLAIN = StepRule()


def _apply_rule(
    rule: optim.Optimizer, name: str, gradient: mx.array, theta: mx.array, slots: Arrays
) -> tuple[mx.array, Arrays]:
    """Return parameter and slots after one step; a rule that reads matrices gets those of a stack one by one."""

    def apply(gradient: mx.array, theta: mx.array, slots: Arrays) -> tuple[mx.array, Arrays]:
        slots = dict(slots)
        return rule.apply_single(gradient, theta, slots), slots

    for _ in range(theta.ndim - 2 if name in PER_MATRIX else 0):
        apply = mx.vmap(apply)
    return apply(gradient, theta, slots)


def rule_name(rule: Optimizer) -> str:
    """Return the name of a rule in the profile and in the state."""
    return str(rule.__struct_config__.tag)


def rule_settings(name: str, parameter: mx.array, optimizer: Optimizer) -> Optimizer:
    """Return the rule of a parameter: the rule of the optimizer, or AdamW for parameters that Muon does not update.

    Muon updates hidden matrices and stacked matrices. Vectors (matrices of one row or column included), biases,
    embeddings and the output head use AdamW, as Muon's author advises (kellerjordan.github.io/posts/muon).
    """
    hidden = parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1 and not NOT_HIDDEN.search(name)
    if isinstance(optimizer, Muon) and not hidden:
        return AdamW(beta1=optimizer.beta1, beta2=optimizer.beta2, epsilon=optimizer.epsilon)
    return optimizer


def _rate_factor(rule: str, parameter: mx.array) -> float:
    """Return the factor of the learning rate that gives Muon updates the scale 0.2 sqrt(max(rows, columns)).

    MLX multiplies by sqrt(max(1, rows / columns)). Together both factors are arXiv:2502.16982, equation 4: one learning
    rate serves every shape, both orientations (A and B of an adapter), and the parameters that AdamW updates.
    """
    return MUON_UPDATE_RMS * math.sqrt(parameter.shape[-1]) if rule == "muon" else 1.0


def global_norm(gradients: Arrays) -> mx.array:
    """Return the Euclidean norm of all gradients, float32; not finite if one is not, or beyond about 1e19."""
    return mx.sqrt(sum((mx.sum(mx.square(g.astype(mx.float32))) for g in gradients.values()), mx.array(0.0)))


def clip_scale(norm: float, max_norm: float) -> float:
    """Return the factor that scales a gradient of this norm to `max_norm`; 1 if it is below, or if `max_norm` is 0."""
    return max_norm / norm if 0.0 < max_norm < norm else 1.0


def state_arrays(state: OptimizerState) -> Arrays:
    """Name every array of the state for a file: `RULE.SLOT.NAME`, `master.NAME`, and `step` (int32)."""
    arrays = {"step": mx.array(state.step, dtype=mx.int32)}
    for slot, named in {**state.slots, "master": state.master}.items():
        arrays |= {f"{slot}.{name}": array for name, array in named.items()}
    return arrays


def state_from_arrays(
    arrays: Mapping[str, mx.array], parameters: Arrays, settings: LearnerSection, rule: StepRule = PLAIN
) -> OptimizerState:
    """Rebuild a state that `state_arrays` named, bit for bit. Raises ValueError if it does not fit or is not finite."""
    start = rule.initial_state(parameters, settings)
    expected = state_arrays(start)
    wrong = sorted(expected.keys() ^ arrays.keys()) or sorted(
        name for name, a in expected.items() if (a.shape, a.dtype) != (arrays[name].shape, arrays[name].dtype)
    )
    if wrong:
        kind = rule_name(settings.optimizer)
        raise ValueError(
            f"the optimizer state does not fit {kind} and the trainable parameters: {', '.join(wrong[:3])}"
        )
    unusable = sorted(name for name, array in arrays.items() if not mx.isfinite(array).all().item())
    if unusable:
        raise ValueError(f"the optimizer state is not finite: {', '.join(unusable[:3])}")
    return OptimizerState(
        step=int(np.array(arrays["step"])),
        slots={slot: {n: arrays[f"{slot}.{n}"] for n in named} for slot, named in start.slots.items()},
        master={n: arrays[f"master.{n}"] for n in start.master},
    )


def state_bytes(parameters: Arrays, settings: LearnerSection) -> int:
    """Return the bytes of a state. Only names, shapes and types of the parameters count: they may be lazy."""
    return sum(array.nbytes for array in state_arrays(initial_state(parameters, settings)).values())


SCHEDULES: Mapping[type[Schedule], Callable[[float], float]] = MappingProxyType(
    {
        ConstantSchedule: lambda progress: 1.0,
        LinearSchedule: lambda progress: 1.0 - progress,
        CosineSchedule: lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
)
"""`learner.schedule` -> decay(progress): 1 at progress 0 is the full rate, 0 is the minimum.

cosine: half a cosine, SGDR (arXiv:1608.03983), equation 5, without restarts.
"""


def learning_rate(step: int, *, steps: int, settings: LearnerSection) -> float:
    """Return the learning rate of update `step` (from 0) of `steps`; positive for each of these updates.

    Warmup: rate * (step + 1) / warmup_steps. Then decay with progress (step - warmup_steps) / (steps - warmup_steps),
    as in Transformers' `get_cosine_schedule_with_warmup`: the first update after the warmup has the full rate, and the
    minimum is reached one step after the last update. Beyond `steps` (a run resumed with fewer steps) it stays there.
    """
    schedule, highest = settings.schedule, settings.optimizer.highest_rate
    lowest = 0.0 if isinstance(schedule, ConstantSchedule) else schedule.min_learning_rate
    warmup = schedule.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup) if step < steps else 1.0
    return lowest + (highest - lowest) * SCHEDULES[type(schedule)](progress)
