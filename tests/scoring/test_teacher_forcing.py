"""Teacher-forced log-probabilities and entropies of micro-batches."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from protocols.errors import ModelError
from tests import model_lanes
from tests.scoring.layouts.test_check_layout import peeking
from tests.scoring.scored import sequence_scores
from tests.small_models import tiny
from tests.training.policies_and_groups import VOCAB, Bigram, tiny_policy

PROMPT, TOKENS = (3, 1, 4), (1, 5, 9, 2, 6)


def reference_scores(logits_V: np.ndarray, target: int, distribution: SamplingDistribution) -> tuple[float, float]:
    """Return log-probability and entropy of one token in float64 from the definition."""
    z_V = logits_V.astype(np.float64)
    for token, addend in distribution.logit_bias:
        z_V[token] += addend
    p_V = np.exp(z_V / distribution.temperature)
    p_V /= p_V.sum()
    return float(np.log(p_V[target])), float(-(p_V * np.log(p_V)).sum())


@pytest.mark.lanes(layout=("padded", "shared"))
@pytest.mark.parametrize("distribution", [SamplingDistribution(1.0), SamplingDistribution(0.6, ((2, 1.5), (9, -2.0)))])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared", "auto"])
def test_scores_equal_those_of_single_forward_passes(layout: str, distribution: SamplingDistribution) -> None:
    """The reference computes the full logits of each context alone and a softmax in float64."""
    model = tiny_policy().model
    scores = sequence_scores(TeacherForcing(model, VOCAB, layout=layout), PROMPT, TOKENS, distribution=distribution)
    assert scores.logp_N.shape == scores.entropy_N.shape == (len(TOKENS),)
    for t, token in enumerate(TOKENS):
        logits_V = model_lanes.numpy(model(mx.array([PROMPT + TOKENS[:t]]))[0, -1])
        logp, entropy = reference_scores(logits_V, token, distribution)
        assert scores.logp_N[t].item() == pytest.approx(logp, abs=model_lanes.atol(2e-5))
        assert scores.entropy_N[t].item() == pytest.approx(entropy, abs=model_lanes.atol(2e-5))


class HeadOverTwoPositions(Bigram):
    """A model whose head reads two positions, so that it cannot run at selected positions."""

    def __call__(self, tokens_B_S: mx.array, cache: object = None) -> mx.array:
        logits_B_S_V = super().__call__(tokens_B_S)
        return logits_B_S_V + mx.cumsum(logits_B_S_V, axis=1)


@pytest.mark.parametrize("whole", [False, True])
def test_the_support_of_a_token_limits_its_distribution(whole: bool) -> None:
    """With two possible tokens the probabilities are those of their logits, with a split model or not."""
    model: nn.Module = HeadOverTwoPositions(vocab_size=VOCAB) if whole else tiny_policy().model
    support = np.array([1, 7], dtype="<u4").tobytes()
    sequence = scored_only(PROMPT, TOKENS[:1])._replace(supports=(support,))
    (micro,) = build_micro_batches([sequence], layout="padded", budget=1)
    scores = TeacherForcing(model, VOCAB)(micro, distribution=SamplingDistribution(1.0))
    logits_V = model_lanes.numpy(model(mx.array([PROMPT]))[0, -1])
    assert scores.logp_N[0].item() == pytest.approx(
        -np.log1p(np.exp(logits_V[7] - logits_V[1])), abs=model_lanes.atol(2e-5)
    )


@pytest.mark.parametrize("architecture", ["qwen3", "mamba2", "falcon_h1"])
def test_auto_stays_for_attention_and_for_states(architecture: str) -> None:
    """The resolved layout is the one to build micro-batches with."""
    assert TeacherForcing(tiny(architecture), 64, layout="auto").layout == "auto"


def test_auto_is_padded_for_a_model_that_ignores_its_mask() -> None:
    """Its logits in shared rows would be others."""
    assert TeacherForcing(peeking(), 64, layout="auto").layout == "padded"


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_an_unsupported_layout_is_refused(layout: str) -> None:
    """If it is requested by name. The message names an alternative."""
    with pytest.raises(ModelError, match=rf'learner.layout = "{layout}".*choose "padded" or "auto"'):
        TeacherForcing(peeking(), 64, layout=layout)


def test_an_unsplittable_model_runs_whole_on_padded_rows() -> None:
    """Its own logits are selected. Other layouts have no whole rows."""
    model = HeadOverTwoPositions(vocab_size=VOCAB)
    forcing = TeacherForcing(model, VOCAB, layout="auto")
    assert forcing.layout == "padded"
    scores = sequence_scores(forcing, PROMPT, TOKENS, distribution=SamplingDistribution(0.5))
    logits_S_V = np.array(model(mx.array([PROMPT + TOKENS[:-1]]))[0])[len(PROMPT) - 1 :]
    expected = [
        reference_scores(row_V, token, SamplingDistribution(0.5))[0]
        for row_V, token in zip(logits_S_V, TOKENS, strict=True)
    ]
    np.testing.assert_allclose(np.array(scores.logp_N), expected, rtol=1e-5)
    (micro,) = build_micro_batches([scored_only(PROMPT, TOKENS)], layout="shared", budget=1)
    with pytest.raises(ValueError, match="SharedInputs"):
        forcing(micro, distribution=SamplingDistribution(1.0))
