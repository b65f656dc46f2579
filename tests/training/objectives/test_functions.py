"""Properties of every objective, and custom objectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.settings.learner import LearnerSection
from clotho.settings.objectives import Custom
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss
from clotho.training.objectives.functions import OBJECTIVES as FUNCTIONS
from clotho.training.objectives.functions import objective
from protocols.errors import ProfileError
from tests.learner_settings import OBJECTIVES, OF_TOKENS, learner_settings
from tests.training.objectives.objective_inputs import (
    evaluate_objective,
    float_array,
    random_tokens,
    select_tokens,
    tokens,
)

NAMES = OF_TOKENS


def settings(name: str, **keys: Any) -> LearnerSection:
    """Return the defaults of the objective, without the quadratic penalty of dppo_tv."""
    return learner_settings(objective=name, **({"quadratic_kl": 0.0} if name == "dppo_tv" else {}), **keys)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_objective_is_the_policy_gradient(name: str) -> None:
    """Without a ratio nothing is clipped and dL/dlogp_t = -A_t (rloo: times the number of tokens)."""
    logp_N, seen = random_tokens(30)
    seen = seen._replace(old_logp_N=logp_N, rollout_logp_N=logp_N)
    result = evaluate_objective(objective(settings(name).objective), logp_N, seen, settings(name))
    expected_N = -np.array(seen.advantage_N * seen.loss_mask_N)
    if name == "rloo":
        expected_N *= np.array(seen.spread_N(seen.sum_B(mx.ones(30))))
    np.testing.assert_allclose(result.gradient_N, expected_N, rtol=1e-5)
    assert not result.clipped_N.any()


@pytest.mark.parametrize("name", NAMES)
def test_zero_advantages_have_zero_gradient(name: str) -> None:
    """The gradient is exactly 0."""
    logp_N, seen = random_tokens(30)
    result = evaluate_objective(
        objective(settings(name).objective), logp_N, seen._replace(advantage_N=mx.zeros(30)), settings(name)
    )
    assert result.gradient_N.tolist() == [0.0] * 30
    assert not (result.clipped_N & (name != "cispo")).any()


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_independent_of_the_order_of_tokens(name: str) -> None:
    """Shuffled tokens and renumbered completions give the shuffled losses and gradients."""
    logp_N, seen = random_tokens(30)
    order_N = np.random.default_rng(1).permutation(30)
    ordered = evaluate_objective(objective(settings(name).objective), logp_N, seen, settings(name))
    shuffled = evaluate_objective(
        objective(settings(name).objective),
        mx.array(np.array(logp_N)[order_N]),
        select_tokens(seen, order_N, [2, 0, 1]),
        settings(name),
    )
    np.testing.assert_allclose(shuffled.loss_N, ordered.loss_N[order_N], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shuffled.gradient_N, ordered.gradient_N[order_N], rtol=1e-5, atol=1e-6)
    assert shuffled.clipped_N.tolist() == ordered.clipped_N[order_N].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_no_loss_or_gradient(name: str) -> None:
    """Tokens with loss mask 0 have no effect for any content. Their own gradient is 0."""
    logp_N, seen = random_tokens(30)
    cut = select_tokens(seen, np.arange(28), [0, 1, 2])
    full = evaluate_objective(objective(settings(name).objective), logp_N, seen, settings(name))
    short = evaluate_objective(objective(settings(name).objective), logp_N[:28], cut, settings(name))
    np.testing.assert_allclose(full.loss_N[:28], short.loss_N, rtol=1e-6)
    np.testing.assert_allclose(full.gradient_N, [*short.gradient_N, 0.0, 0.0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_log_ratios_of_500_nats_give_finite_losses(name: str) -> None:
    """For advantages of both signs."""
    seen = tokens([1.0, -1.0, 1.0, -1.0], old_logp_N=[-500.0, -500.0, -0.1, -0.1], sequence_N=[0, 1, 2, 3])
    result = evaluate_objective(
        objective(settings(name).objective), float_array([-0.1, -0.1, -500.0, -500.0]), seen, settings(name)
    )
    assert np.isfinite(result.loss_N).all()
    assert np.isfinite(result.gradient_N).all()


def test_every_objective_struct_has_a_function_and_vice_versa() -> None:
    """The tagged union of the profile and the registry have the same names."""
    assert {type(settings(name).objective) for name in OBJECTIVES} == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:loss", "No module named"),
        ("math:no_such_function", "no_such_function"),
        ("math:pi", "float"),
        ("math:sin", "cannot be called"),
        ("broken_objective:loss", "boom"),
    ],
)
def test_invalid_custom_objectives_are_refused(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown names, modules that fail on import, and objects that are no function of three arguments.

    The message has the name.
    """
    (tmp_path / "broken_objective.py").write_text("raise RuntimeError('boom')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProfileError, match=says) as refusal:
        objective(Custom(function=name))
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def scaled(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """A custom objective."""
    return PolicyLoss(-3.0 * tokens.advantage_N * logp_N, mx.zeros_like(logp_N))


def mean_of_tokens(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """A custom objective that returns a mean instead of token losses."""
    return PolicyLoss(mx.mean(logp_N), mx.zeros_like(logp_N))


def test_a_custom_objective_is_imported_and_called() -> None:
    """`module:function`: here -3 A log pi, with gradient -3 A."""
    result = evaluate_objective(
        objective(Custom(function=f"{__name__}:scaled")),
        float_array([-1.0, -2.0]),
        tokens([1.0, -1.0]),
        LearnerSection(),
    )
    assert result.gradient_N.tolist() == [-3.0, 3.0]


def test_a_custom_objective_with_a_wrong_result_is_refused() -> None:
    """Broadcasting would give a wrong loss."""
    with pytest.raises(ProfileError, match="must return a PolicyLoss"):
        objective(Custom(function=f"{__name__}:mean_of_tokens"))(
            float_array([-1.0, -2.0]), tokens([1.0, 1.0]), LearnerSection()
        )


def test_every_objective_has_a_function_and_a_description_of_its_own() -> None:
    """The description names the paper."""
    kinds = [type(settings(name).objective) for name in OBJECTIVES]
    assert set(kinds) == FUNCTIONS.keys()
    assert len({kind.__doc__ for kind in kinds}) == len(OBJECTIVES)
