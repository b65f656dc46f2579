"""The plain way, that every layout is compared with: one sequence at a time, whole logits, no padding, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import Policy
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import TrainingSequence
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution, TokenScores
from tests import model_lanes
from tests.learner_settings import policy_settings
from tests.scoring.scored import token_scores
from tests.small_models import tiny

VOCAB = 64
LAW = SamplingDistribution(temperature=0.8)
Shapes = Sequence[tuple[int, Sequence[int]]]
"""Groups: length of the prompt, and lengths of its completions."""


def random_sequences(shapes: Shapes, *, seed: int = 0) -> list[TrainingSequence]:
    """Sequences of random tokens with random numbers about them."""
    rng = np.random.default_rng(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(0, VOCAB, length))

    sequences = []
    for group, (prompt_length, lengths) in enumerate(shapes):
        prompt = tokens(prompt_length)
        for length in lengths:
            rollout_logp_T, advantage_T, loss_weight_T = rng.uniform(0.5, 1.0, (3, length)).astype(np.float32)
            sequences.append(
                TrainingSequence(
                    group=group,
                    prompt=prompt,
                    tokens=tokens(length),
                    rollout_logp_T=-rollout_logp_T,
                    version_T=rng.integers(0, 9, length, dtype=np.int32),
                    advantage_T=advantage_T,
                    loss_mask_T=(rng.random(length) < 0.9).astype(np.float32),
                    loss_weight_T=loss_weight_T,
                )
            )
    return sequences


def policy_of(architecture: str, *, kind: str = "lora", **section: Any) -> Policy:
    """A tiny model with an adapter that has moved, or with all weights trained."""
    model_lanes.skip_full_training(kind)
    settings = policy_settings(**{"kind": kind, "rank": 2, "scale": 2.0, **section})
    config = {"model_type": architecture, "vocab_size": VOCAB}
    policy = Policy(
        tiny(architecture, vocab_size=VOCAB), cast(Any, None), settings, config=config, seed=0, keep_reference=False
    )
    key = mx.random.key(1)
    moved = {
        name: (a + 0.05 * mx.random.normal(a.shape, key=key)).astype(a.dtype)
        for name, a in flat(policy.trainable()).items()
    }
    policy.publish(nested(moved), version=1, step=1, fingerprint="moved")
    return policy


class Outcome(NamedTuple):
    """Log-probabilities per sequence, the loss, and its gradient by parameter."""

    logp: list[np.ndarray]
    loss: float
    gradient: dict[str, np.ndarray]


def the_plain_way(policy: Policy, sequences: Sequence[TrainingSequence]) -> Outcome:
    """Every sequence alone."""
    model = policy.copy_model()

    def scores(sequence: TrainingSequence) -> TokenScores:
        logits_S_V = model.model(mx.array([(sequence.prompt + sequence.tokens)[:-1]]))[0]
        return token_scores(logits_S_V[len(sequence.prompt) - 1 :], mx.array(list(sequence.tokens)), distribution=LAW)

    def loss(traced: Parameters) -> tuple[mx.array, list[mx.array]]:
        model.use(traced)
        found = [scores(sequence) for sequence in sequences]
        losses = [_loss(f, mx.array(s.loss_weight_T * s.loss_mask_T)) for f, s in zip(found, sequences, strict=True)]
        return mx.sum(mx.stack(losses)), [f.logp_N for f in found]

    model.model.train()
    (value, logp), gradient = mx.value_and_grad(loss)(policy.trainable())
    return Outcome(
        [model_lanes.numpy(a) for a in logp],
        float(np.array(value)),
        {n: model_lanes.numpy(g) for n, g in flat(gradient).items()},
    )


def the_way_of(layout: str, policy: Policy, sequences: Sequence[TrainingSequence], *, budget: int) -> Outcome:
    """Micro-batches of a layout."""
    model = policy.copy_model()
    forcing = TeacherForcing(model.model, VOCAB, layout=layout)
    assert forcing.layout == layout
    logp: list[np.ndarray] = [np.zeros(0)] * len(sequences)
    total = 0.0
    gradient: dict[str, np.ndarray] = {}
    for micro in build_micro_batches(sequences, layout=layout, budget=budget):

        def loss(traced: Parameters, micro: Any = micro) -> tuple[mx.array, mx.array]:
            model.use(traced)
            found = forcing(micro, distribution=LAW)
            return _loss(found, mx.array(micro.table.loss_weight_N * micro.table.loss_mask_N)), found.logp_N

        with model.training_mode():
            (value, logp_N), tree = mx.value_and_grad(loss)(policy.trainable())
            total += float(np.array(value))
            for name, array in flat(tree).items():
                gradient[name] = gradient.get(name, 0.0) + model_lanes.numpy(array).astype(np.float64)
        for b, member in enumerate(micro.members):
            mine_N = np.flatnonzero(micro.table.sequence_N == b)[: len(sequences[member].tokens)]
            logp[member] = np.array(logp_N)[mine_N]
    return Outcome(logp, total, gradient)


def _loss(scores: TokenScores, loss_weight_N: mx.array) -> mx.array:
    return mx.sum(loss_weight_N * (0.1 * scores.entropy_N - scores.logp_N))


def largest_error(expected: Outcome, found: Outcome) -> float:
    """Largest relative error: of log-probabilities, of the loss, and of the gradient of any parameter."""

    def error(one: Any, other: Any) -> float:
        return float(np.linalg.norm(np.subtract(one, other)) / np.linalg.norm(one))

    assert expected.gradient.keys() == found.gradient.keys()
    return max(
        error(np.concatenate(expected.logp), np.concatenate(found.logp)),
        error(expected.loss, found.loss),
        *(error(expected.gradient[name], found.gradient[name]) for name in expected.gradient),
    )
