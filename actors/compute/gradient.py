"""Loss and gradient of one micro-batch, evaluated, with the served weights back in the model afterwards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn

from actors.compute.batch import MicroBatch
from actors.compute.logprobs import TeacherForcing
from actors.compute.objective import LossInputs, TokenSums, grpo_loss
from actors.compute.trees import Parameters, flat
from protocols.profile import LearnerSection


class LearnablePolicy(Protocol):
    """What the learner needs of `actors.compute.policy.Policy`."""

    model: nn.Module
    version: int
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Number of logits."""

    def trainable(self) -> Parameters:
        """Tree of the served parameters."""

    def using(self, parameters: Parameters) -> AbstractContextManager[None]:
        """Compute with these parameters inside; nests."""

    def reference(self) -> AbstractContextManager[None]:
        """Compute as the reference policy inside."""

    def training_mode(self) -> AbstractContextManager[None]:
        """Make the model ready for gradients inside."""


class Gradient(NamedTuple):
    """Gradient of a micro-batch's loss by parameter name, and sums over its tokens in `TokenSums` order; evaluated."""

    arrays: dict[str, mx.array]
    sums: mx.array


def micro_gradient(
    policy: LearnablePolicy,
    forcing: TeacherForcing,
    parameters: Parameters,
    micro: MicroBatch,
    *,
    settings: LearnerSection,
    temperature: float,
    learner_version: int,
    total_tokens: int,
) -> Gradient:
    """Differentiate the loss of one micro-batch with respect to `parameters`.

    total_tokens: of the whole update, so that the gradients of its micro-batches add up. Gradients are float32.
    Only trainable parameters are differentiated; no tracer and no changed mode stays in the model.
    """
    tokens_B_S, position_N, target_N = (mx.array(a) for a in (micro.tokens_B_S, micro.position_N, micro.target_N))

    def scores() -> Any:
        return forcing(tokens_B_S, position_N, target_N, temperature=temperature)

    inputs = LossInputs(
        behaviour_N=mx.array(micro.behaviour_N),
        advantage_N=mx.array(micro.advantage_N),
        weight_N=mx.array(micro.weight_N),
        fresh_N=mx.array((micro.version_N == learner_version).astype("float32")),
        reference_N=_reference(policy, scores) if settings.kl_beta > 0 else None,
    )

    def loss(traced: Parameters) -> tuple[mx.array, TokenSums]:
        with policy.using(traced):
            logp_N, entropy_N = scores()
        return grpo_loss(logp_N, entropy_N, inputs, settings=settings, total_tokens=total_tokens)

    with policy.using(parameters), policy.training_mode():
        (_, sums), tree = mx.value_and_grad(loss)(parameters)
        gradient = Gradient({n: g.astype(mx.float32) for n, g in flat(tree).items()}, mx.stack(list(sums)))
        _evaluate(gradient)
    return gradient


def _evaluate(gradient: Gradient) -> None:
    """Evaluate block after block: in the names' own order (0, 1, 10, 11, 2 ...) recomputed activations stay alive."""

    def place(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    mx.eval([gradient.arrays[name] for name in sorted(gradient.arrays, key=place)], gradient.sums)


def _reference(policy: LearnablePolicy, scores: Any) -> mx.array:
    """Log-probabilities under the reference policy, evaluated: (N,) float32."""
    with policy.reference():
        logp_N: mx.array = scores().logp_N
        mx.eval(logp_N)
    return logp_N
