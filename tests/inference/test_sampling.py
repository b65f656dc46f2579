"""Sampling: logits processors, random numbers, the sampling distribution, and extreme float32 values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.inference.sampling import apply_filters as filter_on_device
from clotho.inference.sampling import choose_token, invert_cdf, row_parameters, sample, uniforms
from protocols.sampling import Sampling
from tests.inference.engine_helpers import processed_logprobs
from tests.inference.filter_checks import FILTERED, check_filters, check_limits_of_filters


def sample_tokens(logits_V: np.ndarray, sampling: Sampling, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample `count` tokens from the same logits, each with its own seed."""
    rows = mx.array(np.broadcast_to(logits_V.astype(np.float32), (count, len(logits_V))))
    plan = row_parameters([sampling] * count, len(logits_V))
    uniform = mx.array(uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)))
    sampled = sample(rows, uniform, plan, None)
    return np.array(sampled.token_B), np.array(sampled.logp_B)


@pytest.mark.parametrize("vocabulary", [11, 1280])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.8), Sampling(top_k=7), Sampling(min_p=0.05)],
    ids=["plain", "temperature", "top-p", "top-k", "min-p"],
)
def test_tokens_are_sampled_in_proportion_to_their_probability(vocabulary: int, sampling: Sampling) -> None:
    """Chi-square of 4,000 samples against the reference distribution is below 5 sigma, in one stage and in two."""
    logits_V = np.random.default_rng(3).normal(size=vocabulary)
    expected_V = np.exp(processed_logprobs(logits_V, (), sampling))
    token_B, logp_B = sample_tokens(logits_V, sampling, 4_000)
    assert (expected_V[token_B] > 0).all()
    np.testing.assert_allclose(logp_B, np.log(expected_V[token_B]), atol=1e-4)
    common = expected_V * 4_000 >= 10
    observed = np.append(np.bincount(token_B, minlength=vocabulary)[common], (~common)[token_B].sum())
    wanted = np.append(expected_V[common], expected_V[~common].sum()) * 4_000
    chi_square = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9))[wanted > 0].sum()
    freedom = (wanted > 0).sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_masked_token_is_never_sampled() -> None:
    """At both ends of the uniform's range and between masked tokens, a token of positive weight is chosen."""
    weight = np.zeros((6, 640), dtype=np.float32)
    weight[:, [130, 400]] = 1.0, 2.0
    edge = np.array([[2.0**-24, 2.0**-24], [1 - 2.0**-24, 1 - 2.0**-24]] * 3, dtype=np.float32)
    for weights in (weight, weight[:, 120:410]):
        index, total = choose_token(mx.array(weights), mx.array(edge))
        assert set(np.array(index).tolist()) == {
            130 - 120 * (weights is not weight),
            400 - 120 * (weights is not weight),
        }
        np.testing.assert_array_equal(np.array(total), np.full(6, 3.0))


def test_a_target_beyond_the_last_sum_selects_the_heaviest_index() -> None:
    """Rounding may put the target there. A uniform of exactly 1, which is never sampled, shows the case."""
    index, _ = invert_cdf(mx.array([[0.0, 1.0, 3.0, 0.0]]), mx.array([[1.0]]))
    assert index.item() == 2


def test_greedy_takes_the_first_of_equal_logits_at_temperature_one() -> None:
    """Temperature 0 ignores the filters and reports the log-probability at temperature 1."""
    token_B, logp_B = sample_tokens(np.array([0.0, 1.0, 1.0, -1.0]), Sampling(temperature=0.0, top_k=1), 1)
    assert token_B.tolist() == [1]
    np.testing.assert_allclose(logp_B, [1.0 - np.log(1 + 2 * np.e + np.exp(-1))], atol=1e-6)


def test_unused_sampling_parameters_allocate_no_arrays() -> None:
    """Rows without filters need no sort, penalty, bias or scaling."""
    plan = row_parameters([Sampling(), None, Sampling(top_k=500)], 400)
    assert not plan.all_greedy
    unused = (plan.greedy_B, plan.inverse_temperature_B, plan.filters, plan.penalty_B, plan.bias)
    assert all(setting is None for setting in unused)
    assert plan.alternatives is None
    assert plan.recording is None


def test_only_filtered_rows_that_request_it_record_supports() -> None:
    """Supports are as wide as the largest top-k of these rows. A greedy row and an unfiltered row have none."""
    settings = [
        Sampling(top_k=9), Sampling(top_k=5, top_p=0.9), Sampling(), Sampling(temperature=0.0, top_k=8),
        Sampling(top_k=6), Sampling(top_k=500), None,
    ]  # fmt: skip
    recording = row_parameters(settings, 400, recorded=[5, 4, 3, 2, 1]).recording
    assert recording is not None
    assert (np.array(recording.row_R).tolist(), recording.number) == ([1, 4], 6)


