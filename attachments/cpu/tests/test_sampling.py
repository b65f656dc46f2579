"""The draw in NumPy equals the draw on the device."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from attachments.cpu.sampling import _choose_token, apply_filters, can_sample, sample_on_host, support_tokens
from clotho.inference.sampling import row_parameters, sample, uniforms
from protocols.sampling import Sampling
from tests.inference.filter_checks import FILTERED, check_filters, check_limits_of_filters, check_supports

MIXES = {
    "plain": (Sampling(),),
    "temperatures": (Sampling(temperature=0.3), Sampling(temperature=2.0)),
    "some greedy": (Sampling(temperature=0.0), Sampling()),
    "all greedy": (Sampling(temperature=0.0),),
    "filters": (Sampling(top_k=20, top_p=0.9), Sampling(min_p=0.05), Sampling(temperature=0.0), Sampling(top_p=0.7)),
    "biases": (Sampling(logit_bias=((1, 3.0), (2, -1.0), (1, 0.5))), Sampling(), Sampling(logit_bias=((7, 2.0),))),
}


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("vocabulary", [40, 512, 1000, 1280])
def test_host_and_device_draw_the_same_tokens_from_the_same_uniforms(vocabulary: int, mix: str) -> None:
    """In one stage and in two, with a last block that is not full, with tokens of probability zero."""
    rows = 400
    settings = [MIXES[mix][row % len(MIXES[mix])] for row in range(rows)]
    logits = np.random.default_rng(1).normal(size=(rows, vocabulary)).astype(np.float32) * 3
    logits[:, ::3] = -np.inf
    plan = row_parameters(settings, vocabulary, recorded=[row for row in range(0, rows, 2) if settings[row].top_k])
    uniform = uniforms(np.arange(rows, dtype=np.uint64), np.full(rows, 5, dtype=np.int64))
    here = sample_on_host(logits.copy(), None if plan.all_greedy else uniform, plan)
    there = sample(mx.array(logits), None if plan.all_greedy else mx.array(uniform), plan, None)
    np.testing.assert_array_equal(np.array(here.token_B), np.array(there.token_B))
    np.testing.assert_allclose(np.array(here.logp_B), np.array(there.logp_B), atol=1e-5)
    assert np.isfinite(np.array(here.logp_B)).all()
    assert (here.supports is None) == (there.supports is None) == (mix != "filters")
    if here.supports is not None and there.supports is not None:
        np.testing.assert_array_equal(np.array(here.supports.row_R), np.arange(0, rows, 4))
        np.testing.assert_array_equal(np.array(here.supports.token_R_K), np.array(there.supports.token_R_K))


def test_only_what_the_host_knows_is_drawn_there() -> None:
    """Penalties and alternatives are the device's."""
    for sampling in (Sampling(repetition_penalty=1.1), Sampling(top_logprobs=1)):
        assert not can_sample(row_parameters([Sampling(), sampling], 10))
    for sampling in (Sampling(), Sampling(top_p=0.5), Sampling(logit_bias=((0, 1.0),))):
        assert can_sample(row_parameters([sampling], 10))


@pytest.mark.parametrize("sampling", [Sampling(top_k=3), Sampling(top_p=0.25, top_k=39)])
def test_of_equal_logits_those_of_the_lowest_tokens_remain(sampling: Sampling) -> None:
    """As many as the filter keeps, although all reach its threshold."""
    plan = row_parameters([sampling], 12, recorded=[0])
    found = sample_on_host(np.zeros((1, 12), dtype=np.float32), np.zeros((1, 2), dtype=np.float32), plan)
    assert found.supports is not None
    assert [token for token in np.array(found.supports.token_R_K)[0].tolist() if token < 12] == [0, 1, 2]


@pytest.mark.parametrize("vocabulary", [40, 1280])
def test_a_token_of_weight_zero_is_never_drawn(vocabulary: int) -> None:
    """Not by a uniform of 0 either, which lies at the beginning of the first tokens, all excluded here."""
    weight_B_V = np.zeros((2, vocabulary), dtype=np.float32)
    weight_B_V[:, [vocabulary - 3, vocabulary - 1]] = 1.0
    found, total_B = _choose_token(weight_B_V, np.zeros((2, 2), dtype=np.float32))
    assert found.tolist() == [vocabulary - 3] * 2
    assert total_B.tolist() == [2.0] * 2


def kept_on_host(x_B_V: np.ndarray, settings: list[Sampling]) -> np.ndarray:
    """Return which tokens keep their logits in NumPy."""
    filters = row_parameters(settings, x_B_V.shape[1]).filters
    assert filters is not None
    left_B_V = x_B_V.copy()
    apply_filters(left_B_V, filters)
    kept_B_V = left_B_V > -np.inf
    np.testing.assert_array_equal(left_B_V[kept_B_V], x_B_V[kept_B_V])
    return kept_B_V


@pytest.mark.parametrize("settings", FILTERED)
def test_the_filters_keep_the_documented_support(settings: tuple[Sampling, ...]) -> None:
    """Each row equals the reference, for any neighbours and for many equal logits."""
    check_filters(kept_on_host, settings)


def test_filters_keep_no_impossible_token_and_weak_ones_every_other() -> None:
    """No token of minus infinity, even among the most probable. The smallest min-p is 0 in float32."""
    check_limits_of_filters(kept_on_host)


def test_supports_are_ascending_and_padded_at_the_end() -> None:
    """A support may have the whole width or one token."""
    check_supports(support_tokens)
