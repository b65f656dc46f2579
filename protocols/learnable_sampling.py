"""Which sampling can be learnt from: the learner must be able to evaluate the very distribution that was sampled."""

from __future__ import annotations

from protocols.errors import ProfileError
from protocols.sampling import MAX_SUPPORT, Sampling


def restricts_support(sampling: Sampling) -> bool:
    """Whether tokens are drawn from a part of the vocabulary, which then has to be recorded."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def require_learnable(sampling: Sampling) -> None:
    """Raise ProfileError for sampling whose log-probabilities the learner would evaluate under another law.

    Temperature and bias it computes itself; what top-p, top-k and min-p left is replayed, up to `MAX_SUPPORT` tokens.
    """
    if sampling.temperature == 0.0:
        raise ProfileError("sampling.temperature = 0 is greedy: groups would be equal and nothing could be learnt")
    if sampling.repetition_penalty != 1.0:
        raise ProfileError(
            f"sampling.repetition_penalty = {sampling.repetition_penalty:g}: the learner does not evaluate it; "
            "leave it at 1"
        )
    if restricts_support(sampling) and not 1 <= sampling.top_k <= MAX_SUPPORT:
        raise ProfileError(
            f"sampling.top_k = {sampling.top_k}: what top_p, top_k and min_p leave is recorded for the learner, at "
            f"most {MAX_SUPPORT} tokens: set sampling.top_k to 1 to {MAX_SUPPORT}"
        )
