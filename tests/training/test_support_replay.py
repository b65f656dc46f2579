"""What the engine drew under filters, scored by the learner: the same distribution, or a bias of known size."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import MicroBatch, TrainingSequence
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from protocols.sampling import Completion, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import make_engine, make_prompt, run, submit_request
from tests.scoring.scored import token_scores
from tests.small_models import FixedSource, tiny_source

TOLERANCE = 2e-4
"""Nats between a decode step with caches and a forward pass without."""

FILTERS = {
    "top-p": Sampling(temperature=0.5, top_p=0.6, top_k=256, max_tokens=12),
    "top-k": Sampling(temperature=1.3, top_k=7, max_tokens=9),
    "min-p": Sampling(min_p=0.15, top_k=100, max_tokens=11),
    "all, and a bias": Sampling(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, logit_bias=((5, 2.0), (77, -1.5)), max_tokens=12
    ),
}


def law_of(sampling: Sampling) -> SamplingDistribution:
    """Return what the learner knows of the sampler's settings; the filters reach it as supports."""
    return SamplingDistribution(temperature=sampling.temperature, logit_bias=sampling.logit_bias)


def sampled(source: FixedSource, sampling: Sampling) -> list[tuple[int, tuple[int, ...], Completion]]:
    """Two groups of three completions with their supports: (group, prompt, completion)."""
    engine = make_engine(source)
    prompts = [make_prompt(4), make_prompt(13, 1)]
    answers = [
        submit_request(engine, prompt, sampling, range(9 * g, 9 * g + 3), record_support=True)
        for g, prompt in enumerate(prompts)
    ]
    run(engine)
    return [(g, prompts[g], completion) for g, answer in enumerate(answers) for completion in answer.completions]


def training_sequence(group: int, prompt: tuple[int, ...], completion: Completion, *, replay: bool) -> TrainingSequence:
    """Return a completion as the learner takes it; without its supports unless they are replayed."""
    count = len(completion.tokens)
    return TrainingSequence(
        group=group,
        prompt=prompt,
        tokens=completion.tokens,
        rollout_logp_T=np.array(completion.logprobs, dtype=np.float32),
        version_T=np.array(completion.versions, dtype=np.int32),
        advantage_T=np.ones(count, dtype=np.float32),
        loss_mask_T=np.ones(count, dtype=np.float32),
        loss_weight_T=np.ones(count, dtype=np.float32),
        supports=completion.supports if replay else (),
    )


def learner_differences(
    source: FixedSource, micro_batches: Sequence[MicroBatch], layout: str, distribution: SamplingDistribution
) -> np.ndarray:
    """Learner's minus sampler's log-probability of every token, padding left out."""
    scorer = TeacherForcing(source.model, source.vocab_size, layout=layout)
    found = []
    for micro in micro_batches:
        real_N = micro.table.loss_mask_N > 0
        found.append((np.array(scorer(micro, distribution=distribution).logp_N) - micro.table.rollout_logp_N)[real_N])
    return np.concatenate(found)


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=list(FILTERS))
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_the_learner_scores_replayed_supports_as_the_sampler_drew_from_them(sampling: Sampling, layout: str) -> None:
    """In every layout, whether or not rows of different lengths and of different supports share a micro-batch."""
    source = tiny_source()
    sequences = [training_sequence(*one, replay=True) for one in sampled(source, sampling)]
    for budget in (30, 10_000):
        micro_batches = build_micro_batches(sequences, layout=layout, budget=budget)
        difference_N = learner_differences(source, micro_batches, layout, law_of(sampling))
        assert len(difference_N) == sum(len(sequence.tokens) for sequence in sequences)
        np.testing.assert_allclose(difference_N, 0.0, atol=model_lanes.atol(TOLERANCE))


def adjusted_logits(source: FixedSource, prompt: tuple[int, ...], completion: Completion, s: Sampling) -> np.ndarray:
    """(Logits + bias) / temperature before every token of a completion, float64, from one forward pass."""
    tokens = [*prompt, *completion.tokens]
    logits_T_V = model_lanes.numpy(source.model(mx.array([tokens[:-1]]))[0, len(prompt) - 1 :]).astype(np.float64)
    for token, value in s.logit_bias:
        logits_T_V[:, token] += value
    adjusted: np.ndarray = logits_T_V / s.temperature
    return adjusted


def log_kept_mass(source: FixedSource, prompt: tuple[int, ...], completion: Completion, s: Sampling) -> np.ndarray:
    """Log-probability, under the whole vocabulary, that a draw falls into the support; one number per token."""
    x_T_V = adjusted_logits(source, prompt, completion, s)
    prob_T_V = np.exp(x_T_V - x_T_V.max(axis=-1, keepdims=True))
    prob_T_V /= prob_T_V.sum(axis=-1, keepdims=True)
    kept = [
        prob_V[np.frombuffer(support, dtype="<u4")].sum()
        for prob_V, support in zip(prob_T_V, completion.supports, strict=True)
    ]
    return np.log(kept)


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=list(FILTERS))
def test_scoring_over_the_whole_vocabulary_is_off_by_the_log_of_the_kept_mass(sampling: Sampling) -> None:
    """A learner that ignores the filters sees a ratio of exactly the kept mass where nothing has changed.

    Filters renormalise: mu(t) = p(t) / S over a support of mass S, so log p(t) - log mu(t) = log S at every token.
    """
    source = tiny_source()
    completions = sampled(source, sampling)
    sequences = [training_sequence(*one, replay=False) for one in completions]
    micro_batches = [build_micro_batches([sequence], layout="padded", budget=10_000)[0] for sequence in sequences]
    bias_N = learner_differences(source, micro_batches, "padded", law_of(sampling))
    expected_N = np.concatenate([log_kept_mass(source, prompt, one, sampling) for _, prompt, one in completions])
    assert np.median(expected_N) < -0.02
    np.testing.assert_allclose(bias_N, expected_N, atol=model_lanes.atol(TOLERANCE))


@pytest.mark.parametrize("architecture", ["gemma2", "lfm2"])
def test_other_architectures_replay_their_supports_too(architecture: str) -> None:
    """Logits as the model itself gives them, scored token by token over padded rows of support."""
    source = tiny_source(architecture)
    sampling = FILTERS["all, and a bias"]
    for _, prompt, completion in sampled(source, sampling):
        tokens = [*prompt, *completion.tokens]
        logits_N_V = source.model(mx.array([tokens[:-1]]))[0, len(prompt) - 1 :]
        support_N_K = np.full((len(completion.tokens), 40), -1, dtype=np.int32)
        for n, support in enumerate(completion.supports):
            support_N_K[n, : len(support) // 4] = np.frombuffer(support, dtype="<u4")
        target_N = mx.array(np.array(completion.tokens, dtype=np.int32))
        scores = token_scores(logits_N_V, target_N, distribution=law_of(sampling), support_N_K=mx.array(support_N_K))
        np.testing.assert_allclose(np.array(scores.logp_N), completion.logprobs, atol=model_lanes.atol(TOLERANCE))
        entropy_N = np.array(scores.entropy_N)
        sizes_N = np.count_nonzero(support_N_K >= 0, axis=-1)
        assert (entropy_N >= -1e-5).all()
        assert (entropy_N <= np.log(sizes_N) + 1e-5).all()
