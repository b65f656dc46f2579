"""Objectives with the ratio of the whole completion."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clotho.training.objectives.functions import gspo, gspo_token, require_exact_ratio
from protocols.errors import ProfileError
from tests.learner_settings import learner_settings
from tests.training.objectives.objective_inputs import at_ratio, evaluate_objective, float_array, tokens

WIDE = learner_settings(clip_low=0.9, clip_high=9.0)
RATIOS = [2.0, 8.0, 3.0]
"""Two tokens of completion 0, one of completion 1."""


def test_gspo_clips_whole_completions() -> None:
    """Range [1 - 3e-4, 1 + 4e-4]: ratios 1.1 and 1/1.1 cancel, s = 1, unclipped; s = 1.01, A = 1 gives -1.0004,
    gradient 0.
    """
    settings = learner_settings(clip_low=3e-4, clip_high=4e-4)
    seen = tokens([1.0, 1.0, 1.0], sequence_N=[0, 0, 1])
    result = evaluate_objective(gspo, at_ratio([1.1, 1 / 1.1, 1.01]), seen, settings)
    np.testing.assert_allclose(result.loss_N, [-1.0, -1.0, -1.0004], rtol=1e-6)
    np.testing.assert_allclose(result.gradient_N, [-1.0, -1.0, 0.0], rtol=1e-5)
    assert result.clipped_N.tolist() == [False, False, True]


def test_gspo_token_clamps_its_log_ratio_to_ten_nats() -> None:
    """A mean log-ratio of 15 and A = -1: the loss is e^10, without a gradient."""
    result = evaluate_objective(gspo_token, float_array([-1.0]), tokens([-1.0], old_logp_N=[-16.0]), WIDE)
    np.testing.assert_allclose(result.loss_N, [math.exp(10.0)], rtol=1e-5)
    assert result.gradient_N.tolist() == [0.0]


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "rloo"])
def test_a_ratio_of_completions_to_the_sampler_needs_float32(name: str) -> None:
    """An interpolated reference contains the sampler too. The message is one line with both remedies."""
    default, sampler, interpolated = (
        learner_settings(objective=name, **keys).objective
        for keys in ({}, {"ratio_reference": "sampler"}, {"ratio_reference": "batch_start_interpolated"})
    )
    for chosen in (sampler, interpolated):
        require_exact_ratio(chosen, "float32")
        for dtype in ("float16", "bfloat16"):
            require_exact_ratio(default, dtype)
            with pytest.raises(ProfileError, match=r'ratio_reference = "batch_start" or model.dtype = "float32"'):
                require_exact_ratio(chosen, dtype)
