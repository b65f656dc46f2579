"""How close a merged model is to its base model with the adapter, on the tokens of given prompts.

Models are read lazily and evaluated block by block; the weights of a block leave the memory after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from msgspec import Struct, structs

from attachments.files.merging import Change
from clotho.models.experts import EXPERT_LINEAR
from clotho.models.loading import find_model, open_base
from clotho.models.stages import recorded_stages
from clotho.settings.model import ModelSection
from training_run.adapters.contents import Adapter
from training_run.adapters.formats import TENSORS_OF

LEAST_KL = 1e-7
"""A mean KL divergence below this is rounding of float32."""


class Fidelity(Struct, frozen=True, kw_only=True):
    """The distributions of the merged model and of the base model, compared with those of base model plus adapter.

    prompts, tokens: number of prompts and of their positions. greedy_agreement: share of positions at which the merged
    model has the same most likely token. mean_kl: mean KL divergence of the merged model from base model plus adapter,
    in nats per token. adapter_kl: the same for the base model, which is what the adapter changes.
    weights: the rounding of the changed weights.
    """

    prompts: int
    tokens: int
    greedy_agreement: float
    mean_kl: float
    adapter_kl: float
    weights: Change

    @property
    def keeps_change(self) -> bool:
        """Whether the merged model is closer to base model plus adapter than half of what the adapter changes.

        If the adapter changes nothing on the prompts, its rounding error must be smaller than its weights.
        """
        if self.adapter_kl < LEAST_KL and self.mean_kl < LEAST_KL:
            return self.weights.relative_error < 1.0
        return self.mean_kl <= self.adapter_kl / 2


def compare(
    prompts: Sequence[Sequence[int]],
    *,
    base: ModelSection,
    merged: Path,
    adapter: Adapter,
    weights: Change,
) -> Fidelity:
    """Compare the models in float32 on all tokens of the prompts. merged: directory of the merged model."""
    base_files, merged_section = find_model(base.path), ModelSection(path=str(merged))
    longest = max(map(len, prompts))
    tokens_B_S = mx.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    kept = [row * longest + column for row, prompt in enumerate(prompts) for column in range(len(prompt))]
    position_N = mx.array(kept)

    def log_probabilities(build: Callable[[], nn.Module]) -> mx.array:
        return streamed_log_probabilities(build, tokens_B_S, position_N)

    with_adapter_N_V = log_probabilities(lambda: attached(_in_float32(base_files, base), adapter))
    base_kl, _ = _distance(with_adapter_N_V, log_probabilities(lambda: _in_float32(base_files, base)))
    found_N_V = log_probabilities(lambda: _in_float32(merged, merged_section))
    merged_kl, agreement = _distance(with_adapter_N_V, found_N_V)
    return Fidelity(
        prompts=len(prompts),
        tokens=len(kept),
        greedy_agreement=agreement,
        mean_kl=merged_kl,
        adapter_kl=base_kl,
        weights=weights,
    )


def _in_float32(files: Path, section: ModelSection) -> nn.Module:
    """Build a model whose weights are not evaluated."""
    return open_base(files, structs.replace(section, dtype="float32"))[0]


def _distance(expected_N_V: mx.array, found_N_V: mx.array) -> tuple[float, float]:
    """Return the mean KL divergence of `found` from `expected`, and the share of equal most likely tokens."""
    kl_N = (mx.exp(expected_N_V) * (expected_N_V - found_N_V)).sum(axis=-1)
    same_N = expected_N_V.argmax(axis=-1) == found_N_V.argmax(axis=-1)
    kl, same = np.array(kl_N, np.float64), np.array(same_N)
    return max(0.0, float(kl.mean())), float(same.mean())


def streamed_log_probabilities(build: Callable[[], nn.Module], tokens_B_S: mx.array, position_N: mx.array) -> mx.array:
    """Return log-probabilities (N, V) at positions of the flattened tokens, evaluated block by block."""
    model: Any = build()
    with recorded_stages(model.layers, gradients=False) as stages:
        logits_B_S_V = model(tokens_B_S)
    logits_N_V: mx.array = logits_B_S_V.reshape(-1, logits_B_S_V.shape[-1])[position_N].astype(mx.float32)
    del model, logits_B_S_V
    pending = stages.take()
    while pending:
        mx.eval(pending.pop(0).arrays)
        mx.clear_cache()
    logp_N_V = logits_N_V - mx.logsumexp(logits_N_V, axis=-1, keepdims=True)
    mx.eval(logp_N_V)
    return logp_N_V


def attached(model: nn.Module, adapter: Adapter) -> nn.Module:
    """Return the model with mlx-lm's layers for the adapter; nothing is evaluated."""
    model.update(tree_unflatten([(name, mx.array(values)) for name, values in adapter.weights.items()]))
    modules = dict(model.named_modules())
    layers = [(name, _layer(modules[name], adapter, name)) for name in adapter.ranks]
    model.update_modules(tree_unflatten(layers))
    model.eval()
    return model


def _layer(module: nn.Module, adapter: Adapter, name: str) -> nn.Module:
    """Return mlx-lm's layer with an adapter over a linear layer, the layer of experts or an embedding."""
    kind: Any = DoRALinear if adapter.method == "dora" else LoRALinear
    if isinstance(module, EXPERT_LINEAR):
        kind = LoRASwitchLinear
    elif isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
        kind = LoRAEmbedding
    layer: nn.Module = kind.from_base(module, r=adapter.ranks[name], scale=adapter.scales[name])
    layer.update({key: mx.array(adapter.arrays[f"{name}.{key}"]) for key in TENSORS_OF[adapter.method]})
    return layer
