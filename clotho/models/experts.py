"""Mixtures of experts: how many experts compute a token, which layers choose them, and what was chosen in a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from clotho.models.head import Blocks
from clotho.models.loading import setting
from clotho.models.module_calls import called, with_classes

EXPERT_LINEAR = (SwitchLinear, QuantizedSwitchLinear)
"""The linear layers of all experts of a mixture."""

EXPERTS = (SwitchGLU, SwitchMLP)
"""The experts of a mixture, which are called with a token and the numbers of its experts."""

PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk")

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of routers, or of the modules that contain them, in mlx-lm's models."""

Choices = Any
"""The numbers of the experts of each token, (..., chosen), of MLX or NumPy."""


def experts_per_token(config: Mapping[str, Any]) -> int:
    """Return the number of experts per token that a configuration states; 1 if it states none."""
    return setting(dict(config), PER_TOKEN) or 1


def configuration_of(model: nn.Module) -> Mapping[str, Any]:
    """Return the configuration that a model of mlx-lm keeps; empty if it keeps none."""
    return vars(model.args) if hasattr(model, "args") else {}


def router_names(layers: Mapping[str, nn.Module]) -> set[str]:
    """Return the linear layers that choose experts or weight them, of the layers of blocks by name.

    They are named as routers are, and have one output per expert, or one for experts that all tokens share.
    """
    outputs = {layer.num_experts for layer in layers.values() if isinstance(layer, EXPERT_LINEAR)}
    return {
        name
        for name, layer in layers.items()
        if outputs
        and ROUTERS.intersection(name.split("."))
        and isinstance(layer, (nn.Linear, nn.QuantizedLinear))
        and layer.weight.shape[0] in outputs | {1}
    }


class Mixtures:
    """The experts of a model, by layer: they record what was chosen."""

    def __init__(self, model: nn.Module) -> None:
        """Find the experts; there are none in most models."""
        self._experts = [module for module in model.modules() if isinstance(module, EXPERTS)]
        self.counts = [_first_layer(module).num_experts for module in self._experts]
        self._model = model

    def __bool__(self) -> bool:
        """Whether the model has experts."""
        return bool(self._experts)

    @cached_property
    def per_token(self) -> list[int]:
        """Number of experts that compute a token, by layer, as a pass over one token that is not evaluated shows."""
        with self.recorded() as chosen:
            self._model(mx.zeros((1, 1), dtype=mx.int32))
        return [choices.shape[-1] for choices in chosen]

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the number of an expert: one byte if there are at most 256 in a layer."""
        return mx.uint8 if max(self.counts, default=0) <= 256 else mx.uint16

    @property
    def route_bytes(self) -> int:
        """Bytes of the route of a token: of the numbers of all experts that compute it."""
        return sum(self.per_token) * self.dtype.size

    def routes(self, chosen: Sequence[mx.array]) -> mx.array:
        """Return what was chosen in a pass over tokens (B, T) as routes, (B, T, C): C choices, layer by layer."""
        B, T = chosen[0].shape[:2]
        return mx.concatenate([choices.reshape(B, T, -1) for choices in chosen], axis=-1).astype(self.dtype)

    @contextmanager
    def recorded(self) -> Iterator[list[Choices]]:
        """Record the choices of every mixture that computes inside the context, in the order of the computation."""
        chosen: list[Choices] = []
        token = _recording.set(chosen)
        try:
            with with_classes(self._experts, lambda cls: _recording_class(cls)):
                yield chosen
        finally:
            _recording.reset(token)


_recording: ContextVar[list[Choices] | None] = ContextVar("choices of experts", default=None)


def record_choices(choices: Choices) -> None:
    """Record the experts of the tokens of one layer, if a caller records them."""
    chosen = _recording.get()
    if chosen is not None:
        chosen.append(choices)


@cache
def _recording_class(cls: type[Any]) -> type[Any]:
    def call(module: nn.Module, x: mx.array, indices: mx.array) -> Any:
        record_choices(indices)
        return cls.__call__(module, x, indices)

    return called(cls, call)


def _first_layer(experts: nn.Module) -> Any:
    """Return a linear layer of the experts."""
    return next(module for module in experts.modules() if isinstance(module, EXPERT_LINEAR))


def expert_load(choices_N_C: mx.array, counts: Sequence[int], weight_N: mx.array) -> mx.array:
    """Return the weight of the tokens that each expert computes, for all layers, then the weight of all tokens.

    choices_N_C: numbers of the experts of each token, for one layer after another. counts: number of experts per layer.
    The result is float32, without gradient.
    """
    loads = [
        mx.zeros(count).at[chosen_N_K].add(mx.broadcast_to(weight_N[:, None], chosen_N_K.shape))
        for chosen_N_K, count in zip(mx.split(choices_N_C, len(counts), axis=-1), counts, strict=True)
    ]
    return mx.stop_gradient(mx.concatenate([*loads, mx.sum(weight_N)[None]]))


def recorded_passes(chosen: Sequence[mx.array], layers: int) -> Blocks:
    """Return what computes passes in a second walk through a layout: choices in place of hidden states.

    The choices, (B, S, layers * chosen) of each pass, are then in the order of the hidden states. chosen: of all layers
    with experts, pass by pass. layers: their number.
    """
    passes = iter([mx.concatenate(list(chosen[i : i + layers]), axis=-1) for i in range(0, len(chosen), layers)])

    def recorded(tokens_B_S: mx.array, _: object = None) -> mx.array:
        return next(passes).reshape(*tokens_B_S.shape, -1)

    return recorded
