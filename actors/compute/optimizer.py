"""AdamW as a function: parameters, gradients and state in; new parameters and new state out; nothing is changed.

Departures from the papers: none in the rule. Whatever the parameters' type, gradients, moments and the update are
float32; parameters of a narrower type (full-weight training in bfloat16) have a float32 master copy in the state, and
what is served is that copy, rounded. Without it, updates below 1/256 of a weight would be lost.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from protocols.profile import LearnerSection

Arrays = dict[str, mx.array]


class AdamState(NamedTuple):
    """State of AdamW, by parameter name, in float32.

    step: updates taken. first, second: moving averages of the gradient and of its square.
    master: full-precision copies of those parameters that are not float32 themselves.
    """

    step: int
    first: Arrays
    second: Arrays
    master: Arrays


def initial_state(parameters: Arrays) -> AdamState:
    """State before the first update: moments zero, masters equal to the parameters."""
    return AdamState(
        step=0,
        first={name: mx.zeros(value.shape, dtype=mx.float32) for name, value in parameters.items()},
        second={name: mx.zeros(value.shape, dtype=mx.float32) for name, value in parameters.items()},
        master={name: v.astype(mx.float32) for name, v in parameters.items() if v.dtype != mx.float32},
    )


def global_norm(gradients: Arrays) -> mx.array:
    """Euclidean norm of all gradients as one vector: float32 scalar; not finite if any of them is not.

    Finite gradients whose squares overflow (beyond about 1e19) count as not finite.
    """
    return mx.sqrt(sum((mx.sum(mx.square(g.astype(mx.float32))) for g in gradients.values()), mx.array(0.0)))


def clip_scale(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of this norm down to `max_norm`; 1 if it is within, or if `max_norm` is 0."""
    return max_norm / norm if 0.0 < max_norm < norm else 1.0


def adamw(
    parameters: Arrays, gradients: Arrays, state: AdamState, *, learning_rate: float, scale: float, s: LearnerSection
) -> tuple[Arrays, AdamState]:
    """Take one step of Adam with decoupled weight decay and bias correction.

    m <- beta1 m + (1 - beta1) g          m^ = m / (1 - beta1^t)
    v <- beta2 v + (1 - beta2) g^2        v^ = v / (1 - beta2^t)
    theta <- theta - rate (m^ / (sqrt v^ + epsilon) + weight_decay theta)
    AdamW (arXiv:1711.05101), algorithm 2, with the rate in both terms as PyTorch has it; g is `scale` times the
    gradient. Every parameter needs a gradient. Returns new parameters, in their own types, and the new state; lazy.
    """
    t = state.step + 1
    first, second, master, updated = {}, {}, dict(state.master), {}
    rate = learning_rate / (1.0 - s.beta1**t)
    spread = (1.0 - s.beta2**t) ** -0.5
    for name, parameter in parameters.items():
        g = gradients[name].astype(mx.float32) * scale
        first[name] = s.beta1 * state.first[name] + (1.0 - s.beta1) * g
        second[name] = s.beta2 * state.second[name] + (1.0 - s.beta2) * mx.square(g)
        theta = state.master.get(name, parameter)
        step = rate * first[name] / (mx.sqrt(second[name]) * spread + s.epsilon)
        theta = (1.0 - learning_rate * s.weight_decay) * theta - step if s.weight_decay else theta - step
        if name in master:
            master[name] = theta
        updated[name] = theta.astype(parameter.dtype)
    return updated, AdamState(t, first, second, master)


def state_arrays(state: AdamState) -> Arrays:
    """Name every array of the state for a file: `first.NAME`, `second.NAME`, `master.NAME`, and `step` (int32)."""
    arrays = {"step": mx.array(state.step, dtype=mx.int32)}
    for kind in ("first", "second", "master"):
        arrays |= {f"{kind}.{name}": value for name, value in getattr(state, kind).items()}
    return arrays


def state_from_arrays(arrays: Arrays, parameters: Arrays) -> AdamState:
    """Rebuild the state that `state_arrays` named. Raises ValueError where it does not fit the parameters."""
    expected = state_arrays(initial_state(parameters))
    wrong = sorted(expected.keys() ^ arrays.keys()) or sorted(
        name
        for name, value in expected.items()
        if (value.shape, value.dtype) != (arrays[name].shape, arrays[name].dtype)
    )
    if wrong:
        raise ValueError(f"the optimizer state does not fit the trainable parameters: {', '.join(wrong[:3])}")

    def part(kind: str) -> Arrays:
        return {name: arrays[f"{kind}.{name}"] for name in parameters if f"{kind}.{name}" in arrays}

    return AdamState(int(np.array(arrays["step"])), part("first"), part("second"), part("master"))
