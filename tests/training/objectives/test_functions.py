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
from clotho.training.objectives.functions import objective
from protocols.errors import ProfileError
from tests.learner_settings import OBJECTIVES, OF_TOKENS, learner_settings
from tests.training.objectives.objective_inputs import evaluate_objective, float_array, tokens

NAMES = OF_TOKENS


def settings(name: str, **keys: Any) -> LearnerSection:
    """Return the defaults of the objective, without the quadratic penalty of dppo_tv."""
    return learner_settings(objective=name, **({"quadratic_kl": 0.0} if name == "dppo_tv" else {}), **keys)


@pytest.mark.parametrize("name", NAMES)
def test_log_ratios_of_500_nats_give_finite_losses(name: str) -> None:
    """For advantages of both signs."""
    seen = tokens([1.0, -1.0, 1.0, -1.0], old_logp_N=[-500.0, -500.0, -0.1, -0.1], sequence_N=[0, 1, 2, 3])
    result = evaluate_objective(
        objective(settings(name).objective), float_array([-0.1, -0.1, -500.0, -500.0]), seen, settings(name)
    )
    assert np.isfinite(result.loss_N).all()
    assert np.isfinite(result.gradient_N).all()


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
    assert all(callable(objective(settings(name).objective)) for name in OBJECTIVES)
    assert len({kind.__doc__ for kind in kinds}) == len(OBJECTIVES)
