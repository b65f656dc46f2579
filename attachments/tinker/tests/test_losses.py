"""Tinker's losses against float64, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from attachments.tinker.bodies import LossData
from attachments.tinker.losses import LOSSES, REFUSED, checked_batch
from attachments.tinker.tests.tinker_server import Live, datum, logprobs_of, tinker_server
from clotho.serving.errors import ApiError
from tests import saved_models

SEQUENCES = ([3, 9, 12, 7, 20, 5, 9], [4, 4, 8, 40], [3, 30, 31, 32, 33, 34, 35, 36])
Floats = Any


def oracle(
    loss: str, logp: Floats, q: Floats, a: Floats, mask: Floats, config: Mapping[str, float]
) -> tuple[float, Floats]:
    """Return the loss of one sequence and its derivative by the log-probabilities, in float64."""
    ratio = np.exp(logp - q)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if loss == "cross_entropy":
        return -(a * logp).sum(), -a
    if loss == "importance_sampling":
        return -(ratio * a).sum(), -ratio * a
    if loss == "ppo":
        free, bounded = ratio * a, np.clip(ratio, low, high) * a
        return -np.minimum(free, bounded).sum(), np.where(free <= bounded, -ratio * a, 0.0)
    if loss == "cispo":
        weight = np.clip(ratio, low, high) * a
        return -(weight * logp).sum(), -weight
    if loss == "dro":
        beta = config.get("beta", 0.05)
        return -(a * logp - 0.5 * beta * (logp - q) ** 2).sum(), -a + beta * (logp - q)
    low, high = config.get("clip_low_threshold", 1 - 3e-4), config.get("clip_high_threshold", 1 + 4e-4)
    s = np.exp((mask * (logp - q)).sum() / mask.sum())
    free, bounded = s * a, np.clip(s, low, high) * a
    slope = (np.where(free <= bounded, -s * a, 0.0) * mask).sum() * mask / mask.sum()
    return -(np.minimum(free, bounded) * mask).sum(), slope


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model."""
    directory = tmp_path_factory.mktemp("losses")
    saved_models.save(directory / "model", dtype=mx.float32)
    return directory


@pytest.fixture(scope="module")
def live(place: Path) -> Iterator[Live]:
    """A server of all tests of the module."""
    with tinker_server(place / "model", place / "saved") as live:
        yield live


CASES: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}), ("importance_sampling", {}), ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}), ("cispo", {}), ("dro", {"beta": 0.3}),
    ("gspo", {}), ("gspo", {"clip_low_threshold": 0.2, "clip_high_threshold": 5.0}),
]  # fmt: skip


@pytest.mark.needs_float32("the differences are those of float32")
@pytest.mark.parametrize(("loss", "config"), CASES)
def test_a_loss_and_its_gradient_are_those_of_float64(
    live: Live, place: Path, loss: str, config: dict[str, float]
) -> None:
    """The gradient is that of a cross-entropy whose weights are the derivative of the loss by the log-probabilities."""
    client, random = live.client(), np.random.default_rng(7)
    model_id, twin = (client.model(str(place / "model"), seed=3) for _ in range(2))
    logps = [np.array(row) for row in logprobs_of(client.forward(model_id, [datum(one) for one in SEQUENCES]))]
    expected, given, surrogate = 0.0, [], []
    for tokens, logp in zip(SEQUENCES, logps, strict=True):
        q = np.float32(logp + random.normal(0, 0.3, logp.shape))
        a = np.float32(random.normal(0, 1, logp.shape))
        mask = np.ones(logp.shape)
        inputs: dict[str, Any] = {"weights": a} if loss == "cross_entropy" else {"logprobs": q, "advantages": a}
        if loss == "gspo":
            mask[0] = 0.0
            inputs["sequence_ratio_mask"] = mask
        value, slope = oracle(loss, logp, q.astype(float), a.astype(float), mask, config)
        expected += value
        given.append(datum(tokens, **{name: one.tolist() for name, one in inputs.items()}))
        surrogate.append(datum(tokens, weights=(-slope).tolist()))
    assert client.gradient(model_id, given, loss, **config)["metrics"]["loss:sum"] == pytest.approx(expected, rel=1e-5)
    client.gradient(twin, surrogate)
    client.gradient(twin, [datum(SEQUENCES[0], weights=[0.0] * 6)])
    norms = [client.step(one, learning_rate=1e-2)["grad_norm:max"] for one in (model_id, twin)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4, abs=1e-6)


def call(loss: str, tokens: tuple[int, ...] = (3, 4, 5), config: Mapping[str, Any] = {}, **inputs: Any) -> LossData:
    """Return a request whose targets are the next tokens, and 6."""
    arrays = {name: np.array(one) for name, one in {"target_tokens": [*tokens[1:], 6], **inputs}.items()}
    tensors = {
        name: {"data": array.ravel().tolist(), "dtype": "float32", "shape": array.shape}
        for name, array in arrays.items()
    }
    row = {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": tensors}
    return msgspec.convert({"data": [row], "loss_fn": loss, "loss_fn_config": config}, LossData)


RL: dict[str, Any] = {"logprobs": [0.0] * 3, "advantages": [0.0] * 3}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        *((call(name, **RL), "loss_fn") for name in (*REFUSED, "grpo")),
        (call("ppo", config={"clip": 0.2}, **RL), "loss_fn_config"),
        (call("ppo", config={"clip_low_threshold": 1.5}, **RL), "clip_low_threshold"),
        (call("dro", config={"beta": "x"}, **RL), "loss_fn_config"),
        (call("ppo"), "data[0].loss_fn_inputs"),
        (call("cross_entropy", weights=[1.0, 1.0]), "data[0].weights"),
        (call("cross_entropy", weights=[1.0, float("nan"), 1.0]), "data[0].weights"),
        (call("cross_entropy", mask=[1.0] * 3), "data[0].loss_fn_inputs"),
        (call("cross_entropy", target_tokens=[4, 9, 6]), "data[0].target_tokens"),
        (call("cross_entropy", target_tokens=[[4, 5], [5, 6], [6, 7]]), "data[0].target_tokens"),
        (call("cross_entropy", tokens=(3, 4, 500)), "data[0]"),
        (call("cross_entropy", tokens=()), "data[0]"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(given: LossData, param: str) -> None:
    """Before anything is computed: the client learns it from the request itself."""
    with pytest.raises(ApiError) as refusal:
        checked_batch(given, vocabulary=64, context=128)
    assert (refusal.value.status, refusal.value.body.error.param) == (400, param)


def test_all_losses_have_an_oracle() -> None:
    """A loss that is added here is tested."""
    assert {loss for loss, _ in CASES} == set(LOSSES)
