"""Limits on the number of operations of a decode step and of a micro-batch on the device path."""

from __future__ import annotations

import mlx.core as mx
import pytest

from bench.contenders.shapes import Shape, configuration, quantized_model
from bench.graph_counts import GraphCounts, count, decode_step, fused_operations
from bench.shapes import make_policy
from clotho.backend import Backend, backend
from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import Policy
from clotho.scoring import token_scores
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.model import Lora, PolicySection

pytestmark = pytest.mark.usefixtures("device_path")

LAYERS = 28
"""Depth of Qwen3-0.6B. The counts do not depend on the widths, which are small here."""

QWEN3_VOCABULARY = 151_936


def micro_batch(policy: Policy, *, sequences: int, prompt: int, completion: int) -> GraphCounts:
    """Count the operations of the gradient of one group's log-probabilities; nothing is evaluated.

    The prompt goes through the blocks once (layout "shared"). The operations of an objective, which do not depend on
    the model, are not counted.
    """
    group = [scored_only(tuple(range(prompt)), tuple(range(completion))) for _ in range(sequences)]
    (micro,) = build_micro_batches(group, layout="shared", budget=sequences * (prompt + completion))
    model = policy.copy_model()
    forcing = TeacherForcing(model.model, model.vocab_size, layout="shared")

    def loss(traced: Parameters) -> mx.array:
        model.use(traced)
        return mx.sum(forcing(micro, distribution=SamplingDistribution(1.0), logp_only=True).logp_N)

    own = nested(flat(policy.trainable()))
    with fused_operations(), model.training_mode():
        value, gradient = mx.value_and_grad(loss)(own)
        return count([value, *(array.astype(mx.float32) for array in flat(gradient).values())])


def test_this_module_computes_on_the_device_path() -> None:
    """As a Mac does."""
    assert type(backend()) is Backend


def make(*, vocabulary: int, layers: int = LAYERS, adapted: int = -1, grad_checkpoint: bool = False) -> Policy:
    """Return a policy with 4-bit weights, and with LoRA on the last `adapted` blocks."""
    shape = Shape(layers, width=128, heads=2, key_heads=1, feed_forward=128, vocabulary=vocabulary)
    section = PolicySection(method=Lora(num_layers=adapted), grad_checkpoint=grad_checkpoint)
    return make_policy(quantized_model(shape), configuration(shape), section=section)


def test_views_are_nodes_and_not_kernels() -> None:
    """A reshape and a slice start no kernel; a product starts one."""
    x = mx.zeros((4, 6))
    mx.eval(x)
    assert count([(x @ x.T)[:2]]) == GraphCounts(nodes=3, kernels=1)


def test_fused_operations_are_one_node_inside_the_context_only() -> None:
    """On the CPU, a norm consists of many operations."""
    x, weight = mx.ones((2, 8)), mx.ones((8,))
    mx.eval(x, weight)
    with fused_operations():
        assert count([mx.fast.rms_norm(x, weight, 1e-6)]) == GraphCounts(1, 1)
    assert count([mx.fast.rms_norm(x, weight, 1e-6)]).kernels > 3


def test_a_decode_step_with_lora_has_at_most_590_kernels() -> None:
    """With LoRA on every linear layer; the number of rows has no influence. mlx-lm needs 1,747 kernels, 3,037 nodes."""
    step = decode_step(make(vocabulary=1024), rows=4)
    assert step.kernels <= 590
    assert step.nodes <= 1340


def test_shared_prompts_cost_at_most_eleven_kernels_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A concatenation, which is one operation here, is two kernels on Metal."""
    monkeypatch.setattr("clotho.inference.cache_layout.MIN_SAVED_BYTES", {"cpu": 10**9})
    copied = decode_step(make(vocabulary=256, layers=2), rows=8)
    monkeypatch.setattr("clotho.inference.cache_layout.MIN_SAVED_BYTES", {"cpu": 1})
    shared = decode_step(make(vocabulary=256, layers=2), rows=8)
    assert 0 < shared.kernels - copied.kernels <= 2 * 10


def test_a_micro_batch_of_2048_tokens_has_at_most_9300_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four completions with LoRA on 16 of 28 blocks, checkpointed, with as many chunks of the head as in Qwen3.

    The layers of mlx-lm and chunks of 32 rows need 10,536 kernels.
    """
    monkeypatch.setattr("clotho.scoring.layouts.forward._difference", lambda *_: None)  # would compute
    rows = token_scores.rows_at_once(QWEN3_VOCABULARY)
    monkeypatch.setattr(token_scores, "rows_at_once", lambda _: rows)
    policy = make(vocabulary=1024, adapted=16, grad_checkpoint=True)
    counts = micro_batch(policy, sequences=4, prompt=128, completion=384)
    assert 8000 < counts.kernels <= 9300
