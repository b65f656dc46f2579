"""Log-probabilities of the tokens of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.models.parameters import flat, nested
from clotho.models.policy import Policy
from clotho.models.turns import UNDIVIDED, TurnBudget
from clotho.scoring.prompt_logprobs import PromptScorer
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from protocols.errors import GenerationError
from protocols.sampling import PromptLogprobs
from tests import model_lanes
from tests.recorded_turns import RecordedTurns
from tests.scoring.layouts.reference_scores import policy_of
from tests.scoring.scored import sequence_scores
from tests.training.policies_and_groups import VOCAB, tiny_policy

TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9)


def scored(
    policy: Policy, tokens: Sequence[int], *, chunk: int = 4, turns: TurnBudget = UNDIVIDED, **options: Any
) -> PromptLogprobs:
    """Score tokens under the served parameters."""
    scorer = PromptScorer(policy.copy_model(), chunk=chunk, turns=turns)
    return scorer.score(policy.trainable(), tokens, version=policy.version, **options)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_prompt_log_probabilities_equal_teacher_forcing(architecture: str, chunk: int) -> None:
    """With attention, sliding windows and recurrence, for every chunk size."""
    policy = policy_of(architecture)
    found = scored(policy, TOKENS, chunk=chunk)
    forced = sequence_scores(
        TeacherForcing(policy.model, 64), TOKENS[:1], TOKENS[1:], distribution=SamplingDistribution(1.0)
    )
    assert found.logprobs == pytest.approx(np.array(forced.logp_N).tolist(), abs=model_lanes.atol(2e-4))


def test_the_alternatives_are_the_most_probable_tokens() -> None:
    """Compared with the sorted vocabulary in float64. A larger number than the vocabulary gives all tokens.

    The entropies are those of the whole vocabulary, whatever the number is.
    """
    policy = tiny_policy()
    for top in (0, 1, 5, VOCAB + 10):
        found = scored(policy, TOKENS, top=top)
        logits_S_V = model_lanes.numpy(policy.model(mx.array([TOKENS]))).astype(np.float64)[0]
        logp_S_V = logits_S_V - np.log(np.exp(logits_S_V).sum(-1, keepdims=True))
        assert len(found.top_logprobs) == len(TOKENS) - 1
        entropy_S = -(np.exp(logp_S_V) * logp_S_V).sum(-1)
        assert found.entropies == pytest.approx(entropy_S[:-1].tolist(), abs=model_lanes.atol(1e-4))
        for place, logp_V, token in zip(found.top_logprobs, logp_S_V, TOKENS[1:], strict=False):
            assert [logprob for _, logprob in place] == pytest.approx(
                sorted(logp_V)[::-1][: min(top, VOCAB)], abs=model_lanes.atol(1e-4)
            )
            assert all(logprob == pytest.approx(logp_V[other], abs=model_lanes.atol(1e-4)) for other, logprob in place)
            if top > VOCAB:
                assert dict(place)[token] == pytest.approx(logp_V[token], abs=model_lanes.atol(1e-4))


def test_a_temperature_applies_as_in_teacher_forcing() -> None:
    """To the alternatives too."""
    policy = tiny_policy()
    found = scored(policy, TOKENS, top=VOCAB, chunk=5, distribution=SamplingDistribution(0.6))
    forced = sequence_scores(
        TeacherForcing(policy.model, VOCAB), TOKENS[:1], TOKENS[1:], distribution=SamplingDistribution(0.6)
    )
    assert found.logprobs == pytest.approx(np.array(forced.logp_N).tolist(), abs=model_lanes.atol(2e-4))
    for place, token, logprob in zip(found.top_logprobs, TOKENS[1:], found.logprobs, strict=True):
        assert dict(place)[token] == pytest.approx(logprob, abs=model_lanes.atol(1e-4))
        assert sum(math.exp(value) for _, value in place) == pytest.approx(1.0, abs=model_lanes.atol(1e-4))


@pytest.mark.parametrize("limit", [0.0, 1e-12])
def test_a_swap_during_scoring_changes_nothing(limit: float) -> None:
    """One version scores the whole prompt, and the result names it. The new version serves meanwhile.

    Nor does a limit on turns, which divides a chunk between blocks.
    """
    policy = tiny_policy()
    whole = scored(policy, TOKENS)
    moved = nested({name: value + 0.2 for name, value in flat(policy.trainable()).items()})

    def swap(number: int) -> None:
        policy.publish(moved, version=1, step=1, fingerprint="moved")

    lane = RecordedTurns(swap)
    assert scored(policy, TOKENS, turns=TurnBudget(limit, lane)) == whole
    assert (policy.version, lane.pauses > 3) == (1, limit > 0)
    later = scored(policy, TOKENS)
    assert (whole.version, later.version) == (0, 1)
    assert later.logprobs != pytest.approx(whole.logprobs, abs=1e-2)


def test_a_prompt_of_one_token_has_no_scores() -> None:
    """No token precedes the first one."""
    found = scored(tiny_policy(), (3,), top=2)
    assert (found.logprobs, found.top_logprobs) == ((), ())


def test_a_turn_reads_at_most_one_chunk() -> None:
    """Twelve tokens in chunks of five take three turns."""
    lane = RecordedTurns()
    scored(tiny_policy(), TOKENS, chunk=5, turns=TurnBudget(0.0, lane))
    assert lane.pauses == 3


def test_non_finite_logits_raise_an_error() -> None:
    """JSON cannot represent them."""
    policy = tiny_policy()
    broken = nested({name: value * math.nan for name, value in flat(policy.trainable()).items()})
    policy.publish(broken, version=1, step=1, fingerprint="broken")
    with pytest.raises(GenerationError, match="not finite"):
        scored(policy, TOKENS, top=2)


def test_parallel_fields_have_equal_length() -> None:
    """Every token has a place for its log-probability."""
    with pytest.raises(ValueError, match="1 logprobs of a prompt have 0 top_logprobs"):
        PromptLogprobs(version=0, logprobs=(-1.0,), top_logprobs=())
