"""The head in row chunks: equal scores and gradients with bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from clotho.models.head import SplitModel, split_model
from clotho.models.parameters import Parameters, flat
from clotho.scoring.token_scores import HeadScores, SampledTokens, SamplingDistribution, Teacher, TokenScores
from tests.small_models import tiny
from tests.training.policies_and_groups import Bigram

pytestmark = pytest.mark.needs_float32

VOCAB = 64
LAW = SamplingDistribution(0.7, ((5, 1.5), (60, -0.5)))
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
POSITIONS = mx.array([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11])
TARGETS = mx.array([1, 4, 1, 5, 9, 2, 6, 7, 1, 8, 2])
SUPPORT = mx.concatenate([TARGETS[:, None] + mx.array([[9, 0, 30, 1]]), mx.full((11, 1), -1, mx.int32)], axis=-1)
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("qwen3", {"tie_word_embeddings": False}),
    "soft cap": ("gemma2", {"final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {}),
}


def chunked_model(model: nn.Module, rows: int, vocab_size: int = VOCAB) -> tuple[SplitModel, HeadScores]:
    """Return the halves of a model with a head in chunks of this number of rows."""
    split = split_model(model, vocab_size)
    assert split is not None
    return split, HeadScores(split, vocab_size, rows=rows)


def states(split: SplitModel) -> mx.array:
    """Return the hidden states before the scored tokens."""
    return split.blocks(TOKENS).reshape(16, -1)[POSITIONS]


def reference_logits(model: nn.Module) -> mx.array:
    """Return the model's own logits before the scored tokens."""
    logits_B_S_V: mx.array = model(TOKENS)
    return logits_B_S_V.reshape(16, -1)[POSITIONS]


def reference_scores(logits_N_V: mx.array, support_N_K: mx.array | None) -> TokenScores:
    """Return the scores from their definition, for differentiation by MLX."""
    for token, addend in LAW.logit_bias:
        logits_N_V = logits_N_V + addend * mx.eye(VOCAB)[token]
    z_N_V = logits_N_V / LAW.temperature
    if support_N_K is not None:
        z_N_V = mx.where(mx.any(support_N_K[:, :, None] == mx.arange(VOCAB), axis=1), z_N_V, -1e4)
    logp_N_V = z_N_V - mx.logsumexp(z_N_V, axis=-1, keepdims=True)
    entropy_N = -mx.sum(mx.exp(logp_N_V) * logp_N_V, axis=-1)
    return TokenScores(mx.take_along_axis(logp_N_V, TARGETS[:, None], axis=-1)[:, 0], entropy_N)


def gradient(model: nn.Module, scores: Callable[[], TokenScores]) -> tuple[float, dict[str, mx.array]]:
    """Return a weighted sum of all scores and its gradient with respect to all trainable parameters."""

    def loss(traced: Parameters) -> mx.array:
        model.update(traced)
        logp_N, entropy_N, _ = scores()
        model.update(parameters)
        return mx.sum(logp_N * mx.sin(mx.arange(11))) + 0.4 * mx.sum(entropy_N * mx.cos(mx.arange(11)))

    parameters = model.trainable_parameters()
    value, tree = mx.value_and_grad(loss)(parameters)
    arrays = flat(tree)
    mx.eval(value, arrays)
    return float(np.array(value)), arrays


