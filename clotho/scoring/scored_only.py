"""A sequence whose log-probabilities are asked for, and that nothing is learnt from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clotho.scoring.sequences import TrainingSequence


def scored_only(prompt: Sequence[int], tokens: Sequence[int]) -> TrainingSequence:
    """Make a sequence of tokens without a record of how they were drawn: weights and all else are 0."""
    zeros_T = np.zeros(len(tokens), dtype=np.float32)
    return TrainingSequence(
        group=0,
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        behaviour_T=zeros_T,
        version_T=zeros_T.astype(np.int32),
        advantage_T=zeros_T,
        weight_T=zeros_T,
        coefficient_T=zeros_T,
    )
