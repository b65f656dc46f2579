"""The loss of reference completions: their negative log-likelihood under one policy, in turns of the compute thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.nn as nn

from clotho.models.parameters import Parameters
from clotho.models.turns import UNDIVIDED, TurnBudget
from clotho.scoring.prompt_logprobs import ScoredPolicy, prompt_logprobs
from protocols.evaluation import ReferenceLoss


class PinnedPolicy:
    """A policy that computes with given parameters, whatever is served meanwhile."""

    def __init__(self, policy: ScoredPolicy, parameters: Parameters, version: int) -> None:
        self._policy, self._parameters, self.version = policy, parameters, version
        self.model: nn.Module = policy.model
        self.vocab_size: int = policy.vocab_size

    def trainable(self) -> Parameters:
        """Return the tree of the parameters."""
        return self._parameters

    def using(self, parameters: Parameters) -> AbstractContextManager[None]:
        """Compute with these parameters inside the context."""
        return self._policy.using(parameters)


def reference_losses(
    policy: ScoredPolicy,
    prompts: Sequence[tuple[int, ...]],
    references: Sequence[tuple[int, ...]],
    *,
    context_length: int,
    chunk: int,
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    turns: TurnBudget = UNDIVIDED,
) -> Generator[None, None, list[ReferenceLoss | None]]:
    """Return the loss of each reference completion after its prompt, at temperature 1 and without sampling filters.

    None for an empty reference, and for one that is longer than the context together with its prompt. chunk, computing,
    turns: as in `prompt_logprobs`. Raises GenerationError if the model's logits are not finite.
    """
    losses: list[ReferenceLoss | None] = []
    for prompt, reference in zip(prompts, references, strict=True):
        if not reference or len(prompt) + len(reference) > context_length:
            losses.append(None)
            continue
        tokens = (*prompt, *reference)
        scored = yield from prompt_logprobs(policy, tokens, top=0, chunk=chunk, computing=computing, turns=turns)
        nats = -sum(scored.logprobs[-len(reference) :])
        losses.append(ReferenceLoss(nats=nats, tokens=len(reference)))
    return losses