def assert_equal(found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    """Compare to 1e-5 of the largest value of each array."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(np.array(value)).max()
        np.testing.assert_allclose(np.array(found[name]), np.array(value), atol=1e-5 * scale + 1e-9, err_msg=name)


@pytest.mark.parametrize("support", [None, SUPPORT], ids=["whole vocabulary", "support"])
@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("head", HEADS)
def test_chunks_give_the_scores_and_gradients_of_the_whole_head(head: str, rows: int, support: mx.array | None) -> None:
    """With every weight trained, tied head or not. The reference is MLX's own derivative."""
    architecture, settings = HEADS[head]
    model = tiny(architecture, vocab_size=VOCAB, **settings)
    model.train()
    split, head_scores = chunked_model(model, rows)
    value, arrays = gradient(model, lambda: head_scores(states(split), SampledTokens(TARGETS, support, LAW)))
    expected, expected_arrays = gradient(model, lambda: reference_scores(reference_logits(model), support))
    assert value == pytest.approx(expected, rel=1e-5)
    assert_equal(arrays, expected_arrays)


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("head", HEADS)
def test_gradients_computed_with_the_logits_equal_the_reference(head: str, rows: int) -> None:
    """Of log-probabilities alone with a frozen head, with a temperature per token."""
    architecture, settings = HEADS[head]
    model = tiny(architecture, vocab_size=VOCAB, **settings)
    split, head_scores = chunked_model(model, rows)
    model.freeze()
    draws = SampledTokens(TARGETS, None, LAW, TEMPERATURES)
    hidden_N_D = states(split)
    found = {}
    for logp_only in (True, False):

        def loss(hidden_N_D: mx.array, logp_only: bool = logp_only) -> mx.array:
            scores = head_scores(hidden_N_D, draws, logp_only=logp_only)
            return mx.sum(scores.logp_N * mx.sin(mx.arange(11)))

        entropy_N = head_scores(hidden_N_D, draws, logp_only=logp_only).entropy_N
        value, along_N_D = mx.value_and_grad(loss)(hidden_N_D)
        found[logp_only] = {"loss": value, "gradient": along_N_D, "entropy": entropy_N}
    assert_equal(found[True], found[False])


TEMPERATURES = 0.6 + 0.1 * mx.arange(11)
TEACHER = Teacher(
    mx.concatenate([TARGETS[:, None] + mx.array([[3, 0]]), mx.full((11, 1), -1, mx.int32)], axis=-1),
    mx.array([[0.25, 0.75, 0.0]] * 10 + [[0.0, 0.0, 0.0]]),
)


@pytest.mark.parametrize("support", [None, SUPPORT], ids=["whole vocabulary", "support"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_chunks_keep_the_temperature_and_teacher_of_each_token(head: str, rows: int, support: mx.array | None) -> None:
    """The scores and gradients of all three kinds equal those of one chunk."""
    architecture, settings = HEADS[head]
    model = tiny(architecture, vocab_size=VOCAB, **settings)
    model.train()
    draws = SampledTokens(TARGETS, support, LAW, TEMPERATURES, TEACHER)
    found = []
    for count in (100, rows):
        split, head_scores = chunked_model(model, count)

        def scores(split: SplitModel = split, head_scores: HeadScores = head_scores) -> TokenScores:
            logp_N, entropy_N, cross_entropy_N = head_scores(states(split), draws)
            assert cross_entropy_N is not None
            return TokenScores(logp_N, entropy_N + cross_entropy_N * mx.cos(3 * mx.arange(11)))

        found.append(gradient(model, scores))
    (expected, expected_arrays), (value, arrays) = found
    assert value == pytest.approx(expected, rel=1e-5)
    assert_equal(arrays, expected_arrays)


def quantized_head() -> nn.Module:
    """Return a model with a quantized head and one trained block."""
    model = tiny("qwen3", vocab_size=VOCAB)
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda path, _: path == "lm_head")
    model.freeze()
    model.model.layers[0].unfreeze()
    return model


def test_a_quantized_head_passes_gradients_through() -> None:
    """Quantized weights have no gradient. The layers before them have one."""
    model = quantized_head()
    split, head_scores = chunked_model(model, 3)
    assert split.head_weights() == {}
    _, arrays = gradient(model, lambda: head_scores(states(split), SampledTokens(TARGETS, None, LAW)))
    _, expected = gradient(model, lambda: reference_scores(reference_logits(model), None))
    assert_equal(arrays, expected)


def test_bfloat16_weights_sum_their_gradients_in_float32() -> None:
    """Eleven chunks: the sum of their gradients is rounded once, as that of one chunk."""
    model = Bigram(vocab_size=VOCAB, width=8)
    model.set_dtype(mx.bfloat16)

    def in_pieces_of(rows: int) -> dict[str, mx.array]:
        split, head_scores = chunked_model(model, rows)
        return gradient(model, lambda: head_scores(states(split), SampledTokens(TARGETS, None, LAW)))[1]

    one_piece = in_pieces_of(100)
    for name, array in in_pieces_of(1).items():
        assert array.dtype == mx.bfloat16
        one, many = (np.array(value.astype(mx.float32)) for value in (one_piece[name], array))
        assert np.abs(one - many).max() <= 2**-7 * np.abs(one).max()


@pytest.mark.parametrize("rows", [4, 100])
def test_the_model_keeps_its_arrays(rows: int) -> None:
    """During tracing, after the call, and after the backward pass."""
    model = tiny("qwen3", vocab_size=VOCAB, tie_word_embeddings=True)
    split, head_scores = chunked_model(model, rows)
    parameters = model.trainable_parameters()
    before = {name: array.tolist() for name, array in flat(parameters).items()}

    def loss(traced: Parameters) -> mx.array:
        model.update(traced)
        scores = head_scores(split.blocks(TOKENS)[0], SampledTokens(TARGETS[:8], None, LAW))
        held = flat(model.parameters())
        assert all(held[name] is array for name, array in flat(traced).items())
        model.update(parameters)
        return mx.sum(scores.logp_N)

    mx.eval(mx.grad(loss)(parameters))
    assert {name: array.tolist() for name, array in flat(model.parameters()).items()} == before


def test_a_head_uses_the_weights_at_the_time_of_the_call() -> None:
    """Not the weights at the time of the split."""
    model = Bigram(vocab_size=VOCAB, width=8)
    split, head_scores = chunked_model(model, 4)
    hidden_N_D = states(split)
    doubled = {name: 2 * array for name, array in split.head_weights().items()}
    with split.using(doubled):
        inside = head_scores(hidden_N_D, SampledTokens(TARGETS, None, LAW))
    outside = head_scores(2 * hidden_N_D, SampledTokens(TARGETS, None, LAW))
    np.testing.assert_allclose(np.array(inside.logp_N), np.array(outside.logp_N), rtol=1e-5)


@pytest.mark.parametrize(
    ("differentiated", "with_teacher", "logp_only"),
    [(True, True, False), (False, True, False), (True, False, True)],
)
def test_memory_is_independent_of_the_number_of_tokens(
    differentiated: bool, with_teacher: bool, logp_only: bool
) -> None:
    """Four times as many tokens take at most a few more chunks, while one pass over all logits takes 96 more.

    MLX may compute several chunks at the same time.
    """
    vocab_size, rows = 4096, 16
    model = Bigram(vocab_size=vocab_size, width=8)
    _, head_scores = chunked_model(model, rows, vocab_size)
    model.freeze()

    def peak(length: int) -> int:
        hidden_N_D = mx.random.normal((length, 8), key=mx.random.key(0))
        target_N = mx.arange(length)
        mx.eval(hidden_N_D, target_N)

        def loss(hidden_N_D: mx.array) -> mx.array:
            teacher = Teacher(target_N[:, None], mx.ones((length, 1))) if with_teacher else None
            draws = SampledTokens(target_N, None, LAW, teacher=teacher)
            scores = head_scores(hidden_N_D, draws, logp_only=logp_only)
            return sum((mx.sum(score_N) for score_N in scores if score_N is not None), mx.array(0.0))

        mx.synchronize()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        mx.eval(mx.grad(loss)(hidden_N_D) if differentiated else loss(hidden_N_D))
        return mx.get_peak_memory() - held

    piece = rows * vocab_size * 4
    few, many = peak(32 * rows), peak(128 * rows)
    assert many < few + 16 * piece
    assert many < 32 * piece
