"""The learner's passes along the routes of the sampler, in every layout, and the parity check with noisy routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from attachments.router_replay.routes import PassRoutes, routed
from clotho.models.experts import Mixtures
from clotho.models.policy_model import checkpointed_blocks
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import TrainingSequence, scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.engine import EngineSection
from tests.small_models import tiny, tiny_source
from tests.training.policies_and_groups import BigramPolicy
from training_run.forced_decoder import ForcedDecoder
from training_run.parity_check import ParityModels, ParityReport, ParitySample

PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3, 9, 4), (5, 6, 1, 2)), ((3, 9, 4), (8, 8)), ((7,), (2, 30, 31)), ((3, 9, 4), (1,)), ((5, 5), (9, 2)),
)  # fmt: skip


def sequences_with_routes(seed: int = 0, *, unknown: Sequence[int] = ()) -> list[TrainingSequence]:
    """Return sequences with random routes, the same for equal prompts. unknown: indices of those without routes."""
    random = np.random.default_rng(seed)
    prompts: dict[tuple[int, ...], Any] = {prompt: random.integers(0, 4, (len(prompt), 4)) for prompt, _ in PAIRS}
    found = []
    for i, (prompt, tokens) in enumerate(PAIRS):
        own_T_C = random.integers(0, 4, (len(tokens) - 1, 4))
        routes = np.concatenate([prompts[prompt], own_T_C]).astype(np.uint8)
        ones_T = np.ones(len(tokens), dtype=np.float32)
        sequence = scored_only(prompt, tokens)._replace(loss_mask_T=ones_T, loss_weight_T=ones_T)
        found.append(sequence._replace(route_I_E=None if i in unknown else routes))
    return found


def logp_by_completion(model: nn.Module, layout: str, sequences: Sequence[TrainingSequence]) -> tuple[list[Any], Any]:
    """Return the log-probabilities of the tokens of each sequence, replayed, and the gradient of their sum."""
    forcing = TeacherForcing(model, 64, layout=layout)
    (micro,) = build_micro_batches(sequences, layout=layout, budget=1000, replays=True)

    def total(parameters: Any) -> tuple[mx.array, mx.array]:
        model.update(parameters)
        scores, metrics = forcing.with_experts(micro, distribution=SamplingDistribution(1.0))
        assert metrics["flipped_routes"].shape == (2,)
        return mx.sum(scores.logp_N * mx.array(micro.table.loss_mask_N)), scores.logp_N

    parameters = model.trainable_parameters()
    (_, logp_N), gradients = mx.value_and_grad(total)(parameters)
    model.update(parameters)
    found: list[Any] = [None] * len(sequences)
    for b, member in enumerate(micro.members):
        own_N = (micro.table.sequence_N == b) & (micro.table.loss_mask_N > 0)
        found[member] = np.array(logp_N)[own_N]
    return found, gradients


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_every_layout_replays_the_same_routes(layout: str) -> None:
    """As one pass per sequence does; one sequence has no routes and chooses for itself."""
    model = tiny("qwen3_moe")
    sequences = sequences_with_routes(unknown=(2,))
    mixtures = Mixtures(model)
    found, _ = logp_by_completion(model, layout, sequences)
    for sequence, logp_T in zip(sequences, found, strict=True):
        tokens = mx.array([[*sequence.prompt, *sequence.tokens][:-1]])
        if sequence.route_I_E is None:
            logits = model(tokens)
        else:
            with routed(mixtures, PassRoutes(mx.array(sequence.route_I_E)[None], None)):
                logits = model(tokens)
        z_T_V = np.array(logits[0, len(sequence.prompt) - 1 :], dtype=np.float64)
        expected_T = z_T_V - np.log(np.exp(z_T_V).sum(-1, keepdims=True))
        expected_T = expected_T[np.arange(len(sequence.tokens)), list(sequence.tokens)]
        assert np.abs(expected_T - logp_T).max() < 1e-4


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("qwen3_moe", "packed"), ("qwen3_moe", "shared"), ("gpt_oss", "shared"), ("qwen3_5_moe", "padded")],
)
def test_checkpointed_blocks_are_computed_again_along_the_same_routes(architecture: str, layout: str) -> None:
    """The gradients equal those without checkpoints, in each of several passes."""
    model = tiny(architecture)
    model.train()
    _, expected = logp_by_completion(model, layout, sequences_with_routes())
    with checkpointed_blocks(model.layers):
        _, found = logp_by_completion(model, layout, sequences_with_routes())
    pairs = zip(*(tree_flatten(tree) for tree in (expected, found)), strict=True)
    assert all(mx.allclose(one, other, atol=1e-5).item() for (_, one), (_, other) in pairs)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_flips_are_counted_with_and_without_replay(layout: str) -> None:
    """Of the routes of trained tokens, per layer: none for the own routes, all for others."""
    model = tiny("qwen3_moe")
    mixtures, forcing = Mixtures(model), TeacherForcing(model, 64, layout=layout)
    own, shifted = [], []
    for sequence in sequences_with_routes():
        with mixtures.recorded() as chosen:
            model(mx.array([[*sequence.prompt, *sequence.tokens][:-1]]))
        routes = np.array(mixtures.routes(chosen))[0].astype(np.uint8)
        own.append(sequence._replace(route_I_E=routes))
        layers = [[[e for e in range(4) if e not in pair] for pair in row.reshape(2, 2)] for row in routes]
        shifted.append(sequence._replace(route_I_E=np.array(layers, dtype=np.uint8).reshape(routes.shape)))
    tokens = sum(len(sequence.tokens) for sequence in own)
    for sequences, replays, expected in ((own, False, 0.0), (own, True, 0.0), (shifted, False, 2000.0 * 2 * tokens)):
        (micro,) = build_micro_batches(sequences, layout=layout, budget=1000, replays=replays)
        _, metrics = forcing.with_experts(micro, distribution=SamplingDistribution(1.0))
        assert metrics["flipped_routes"].tolist() == [expected, 2 * tokens]


def add_noise(model: Any, scale: float) -> None:
    """Add normal noise to the scores of every router, by another class of the layer."""
    for block in model.layers:
        name = "router" if "router" in block.mlp else "gate"
        layer = block.mlp[name]
        plain = type(layer)

        def call(self: Any, x: mx.array, plain: Any = plain) -> mx.array:
            scores: mx.array = plain.__call__(self, x)
            return scores + scale * mx.random.normal(scores.shape)

        layer.__class__ = type("Noisy", (plain,), {"__call__": call})


def noisy_report(architecture: str, scale: float, *, replays: bool) -> ParityReport:
    """Return a parity check of 128 tokens whose learner has noise in the scores of its routers."""
    experts = {} if architecture == "gpt_oss" else {"num_experts": 8}
    source = tiny_source(architecture, **experts)
    policy = BigramPolicy(source.model, vocab_size=source.vocab_size)
    served = ForcedDecoder.of_model(source.model, EngineSection())
    model = policy.copy_model()
    decoder = ForcedDecoder.of_model(model.model, EngineSection())
    add_noise(model.model, scale)
    random = np.random.default_rng(0)
    rows = tuple(tuple(random.integers(1, 60, 16).tolist()) for _ in range(8))
    sample = ParitySample(tuple(random.integers(1, 60, 12).tolist()), rows)
    forcing = TeacherForcing(model.model, model.vocab_size, layout="auto")
    mx.random.seed(1)
    compared = ParityModels(served, model, decoder, forcing, replays=replays)
    return compared.check(sample, policy.trainable(), temperature=1.0, rows=8)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_replay_removes_the_divergence_of_flipped_routes(architecture: str) -> None:
    """Noise of 0.03 flips some routes. With their replay, the noise changes the weights of experts only.

    The KL divergence is then proportional to the square of the noise, as in a dense model: 900 times that of noise of
    0.001, which flips no route here.
    """
    plain = noisy_report(architecture, 0.03, replays=False)
    assert plain.flipped_routes is not None
    assert plain.flipped_routes > 5
    assert plain.unreplayed_kl is None
    replayed = noisy_report(architecture, 0.03, replays=True)
    assert replayed.unreplayed_kl is not None
    assert replayed.mean_kl < replayed.unreplayed_kl / 3
    small = noisy_report(architecture, 0.001, replays=True)
    assert 300 < replayed.mean_kl / small.mean_kl < 2700


def test_without_noise_no_route_flips() -> None:
    """And nothing is replayed."""
    report = noisy_report("qwen3_moe", 0.0, replays=True)
    assert (report.flipped_routes, report.unreplayed_kl) == (0.0, None)
    assert report.mean_kl < 1e-9
