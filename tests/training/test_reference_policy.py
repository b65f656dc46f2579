"""The moving average of a reference policy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from clotho.training.reference_policy import ReferencePolicy, averaged
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import Bigram, BigramPolicy, same_bits


def test_the_average_keeps_its_share_of_itself() -> None:
    """keep = 3/4: 0.75 * 8 + 0.25 * 4 = 7."""
    assert averaged({"a": mx.array([8.0])}, {"a": mx.array([4.0])}, 0.75)["a"].item() == 7.0


def test_the_type_is_the_references_and_the_sum_is_float32() -> None:
    """A bfloat16 reference stays one: 1 + 0.01 * (2 - 1) = 1.01, rounded to it once. A float32 one follows exactly."""
    policy = {"a": mx.array([2.0], dtype=mx.bfloat16)}
    half = averaged({"a": mx.array([1.0], dtype=mx.bfloat16)}, policy, 0.99)["a"]
    full = averaged({"a": mx.array([1.0])}, policy, 0.99)["a"]
    assert half.dtype == mx.bfloat16
    assert half.item() == mx.array(1.01).astype(mx.bfloat16).item()
    assert full.dtype == mx.float32
    assert full.item() == pytest.approx(1.01, rel=1e-6)


def test_a_policy_that_stands_still_leaves_its_average_bit_for_bit() -> None:
    """0.99 x + 0.01 x would round."""
    x = mx.random.normal((1000,), key=mx.random.key(0))
    np.testing.assert_array_equal(np.array(averaged({"a": x}, {"a": x}, 0.99)["a"]), np.array(x))


def test_parameters_must_have_the_same_names() -> None:
    """The message names what differs."""
    with pytest.raises(ValueError, match="b"):
        averaged({"a": mx.zeros(1)}, {"a": mx.zeros(1), "b": mx.zeros(1)}, 0.5)


def test_a_reference_policy_is_restored_from_arrays_that_fit() -> None:
    """Names and shapes must be those of the parameters; the message names the ones that differ."""
    settings = learner_settings(kl_beta=0.1, reference="average")
    saved = ReferencePolicy(BigramPolicy(Bigram(seed=1)), settings).arrays
    reference = ReferencePolicy(BigramPolicy(), settings)
    reference.restore(saved)
    assert same_bits(reference.arrays, saved)
    name = min(saved)
    for wrong in ({key: array for key, array in saved.items() if key != name}, {**saved, name: mx.zeros((1, 1))}):
        with pytest.raises(ValueError, match=f"trainable parameters: {name}$"):
            reference.restore(wrong)
    assert same_bits(reference.arrays, saved)
