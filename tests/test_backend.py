"""What computes: MLX, unless an attachment offers another backend."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from bench.contenders.shapes import Shape, configuration, random_model
from bench.shapes import make_policy
from clotho.backend import Backend, backend, backend_of
from clotho.extension import Door
from clotho.inference.engine import DecodeEngine
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.settings.engine import EngineSection
from clotho.settings.model import PolicySection
from protocols.sampling import Completion, Sampling
from tests import model_lanes
from tests.inference.engine_helpers import make_prompt, run, submit_request
from tests.training.policies_and_groups import largest_difference, learner, same_bits, scored_group


def test_a_process_has_one_backend_per_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call returns the same object, which keeps what was chosen; another device may have another one."""
    on_cpu = backend()
    assert all(backend() is on_cpu for _ in range(3))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert type(backend()) is Backend
    monkeypatch.undo()
    assert backend() is on_cpu


class Step(NamedTuple):
    """What one sample and one update give."""

    policy: Policy
    completions: list[Completion]
    updated: Parameters


def step() -> Step:
    """Sample four completions of a tiny policy in float32, and train on them."""
    shape = Shape(layers=2, width=32, heads=4, key_heads=2, feed_forward=48, vocabulary=300)
    policy = make_policy(random_model(shape), configuration(shape), section=PolicySection())
    engine = DecodeEngine(policy, EngineSection())
    answer = submit_request(engine, make_prompt(6), Sampling(max_tokens=12, ignore_eos=True), range(4))
    run(engine)
    group = scored_group([one.tokens for one in answer.completions], (0.0, 1.0, 0.0, 1.0), prompt=make_prompt(6))
    return Step(policy, answer.completions, learner(policy, optimizer="sgd").update([group]).parameters)


def test_without_an_offer_of_attachments_mlx_samples_and_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """With layers of its own and of mlx-lm only; results are those of the switch that turns other backends off."""
    with model_lanes.device_path():
        switched_off = step()
    monkeypatch.setattr("clotho.backend.BACKEND", Door("library.no_such_door"))
    backend_of.cache_clear()
    try:
        assert type(backend()) is Backend
        alone = step()
    finally:
        backend_of.cache_clear()
    assert not any(type(module).__module__.startswith("attachments") for module in alone.policy.model.modules())
    assert alone.completions == switched_off.completions
    assert same_bits(alone.updated, switched_off.updated)


@pytest.mark.needs_cpu_path
def test_another_backend_gives_the_same_results_up_to_rounding() -> None:
    """The same tokens, log-probabilities and weights."""
    other = step()
    with model_lanes.device_path():
        mlx = step()
    assert [one.tokens for one in other.completions] == [one.tokens for one in mlx.completions]
    for one, expected in zip(other.completions, mlx.completions, strict=True):
        np.testing.assert_allclose(one.logprobs, expected.logprobs, atol=1e-4)
    assert largest_difference(other.updated, mlx.updated) < 1e-6
    assert largest_difference(other.updated, other.policy.trainable()) > 1e-4
