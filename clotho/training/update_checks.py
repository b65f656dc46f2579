"""Checks of an update that was applied: how far it moves the policy, and whether it moves the adapters at all.

A large divergence is the earliest symptom of an update that destroys the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.models.parameters import Arrays, Parameters
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import TrainingSequence, sampled_mask_T, scored_only
from clotho.training.batch import Minibatch, route_rows, temperature_of
from clotho.training.gradient import LearnerModel
from clotho.training.objectives.kl import MAX_LOG_RATIO
from protocols.errors import AdapterError
from protocols.rollout import ScoredGroup

COMPLETIONS = 32
"""Number of completions to score; with half as many, a destructive update can go unnoticed."""


def limited_k3(d_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(d) - 1 - d, and above d = 1 its tangent, for d = log(probability after / before). (N,) nats.

    The update was trained on the tokens that it is measured on. A rare one that it made probable has a large ratio,
    exp(d), and few of these would exceed all other tokens: the mean of k3 has a heavy tail. An update that destroys the
    policy makes its tokens improbable; there d is negative, and the value is that of k3.
    """
    bounded_N = np.minimum(d_N, 1.0)
    return np.expm1(bounded_N) - bounded_N + (np.e - 1.0) * (d_N - bounded_N)


def update_kl(
    groups: Sequence[ScoredGroup],
    mini: Minibatch,
    before: Sequence[mx.array],
    model: LearnerModel,
    *,
    after: Parameters,
    micro_batch_tokens: int,
) -> float:
    """Estimate KL(policy before || policy after) in nats per token, by `limited_k3` on completions of a minibatch.

    before: log-probabilities of the tokens of its micro-batches at the weights before the update (with dropout, if
    there is any). after: parameters. The completions are spread evenly over the groups of the minibatch; their tokens
    stand for samples of the policy before the update. micro_batch_tokens: positions per forward pass. Not
    finite if either policy's log-probabilities are not finite.
    """
    sequences, before_T = _spread_completions(groups, mini, before)
    total, tokens = 0.0, 0
    model.policy.use(after)
    replays = any(micro.routes is not None and micro.routes.replays for micro in mini.micro_batches)
    for micro in build_micro_batches(
        sequences, layout=model.forcing.layout, budget=micro_batch_tokens, replays=replays
    ):
        after_N = np.array(model.logprobs(micro), dtype=np.float64)
        model.turns.pause()
        before_N = np.concatenate([before_T[member] for member in micro.members])
        d_N = np.clip(after_N[: len(before_N)] - before_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        total += float(np.sum(limited_k3(d_N)))
        tokens += len(before_N)
    return total / tokens


def _spread_completions(
    groups: Sequence[ScoredGroup], mini: Minibatch, before: Sequence[mx.array]
) -> tuple[list[TrainingSequence], list[NDArray[np.float64]]]:
    """Return completions, and the log-probabilities of their sampled tokens before the update."""
    candidates = sorted(
        (mini.origins[member], m, b)
        for m, micro in enumerate(mini.micro_batches)
        for b, member in enumerate(micro.members)
    )
    sequences, before_T = [], []
    for (group, i), m, b in candidates[:: -(-len(candidates) // COMPLETIONS)]:
        micro = mini.micro_batches[m]
        completion, prompt = groups[group].group.completions[i], groups[group].group.prompt.tokens
        sequences.append(
            scored_only(prompt, completion.tokens)._replace(
                supports=completion.supports,
                sampled_mask_T=sampled_mask_T(completion),
                temperature=temperature_of(groups[group], i),
                route_I_E=route_rows(prompt, completion),
            )
        )
        own_N = (micro.table.sequence_N == b) & (micro.table.loss_mask_N > 0)
        before_T.append(np.array(before[m], dtype=np.float64)[own_N])
    return sequences, before_T


PATIENCE = 3
"""Number of updates after which the B matrix of an adapter must be different from zero."""


class AdapterCheck:
    """Raises if the B matrix of a LoRA adapter stays at its initial value, zero (arXiv:2106.09685, section 4.1).

    B is zero only until its first step. If B stays zero, the output of the adapter is zero and A has no gradient: the
    trained weights are not the served weights, or an array is lost between them. An adapter that has moved once is not
    checked again, so the check costs one reduction per B matrix in the first updates and nothing later.
    """

    def __init__(self, *, patience: int = PATIENCE) -> None:
        """patience: number of updates for which B may stay zero."""
        self._patience = patience
        self._updates = 0
        self._unmoved: dict[str, int] | None = None  # number of updates with a gradient, by name of B
        self._any_moved = False

    def check(self, parameters: Arrays, gradients: Arrays) -> None:
        """Check the result of an update that was applied.

        parameters: after the update. gradients: of its last optimizer step, by the same names. Raises AdapterError if
        after `patience` updates no B has moved, or if a B has not moved that had a gradient in as many updates (experts
        that no token was routed to have none). Evaluates arrays until all have moved.
        """
        if self._unmoved is None:
            self._unmoved = {name: 0 for name in parameters if name.endswith("lora_b")}
            self._any_moved = not self._unmoved
        if not self._unmoved:
            return
        self._updates += 1
        names = list(self._unmoved)
        moved_M = np.array(mx.stack([mx.any(parameters[name] != 0) for name in names]))
        has_gradient_M = np.array(mx.stack([mx.any(gradients[name] != 0) for name in names]))
        self._any_moved |= bool(moved_M.any())
        self._unmoved = {
            name: self._unmoved[name] + int(has_gradient)
            for name, moved, has_gradient in zip(names, moved_M, has_gradient_M, strict=True)
            if not moved
        }
        self._raise_if_stuck(self._unmoved)

    def _raise_if_stuck(self, unmoved: dict[str, int]) -> None:
        if not self._any_moved and self._updates >= self._patience:
            raise AdapterError(
                f"after {self._updates} updates the B matrix of every adapter is still exactly zero: training changes "
                "nothing. Please report this with the name of the model"
            )
        stuck = [name.removesuffix(".lora_b") for name, count in unmoved.items() if count >= self._patience]
        if stuck:
            raise AdapterError(
                f"{len(stuck)} adapter(s) had gradients in {self._patience} updates and their B matrix is still "
                f"exactly zero: {', '.join(stuck[:5])}. Exclude them with policy.method.target_modules, and please "
                "report this with the name of the model"
            )
