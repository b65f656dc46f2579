"""The check that updates move the adapters."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import pytest

from clotho.models.parameters import Arrays
from clotho.training.optimizers import apply_step, initial_state
from clotho.training.update import AdapterCheck
from protocols.errors import AdapterError
from tests.learner_settings import learner_settings

MODULES = ("layers.0.q_proj", "layers.0.v_proj", "layers.1.experts")


def adapters(*moved: str, value: float = 1e-30) -> Arrays:
    """A and B of all modules, B zero but for one element where it has moved."""
    arrays = {}
    for module in MODULES:
        arrays[f"{module}.lora_a"] = mx.ones((4, 2))
        b = mx.zeros((2, 3))
        b[1, 2] = value if module in moved else 0.0
        arrays[f"{module}.lora_b"] = b
    return arrays


def observe(check: AdapterCheck, times: int, *, moved: Iterable[str] = (), given: Iterable[str] = MODULES) -> None:
    """So many updates after which these B have moved, with gradients for those."""
    for _ in range(times):
        check.check(adapters(*moved), adapters(*given))


def test_an_adapter_of_which_nothing_moves_is_dead_after_three_updates() -> None:
    """Not after two."""
    check = AdapterCheck()
    observe(check, 2)
    with pytest.raises(AdapterError, match=r"after 3 updates .* every adapter is still exactly zero") as caught:
        observe(check, 1)
    assert caught.value.exit_status == 1


def test_an_adapter_without_any_gradient_is_dead_too() -> None:
    """Rewards were unequal and something else learned, such as embeddings: the adapter is cut off."""
    check = AdapterCheck()
    observe(check, 2, given=())
    with pytest.raises(AdapterError, match="every adapter"):
        observe(check, 1, given=())


def test_one_module_that_is_given_gradients_and_stays_is_named() -> None:
    """The others move."""
    check = AdapterCheck()
    observe(check, 2, moved=MODULES[:2])
    with pytest.raises(AdapterError, match=r"^1 adapter\(s\) had gradients in 3 updates .*: layers.1.experts\."):
        observe(check, 1, moved=MODULES[:2])


def test_a_module_that_is_given_no_gradient_may_stay() -> None:
    """Experts that no token was sent to; updates that bring a gradient are counted, whenever they come."""
    check = AdapterCheck()
    observe(check, 10, moved=MODULES[:2], given=MODULES[:2])
    observe(check, 2, moved=MODULES[:2])
    with pytest.raises(AdapterError, match="experts"):
        observe(check, 1, moved=MODULES[:2])


def test_what_has_moved_once_is_not_looked_at_again() -> None:
    """The smallest movement counts; afterwards the arrays need not even be there."""
    check = AdapterCheck()
    observe(check, 1, moved=MODULES)
    check.check({}, {})
    observe(check, 5)


def test_without_an_adapter_there_is_nothing_to_watch() -> None:
    """Full weights may be zero."""
    check = AdapterCheck()
    for _ in range(5):
        check.check({"layers.0.norm.bias": mx.zeros(3)}, {"layers.0.norm.bias": mx.ones(3)})


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_a_living_adapter_passes_with_every_optimizer(kind: str) -> None:
    """One step at the smallest rates is enough."""
    start, gradients = adapters(), {name: 1e-6 * mx.ones(a.shape) for name, a in adapters().items()}
    settings = learner_settings(optimizer=kind)
    state = initial_state(start, settings)
    after, _ = apply_step(start, gradients, state, learning_rate=1e-9, scale=1.0, settings=settings)
    check = AdapterCheck(patience=1)
    check.check(after, gradients)
