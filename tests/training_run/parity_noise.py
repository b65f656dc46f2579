"""Measures rounding by type, and prints tables of docs/numerics-internals.md.

    CLOTHO_CPU_KERNELS=0 python -m tests.training_run.parity_noise [--probes 20]      sampler and learner
    CLOTHO_CPU_KERNELS=0 python -m tests.training_run.parity_noise --gradients        gradients
    CLOTHO_CPU_KERNELS=0 python -m tests.training_run.parity_noise --exported         mlx-lm with the same adapter

Decode steps have emulated split-K products.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.utils import load_model

from clotho.inference.engine import DecodeEngine
from clotho.models.folded_lora import FoldedLoRALinear
from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import Policy
from clotho.models.tokenizer import ChatTokenizer
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.engine import EngineSection
from clotho.settings.model import PolicySection
from tests.small_models import byte_tokenizer, tiny
from tests.split_k import split_k
from tests.training_run.checked_parity import checked
from training_run.parity_check import ParityReport, ParitySample

VARIANTS = (
    ("bfloat16", 0, False), ("bfloat16", 0, True), ("bfloat16", 4, False), ("bfloat16", 4, True), ("float16", 0, False),
    ("float16", 4, False), ("float32", 0, False),
)  # fmt: skip
"""Type, number of bits, and whether the output head is computed in float32."""

PRECISIONS = (("float32", 0), ("float16", 0), ("float16", 4), ("bfloat16", 0), ("bfloat16", 4))
"""Type that the model computes in, and number of bits of its weights; 0 = not quantized."""

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "tie_word_embeddings": True, "vocab_size": 512,
}  # fmt: skip

ADAPTER = 0.02
"""Standard deviation of the B matrices."""


def deep_policy(dtype: str, bits: int, *, layers: int, seed: int = 0, exact: bool = False) -> Policy:
    """Return a policy of small widths with head size 64, groups of 64 and adapters that are not zero.

    exact: compute with the same weights in float32.
    """
    model = tiny("qwen3", seed=seed, **SHAPE, num_hidden_layers=layers)
    model.set_dtype(getattr(mx, dtype))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    if exact:
        model.set_dtype(mx.float32)
    config = {"model_type": "qwen3", **SHAPE, "num_hidden_layers": layers, "max_position_embeddings": 512}
    policy = Policy(model, byte_tokenizer(), PolicySection(), config=config, seed=seed, keep_reference=False)
    publish_adapter(policy, seed=seed)
    return policy


def publish_adapter(policy: Policy, *, seed: int) -> dict[str, mx.array]:
    """Publish the next version, with other B matrices; return its parameters."""
    mx.random.seed(1000 + seed)
    moved = {
        name: mx.random.normal(array.shape) * ADAPTER if "lora_b" in name else array
        for name, array in flat(policy.trainable()).items()
    }
    mx.eval(moved)
    policy.publish(nested(moved), version=policy.version + 1, step=policy.step + 1, fingerprint=f"adapter {seed}")
    return moved


def embedded_policy(dtype: str, bits: int) -> Policy:
    """Return the embedded policy, converted, with an adapter that is not zero."""
    directory = Path(__file__).parents[2] / "profiles" / "embedded"
    model, config = load_model(directory)
    model.set_dtype(getattr(mx, dtype))
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    tokenizer = ChatTokenizer.from_files(directory)
    policy = Policy(model, tokenizer, PolicySection(), config=config, seed=0, keep_reference=False)
    publish_adapter(policy, seed=0)
    return policy


def random_sample(vocab_size: int, *, completions: int = 8, steps: int = 4, seed: int = 0) -> ParitySample:
    """Return random tokens: completions of one prompt of 16 tokens."""
    token = np.random.default_rng(seed).integers(3, vocab_size, size=16 + completions * steps)
    rows = token[16:].reshape(completions, steps)
    return ParitySample(tuple(map(int, token[:16])), tuple(tuple(map(int, row)) for row in rows))


def engine_of(policy: Policy) -> DecodeEngine:
    """Return an engine of the policy."""
    return DecodeEngine(policy, EngineSection())


def reports(dtype: str, bits: int, *, layers: int, probes: int, float32_head: bool = False) -> Iterator[ParityReport]:
    """Run parity checks of 32 rows with split-K products, with another adapter and other tokens in each."""
    policy = deep_policy(dtype, bits, layers=layers)
    engine = engine_of(policy)
    with split_k(), head_in_float32() if float32_head else nullcontext():
        for probe in range(probes):
            publish_adapter(policy, seed=probe)
            sample = random_sample(policy.vocab_size, seed=probe)
            yield checked(policy, engine, sample, rows=32, layout="auto")


@contextmanager
def head_in_float32() -> Iterator[None]:
    """Compute tied output heads, quantized or not, in float32."""
    plain: Any = nn.Embedding.as_linear

    def dense(layer: Any, x: mx.array) -> mx.array:
        logits: mx.array = plain(layer, x.astype(mx.float32))
        return logits

    def quantized(layer: Any, x: mx.array) -> mx.array:
        scales, biases = layer["scales"].astype(mx.float32), layer["biases"].astype(mx.float32)
        packing = {"group_size": layer.group_size, "bits": layer.bits}
        return mx.quantized_matmul(x.astype(mx.float32), layer["weight"], scales, biases, transpose=True, **packing)

    with (
        mock.patch.object(nn.Embedding, "as_linear", dense),
        mock.patch.object(nn.QuantizedEmbedding, "as_linear", quantized),
    ):
        yield


def logp_gradient(policy: Policy, sample: ParitySample, weight: float) -> dict[str, mx.array]:
    """Return the gradient of weighted log-probabilities, whose weights alternate in sign as advantages do."""
    model = policy.copy_model()
    forcing = TeacherForcing(model.model, model.vocab_size, layout="shared")
    (micro,) = build_micro_batches(
        [scored_only(sample.prompt, one) for one in sample.completions], layout="shared", budget=10**6
    )
    sign_N = mx.array(1.0 - 2.0 * (micro.table.sequence_N % 2))

    def loss(traced: Parameters) -> mx.array:
        model.use(traced)
        scores = forcing(micro, distribution=SamplingDistribution(temperature=1.0), logp_only=True)
        return mx.sum(scores.logp_N * sign_N) * weight

    with model.training_mode():
        gradient = flat(mx.grad(loss)(nested(flat(policy.trainable()))))
    mx.eval(gradient)
    return gradient


def gradient_error(dtype: str, bits: int, *, layers: int, weight: float) -> tuple[float, float]:
    """Return the relative error of a gradient against float32, and the fraction of its values that became zero."""
    sample = random_sample(SHAPE["vocab_size"], completions=8, steps=32)
    rounded, exact = (
        logp_gradient(deep_policy(dtype, bits, layers=layers, exact=exact), sample, weight) for exact in (False, True)
    )
    rounded_P, exact_P = (
        np.concatenate([np.array(gradient[name]).ravel() for name in sorted(exact)]) for gradient in (rounded, exact)
    )
    error = np.linalg.norm(rounded_P - exact_P) / np.linalg.norm(exact_P)
    return float(error), float(np.mean((rounded_P == 0) & (exact_P != 0)))


def exported_difference(dtype: str, bits: int, *, layers: int) -> float:
    """Return the mean difference of a log-probability if mlx-lm's layers compute with the same adapter."""
    policy = deep_policy(dtype, bits, layers=layers)
    sample = random_sample(policy.vocab_size, completions=8, steps=32)
    tokens = mx.array([[*sample.prompt, *one] for one in sample.completions])

    def logprobs() -> mx.array:
        logits = policy.model(tokens)[:, len(sample.prompt) - 1 : -1].astype(mx.float32)
        logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.take_along_axis(logp, mx.array(sample.completions)[..., None], axis=-1)

    with split_k():
        folded = logprobs()
        mx.eval(folded)
        kinds: dict[type, type] = {FoldedLoRALinear: LoRALinear}
        modules: list[Any] = policy.model.modules()
        for module in modules:
            module.__class__ = kinds.get(type(module), type(module))
        exported = logprobs()
        mx.eval(exported)
    return float(np.abs(np.array(folded) - np.array(exported)).mean())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=20)
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--exported", action="store_true")
    chosen = parser.parse_args()
    if chosen.gradients:
        rows = gradient_rows()
    elif chosen.exported:
        rows = exported_rows()
    else:
        rows = noise_rows(chosen.probes)
    for row in rows:
        sys.stdout.write("| " + " | ".join(row) + " |\n")
        sys.stdout.flush()


