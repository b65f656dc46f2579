"""The loss of reference completions: their negative log-likelihood under one policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocols.evaluation import ReferenceLoss
from protocols.sampling import PromptLogprobs


def reference_losses(
    score: Callable[[tuple[int, ...]], PromptLogprobs],
    prompts: Sequence[tuple[int, ...]],
    references: Sequence[tuple[int, ...]],
    *,
    context_length: int,
) -> list[ReferenceLoss | None]:
    """Return the loss of each reference completion after its prompt, at temperature 1 and without sampling filters.

    score: returns the log-probabilities of a sequence under the policy in question. None for an empty reference, and
    for one that is longer than the context together with its prompt. Raises GenerationError if the model's logits are
    not finite.
    """
    losses: list[ReferenceLoss | None] = []
    for prompt, reference in zip(prompts, references, strict=True):
        if not reference or len(prompt) + len(reference) > context_length:
            losses.append(None)
            continue
        nats = -sum(score((*prompt, *reference)).logprobs[-len(reference) :])
        losses.append(ReferenceLoss(nats=nats, tokens=len(reference)))
    return losses
