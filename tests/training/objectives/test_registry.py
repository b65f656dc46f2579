"""Every objective of the table: what holds for all of them, and which settings each reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from clotho.config.objectives import Custom
from clotho.config.schema import LearnerSection
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss
from clotho.training.objectives.registry import OBJECTIVES as FUNCTIONS
from clotho.training.objectives.registry import objective
from protocols.errors import ProfileError
from tests.learner_settings import OBJECTIVES, learner_settings
from tests.training.objectives.random_inputs import random_tokens, row, taken, teach, tokens

NAMES = OBJECTIVES


def settings(name: str, **keys: Any) -> LearnerSection:
    """The defaults of the objective, without the quadratic penalty of dppo_tv."""
    return learner_settings(objective=name, **({"quadratic_kl": 0.0} if name == "dppo_tv" else {}), **keys)


@pytest.mark.parametrize("name", NAMES)
def test_on_its_own_samples_every_objective_is_the_policy_gradient(name: str) -> None:
    """Where policy, anchor and sampler agree nothing is clipped and dL/dlogp_t = -A_t (rloo: times the tokens)."""
    logp_N, seen = random_tokens(30)
    seen = seen._replace(old_logp_N=logp_N, rollout_logp_N=logp_N)
    taught = teach(objective(settings(name).objective), logp_N, seen, settings(name))
    expected_N = -np.array(seen.advantage_N * seen.loss_mask_N)
    if name == "rloo":
        expected_N *= np.array(seen.spread_N(seen.sum_B(mx.ones(30))))
    np.testing.assert_allclose(taught.gradient_N, expected_N, rtol=1e-5)
    assert not taught.clipped_N.any()


@pytest.mark.parametrize("name", NAMES)
def test_advantages_of_zero_teach_nothing(name: str) -> None:
    """Equal rewards pull nowhere at all: the gradient is exactly 0."""
    logp_N, seen = random_tokens(30)
    taught = teach(objective(settings(name).objective), logp_N, seen._replace(advantage_N=mx.zeros(30)), settings(name))
    assert taught.gradient_N.tolist() == [0.0] * 30
    assert not (taught.clipped_N & (name != "cispo")).any()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_completions_may_lie_in_any_order(name: str) -> None:
    """Shuffled tokens, and renumbered completions, give the same losses and gradients, shuffled."""
    logp_N, seen = random_tokens(30)
    order_N = np.random.default_rng(1).permutation(30)
    ordered = teach(objective(settings(name).objective), logp_N, seen, settings(name))
    shuffled = teach(
        objective(settings(name).objective),
        mx.array(np.array(logp_N)[order_N]),
        taken(seen, order_N, [2, 0, 1]),
        settings(name),
    )
    np.testing.assert_allclose(shuffled.loss_N, ordered.loss_N[order_N], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shuffled.gradient_N, ordered.gradient_N[order_N], rtol=1e-5, atol=1e-6)
    assert shuffled.clipped_N.tolist() == ordered.clipped_N[order_N].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_padding_never_changes_loss_or_gradient(name: str) -> None:
    """Tokens of weight 0, whatever else they hold, leave no trace; their own gradient is 0."""
    logp_N, seen = random_tokens(30)
    cut = taken(seen, np.arange(28), [0, 1, 2])
    full = teach(objective(settings(name).objective), logp_N, seen, settings(name))
    short = teach(objective(settings(name).objective), logp_N[:28], cut, settings(name))
    np.testing.assert_allclose(full.loss_N[:28], short.loss_N, rtol=1e-6)
    np.testing.assert_allclose(full.gradient_N, [*short.gradient_N, 0.0, 0.0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_impossible_tokens_stay_finite(name: str) -> None:
    """Log-ratios of plus and minus 500 nats, for advantages of both signs."""
    seen = tokens([1.0, -1.0, 1.0, -1.0], old_logp_N=[-500.0, -500.0, -0.1, -0.1], sequence_N=[0, 1, 2, 3])
    taught = teach(objective(settings(name).objective), row([-0.1, -0.1, -500.0, -500.0]), seen, settings(name))
    assert np.isfinite(taught.loss_N).all()
    assert np.isfinite(taught.gradient_N).all()


def test_every_struct_has_a_function_and_reverse() -> None:
    """The union of the profile and the functions name the same objectives."""
    assert {type(settings(name).objective) for name in NAMES} == set(FUNCTIONS)


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
def test_what_cannot_be_an_objective_is_refused_in_one_line(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown names, modules that fail, things that are no function of three arguments; the name is in the message."""
    (tmp_path / "broken_objective.py").write_text("raise RuntimeError('boom')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProfileError, match=says) as refusal:
        objective(Custom(function=name))
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def scaled(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """An objective of the user's own."""
    return PolicyLoss(-3.0 * tokens.advantage_N * logp_N, mx.zeros_like(logp_N))


def mean_of_tokens(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """One that breaks the contract: a mean where the losses of tokens belong."""
    return PolicyLoss(mx.mean(logp_N), mx.zeros_like(logp_N))


def test_an_objective_of_ones_own_is_imported_and_called() -> None:
    """`module:function`: here -3 A log pi, with gradient -3 A."""
    taught = teach(
        objective(Custom(function=f"{__name__}:scaled")), row([-1.0, -2.0]), tokens([1.0, -1.0]), LearnerSection()
    )
    assert taught.gradient_N.tolist() == [-3.0, 3.0]


def test_an_objective_of_ones_own_that_returns_something_else_is_refused() -> None:
    """Broadcasting would have made a wrong loss of it."""
    with pytest.raises(ProfileError, match="must return a PolicyLoss"):
        objective(Custom(function=f"{__name__}:mean_of_tokens"))(
            row([-1.0, -2.0]), tokens([1.0, 1.0]), LearnerSection()
        )


def test_built_in_objectives_are_the_functions_themselves() -> None:
    """Each has the name of its type and a docstring of its own, with its paper."""
    functions = [objective(settings(name).objective) for name in NAMES]
    assert [function.__name__ for function in functions] == list(NAMES)
    assert len({function.__doc__ for function in functions}) == len(NAMES)