def noise_rows(probes: int) -> Iterator[Sequence[str]]:
    """Yield the table of sampler and learner."""
    yield "type", "layers", "mean KL, median", "mean KL, largest", "one log-probability, largest"
    yield "---", "---:", "---:", "---:", "---:"
    for dtype, bits, float32_head in VARIANTS:
        for layers in (3, 28):
            found = list(reports(dtype, bits, layers=layers, probes=probes, float32_head=float32_head))
            kl = [report.mean_kl for report in found]
            largest = max(report.max_difference for report in found)
            name = _name(dtype, bits) + (", head in float32" if float32_head else "")
            yield name, str(layers), f"{np.median(kl):.1e}", f"{max(kl):.1e}", f"{largest:.2g}"


def gradient_rows() -> Iterator[Sequence[str]]:
    """Yield the table of gradients, for loss weights of an update with 2,048 and 65,536 tokens."""
    yield "type", "layers", "tokens per update", "relative error of the gradient", "values that became zero"
    yield "---", "---:", "---:", "---:", "---:"
    for dtype, bits in PRECISIONS[1:]:
        for layers in (3, 28):
            for tokens in (2048, 65_536):
                error, zeros = gradient_error(dtype, bits, layers=layers, weight=1 / tokens)
                yield _name(dtype, bits), str(layers), f"{tokens:,}", f"{error:.1%}", f"{zeros:.2%}"


def exported_rows() -> Iterator[Sequence[str]]:
    """Yield the table of mlx-lm with the same adapter."""
    yield "type", "layers", "mean difference of a log-probability"
    yield "---", "---:", "---:"
    for dtype, bits in PRECISIONS[1:]:
        for layers in (3, 28):
            yield _name(dtype, bits), str(layers), f"{exported_difference(dtype, bits, layers=layers):.2g}"


def _name(dtype: str, bits: int) -> str:
    return f"{dtype}, {bits} bits" if bits else dtype


if __name__ == "__main__":
    main()
