"""The engine with a LoRA adapter on the device path: its log-probabilities are those of the learner and of mlx-lm."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from bench.contenders.shapes import Shape, configuration
from bench.shapes import make_policy
from clotho.backend import Backend, backend
from clotho.inference.engine import DecodeEngine
from clotho.models.lora import install_adapter
from clotho.models.parameters import flat, nested
from clotho.models.policy import Policy
from clotho.settings.engine import EngineSection
from clotho.settings.model import Lora, PolicySection
from tests.inference.engine_helpers import GREEDY, SAMPLED, RecordedEvents, base_model, run, submit_request

pytestmark = [pytest.mark.usefixtures("device_path"), pytest.mark.needs_float32]

SHAPE = Shape(layers=2, width=128, heads=2, key_heads=1, feed_forward=128, vocabulary=64)
"""Heads of size 64, as in fused attention kernels, and quantization groups of 64."""

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
MISMATCH = {"float32": 1e-5, "bfloat16": 0.05, "4 bits": 0.05}
"""Largest mean absolute difference of log-probabilities, in nats."""


def test_this_module_computes_on_the_device_path() -> None:
    """As a Mac does; the host path has no folded layers."""
    assert type(backend()) is Backend


def adapted_policy(precision: str) -> Policy:
    """Return a policy whose adapter changes the logits."""
    policy = make_policy(base_model(SHAPE, precision), configuration(SHAPE), section=PolicySection(method=Lora()))
    mx.random.seed(1)
    moved = tree_map(lambda array: array + 0.02 * mx.random.normal(array.shape), policy.trainable())
    mx.eval(moved)
    policy.publish(moved, version=1, step=1, fingerprint="1")
    return policy


def forced_logprobs(model: nn.Module, tokens: tuple[int, ...]) -> np.ndarray:
    """Return log-probabilities of a completion from one pass over the whole sequence."""
    logits_T_V = model(mx.array([[*PROMPT, *tokens]]))[0, len(PROMPT) - 1 : -1].astype(mx.float32)
    logp_T_V = logits_T_V - mx.logsumexp(logits_T_V, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(logp_T_V, mx.array(tokens)[:, None], axis=-1)[:, 0])


@pytest.mark.parametrize("precision", MISMATCH)
def test_sampled_and_greedy_log_probabilities_equal_those_of_mlx_lm(precision: str) -> None:
    """For the same tokens: rows of the engine, and one pass of mlx-lm's own LoRA layers with the same weights."""
    policy = adapted_policy(precision)
    usual = base_model(SHAPE, precision)
    install_adapter(usual, Lora(), seed=0)
    usual.update(nested(flat(policy.trainable())))
    engine = DecodeEngine(policy, EngineSection())
    answers: list[RecordedEvents] = [
        submit_request(engine, PROMPT, SAMPLED, seeds=range(4)),
        submit_request(engine, PROMPT, GREEDY),
    ]
    run(engine)
    completions = [completion for answer in answers for completion in answer.completions]
    assert len(completions) == 5
    for completion in completions:
        for model in (policy.model, usual):
            difference_T = np.abs(np.array(completion.logprobs) - forced_logprobs(model, completion.tokens))
            assert difference_T.mean() < MISMATCH[precision]


@pytest.mark.parametrize("precision", MISMATCH)
def test_the_engine_samples_with_the_weights_of_the_last_swap(precision: str) -> None:
    """A swap between two decode steps changes the log-probabilities of the next token."""
    policy = adapted_policy(precision)
    engine = DecodeEngine(policy, EngineSection())
    answer = submit_request(engine, PROMPT, GREEDY)
    for _ in range(4):
        engine.tick()
    changed = tree_map(lambda array: array * 3.0, policy.trainable())
    mx.eval(changed)
    policy.publish(changed, version=2, step=2, fingerprint="2")
    engine.weights_changed("recompute")
    run(engine)
    (completion,) = answer.completions
    difference_T = np.abs(np.array(completion.logprobs) - forced_logprobs(policy.model, completion.tokens))
    versions = np.array(completion.versions)
    assert set(versions) == {1, 2}
    assert difference_T[versions == 2].mean() < MISMATCH[precision]
    assert difference_T[versions == 1].mean() > difference_T[versions == 2].mean()