def test_alternatives_are_sorted_by_probability() -> None:
    """The requested number, with log-probabilities of the processed distribution."""
    logits = np.array([0.0, 3.0, 1.0, 2.0])
    plan = row_parameters([Sampling(temperature=2.0, top_logprobs=3)], 4)
    sampled = sample(mx.array(logits[None].astype(np.float32)), mx.array([[0.5, 0.5]]), plan, None)
    assert sampled.top_token_B_N is not None
    assert sampled.top_logp_B_N is not None
    assert np.array(sampled.top_token_B_N).tolist() == [[1, 3, 2]]
    expected = processed_logprobs(logits, (), Sampling(temperature=2.0))
    np.testing.assert_allclose(np.array(sampled.top_logp_B_N)[0], expected[[1, 3, 2]], atol=1e-5)


def kept_on_device(x_B_V: np.ndarray, settings: list[Sampling]) -> np.ndarray:
    """Return which of the possible tokens the mask keeps."""
    filters = row_parameters(settings, x_B_V.shape[1]).filters
    assert filters is not None
    left_B_V = np.array(filter_on_device(mx.array(x_B_V), filters))
    kept_B_V = left_B_V > -np.inf
    np.testing.assert_array_equal(left_B_V[kept_B_V], x_B_V[kept_B_V])
    return kept_B_V


def test_filters_and_alternatives_are_computed_for_the_rows_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorts of a whole vocabulary are slow. Other rows keep their logits."""
    sorted_rows: list[int] = []
    for name in ("sort", "argsort"):
        usual: Any = getattr(mx, name)

        def recorded(x: mx.array, *, axis: int, usual: Any = usual) -> mx.array:
            sorted_rows.append(x.shape[0])
            result: mx.array = usual(x, axis=axis)
            return result

        monkeypatch.setattr(mx, name, recorded)
    settings = [Sampling(), Sampling(top_k=1), None, Sampling(top_logprobs=2), Sampling(top_p=0.5, top_logprobs=1)]
    x_B_V = mx.array(np.random.default_rng(1).normal(size=(5, 600)).astype(np.float32))
    uniform = mx.array(uniforms(np.arange(5, dtype=np.uint64), np.zeros(5, dtype=np.int64)))
    sampled = sample(x_B_V, uniform, row_parameters(settings, 600), None)
    assert sorted_rows == [2, 2]
    assert sampled.top_token_B_N is not None
    assert sampled.top_logp_B_N is not None
    assert sampled.top_token_B_N.shape == (5, 2)
    assert np.isfinite(np.array(sampled.top_logp_B_N)[3:]).all()
    for row, setting in enumerate(settings):
        alone = sample(x_B_V[row : row + 1], uniform[row : row + 1], row_parameters([setting], 600), None)
        assert int(sampled.token_B[row]) == int(alone.token_B[0])
        assert float(sampled.logp_B[row]) == pytest.approx(float(alone.logp_B[0]), abs=1e-6)


@pytest.mark.parametrize("settings", FILTERED)
def test_the_filters_keep_the_documented_support(settings: tuple[Sampling, ...]) -> None:
    """Each row equals the reference, for any neighbours and for many equal logits."""
    check_filters(kept_on_device, settings)


def test_filters_keep_no_impossible_token_and_weak_ones_every_other() -> None:
    """No token of minus infinity, even among the most probable. The smallest min-p is 0 in float32."""
    check_limits_of_filters(kept_on_device)


def grid(seeds: int, positions: int) -> np.ndarray:
    """Return the uniforms (seeds, positions, 2) of all pairs of the first seeds and positions."""
    seed, position = np.meshgrid(np.arange(seeds), np.arange(positions), indexing="ij")
    return uniforms(seed.ravel().astype(np.uint64), position.ravel().astype(np.int64)).reshape(seeds, positions, 2)


def test_a_uniform_depends_only_on_seed_and_position() -> None:
    """The order and number of rows sampled together have no effect."""
    together = grid(5, 7)
    one = uniforms(np.array([3], dtype=np.uint64), np.array([4], dtype=np.int64))
    np.testing.assert_array_equal(together[3, 4], one[0])


def test_uniforms_lie_strictly_inside_the_unit_interval() -> None:
    """In float32 the values 0 and 1 would select a token of probability zero."""
    near_N = np.arange(1000, dtype=np.uint64)
    seed_N = np.concatenate([near_N, np.uint64(2**64 - 1) - near_N])
    u = uniforms(seed_N, np.repeat(np.array([0, 2**40], dtype=np.int64), 1000))
    assert u.dtype == np.float32
    assert u.min() > 0.0
    assert u.max() < 1.0


def test_uniforms_are_uncorrelated_along_seeds_positions_and_lanes() -> None:
    """Also for neighbouring seeds and positions, which a group uses."""
    u = grid(300, 200).astype(np.float64)
    counts, _ = np.histogram(u, bins=64, range=(0, 1))
    expected = u.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * np.sqrt(126)
    centred = u - 0.5
    bound = 5 / 12 / np.sqrt(u.size / 2)
    for a, b in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:]), (centred[..., 0], centred[..., 1])):
        assert abs((a * b).mean()) < bound
