"""The CPU backend as the library calls it: which models are decoded in NumPy, and the prefill of their prompts.

MLX limits the operations that all threads together have queued, so a prompt that MLX prefills waits for the operations
of a learner. This prefill uses no MLX graph: it waits for nothing but the cores.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import structlog
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from numpy.typing import NDArray

from attachments.cpu import layers
from attachments.cpu.attention import VerifyAttention
from attachments.cpu.blocks import AttentionCache
from attachments.cpu.decoder import HostDecoder, StepCaches
from attachments.cpu.decoder_layers import as_numpy
from attachments.cpu.delta_layer import RowStates
from attachments.cpu.kv_cache import HostKVCache
from attachments.cpu.layers import MASKED_SCORE, CachedRoPE, ClosedFormLoRALinear, ClosedFormRMSNorm
from attachments.cpu.sampling import can_sample, sample_on_host
from clotho.backend import Backend
from clotho.inference.cache_layout import CacheLayout, pass_context
from clotho.inference.prefill import PrefillBatch, RowDecoder
from clotho.inference.rows import DraftedTokens, PrefilledPrompt, PromptState, RowParameters, RowSampler, undivided
from clotho.inference.scheduler import PrefillJob
from clotho.models.turns import UNDIVIDED, TurnBudget

log = structlog.get_logger(__name__)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Modules of mlx-lm whose models are decoded."""

PARTS = frozenset(f"mlx_lm.models.{name}" for name in (*ARCHITECTURES, "switch_layers"))
"""Modules of mlx-lm whose layers are known, as far as these models have them."""

LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Dropout, nn.RMSNorm, nn.RoPE),
    *(ClosedFormRMSNorm, CachedRoPE, LoRALinear, ClosedFormLoRALinear, LoRASwitchLinear),
)
"""Other layers that are known."""

TEST_TOKENS = (1, 2, 3, 1)
MAX_RELATIVE_DIFFERENCE = 1e-3
"""Largest difference of logits that counts as rounding: the ratio of its standard deviation to theirs."""


def make_host_decoder(model: nn.Module) -> HostDecoder | None:
    """Return a decoder in NumPy for the model; None for an unsupported model, or if the logits differ."""
    if not is_supported(model):
        return None
    decoder = HostDecoder(model)
    difference = _relative_difference(model, decoder)
    if difference <= MAX_RELATIVE_DIFFERENCE:
        return decoder
    log.warning("numpy_decoding_unavailable", reason="logits differ from those of MLX", difference=difference)
    return None


def is_supported(model: Any) -> bool:
    """Whether the model consists of known layers in float32, and its layers of attention attend to all tokens."""
    if type(model).__module__ not in {f"mlx_lm.models.{name}" for name in ARCHITECTURES}:
        return False
    caches = {type(cache) for cache in make_prompt_cache(model)}
    return KVCache in caches <= {KVCache, ArraysCache} and all(map(_is_known, model.modules()))


def _is_known(layer: Any) -> bool:
    if type(layer) not in LAYERS and type(layer).__module__ not in PARTS:
        return False
    arrays = [value for value in layer.values() if isinstance(value, mx.array)]
    return all(array.dtype == mx.float32 for array in arrays) and not getattr(layer, "traditional", False)


def _relative_difference(model: nn.Module, decoder: HostDecoder) -> float:
    """Return how much the logits after `TEST_TOKENS` differ from the model's, relative to their standard deviation."""
    *before, last = TEST_TOKENS
    state = CacheLayout(model).prefilled(before)
    expected_V = np.array(model(mx.array([TEST_TOKENS]))[0, -1])
    host_cache = HostKVCache(decoder, 1)
    prompt = PrefilledPrompt(rows=1, tokens=len(before), state=state, reserved=len(before) + 1)
    position_B, live_B = np.array([len(before)], np.int32), np.array([True])
    host_cache.make_room(position_B, ~live_B, [prompt])
    host_cache.enter([0], prompt)
    found_V = undivided(host_cache.parts(np.array([last], np.int32), position_B, live_B, divided=False))[0]
    finite_V = np.isfinite(expected_V)
    if not finite_V.any() or (np.isfinite(found_V) != finite_V).any():
        return np.inf
    expected_V, found_V = expected_V[finite_V], found_V[finite_V]
    return float(np.std(found_V - expected_V)) / max(float(np.std(expected_V)), 1e-30)


KEPT_ONCE = ("v_proj", "gate_proj", "up_proj", "w1", "w3")
"""Last part of the name of linear layers whose output is kept once for the backward pass."""


class CpuBackend(Backend):
    """Decodes and samples in NumPy, and trains with closed-form gradients; each where it applies, otherwise MLX."""

    chunk_logits = 2**20  # a chunk should stay in the cache of the processor
    chunk_rows = 32

    def compute_path(self, blas: str, *, decodes: bool) -> str:
        """Describe what computes in this process. decodes: whether rows are decoded in NumPy."""
        return f"host: {'NumPy/BLAS' if decodes else 'MLX'} decode, {blas}"

    def install_layers(self, model: nn.Module) -> None:
        """Replace gates, norms, rotations and LoRA layers."""
        layers.install_cpu_layers(model)

    def exp(self, x: mx.array) -> mx.array:
        """Return e^x as a power."""
        return layers.exp(x)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | str | None
    ) -> mx.array | None:
        """Compute attention in float32."""
        return layers.attend(queries, keys, values, scale=scale, mask=mask)

    def row_decoder(self, model: nn.Module) -> RowDecoder | None:
        """Decode a model of supported layers in NumPy."""
        decoder = make_host_decoder(model)
        if decoder is None:
            return None
        return RowDecoder(decoder.computing, partial(HostKVCache, decoder), partial(HostPrefillBatch, decoder))

    def row_sampler(self, parameters: RowParameters) -> RowSampler | None:
        """Sample in NumPy, except with a repetition penalty or alternatives."""
        return sample_on_host if can_sample(parameters) else None

    def folds_adapters(self, itemsize: int) -> bool:
        """Return False for float32, whose LoRA layers are those of `install_layers`."""
        return itemsize != mx.float32.size

    def keeps_once(self, layer: str, itemsize: int) -> bool:
        """Whether the gradients in closed form keep the output of a layer once."""
        return layer in KEPT_ONCE and itemsize == mx.float32.size


MAX_SCORES = 2**24
"""Maximum number of scores of a layer in one pass, as 64 MiB."""


class HostPrompts:
    """KV caches and states of prompts that are prefilled together. Each begins in the first column.

    Axes: B prompts, K key heads, C columns, D size, T tokens of a pass.
    """

    def __init__(self, decoder: HostDecoder, rows: int, tokens: int) -> None:
        """tokens: maximum number of tokens of a prompt."""
        self._decoder, self._rows, self._tokens = decoder, rows, tokens
        self._states = RowStates(decoder.state_shapes, rows)
        self._arrays = tuple(
            tuple(mx.array(np.zeros((rows, heads, tokens, size), np.float32)) for size in sizes)
            for heads, *sizes in decoder.column_shapes
        )
        self._layers = [(as_numpy(keys), as_numpy(values)) for keys, values in self._arrays]

    def restore(self, row: int, state: PromptState, tokens: int) -> None:
        """Begin a prompt with the first `tokens` tokens of a state, which has no more if it cannot be truncated."""
        attention, delta = self._decoder.divided(state)
        self._states.put([row], delta)
        for layer, arrays in zip(self._layers, attention, strict=True):
            for held_B_K_C_D, array in zip(layer, arrays, strict=True):
                held_B_K_C_D[row, :, :tokens] = as_numpy(array)[0, :, :tokens]

    def most(self, end: int) -> int:
        """Return how many tokens of every prompt a pass that ends before column `end` computes at most."""
        _, rows, repeats, _ = self._decoder.query_shape(self._rows)
        return max(1, MAX_SCORES // (self._decoder.key_shape[0] * rows * repeats * end))

    def parts(self, token_B_T: NDArray[np.int32], start: int) -> Generator[None, None, None]:
        """Append T tokens to the first `start` of every prompt.

        Yields when the adapters in use are known, one per token, and after every block. Until the end, the prompts have
        only the first tokens, so that the pass can begin again.
        """
        (B, T), decoder = token_B_T.shape, self._decoder
        stop = start + T
        index_T = np.arange(T)
        tokens = DraftedTokens(token_B_T.ravel(), np.repeat(np.arange(B), T), np.tile(index_T, B), np.full(B, T))
        mask_T_C = np.where(np.arange(stop) > start + index_T[:, None], np.float32(MASKED_SCORE), np.float32(0.0))
        attention = VerifyAttention(
            decoder.query_shape(B),
            tokens,
            shared=[],
            columns=stop,
            start_B=np.full(B, start),
            mask_B_T_S=mask_T_C[None],
        )
        views = [
            AttentionCache(keys[:, :, :stop].swapaxes(0, 1), values[:, :, :stop].swapaxes(0, 1), {})
            for keys, values in self._layers
        ]
        states = deepcopy(self._states)
        caches = StepCaches(attention, decoder.joined(views, states.layers))
        position_N = (start + tokens.index_N).astype(np.int32)
        yield from islice(decoder.parts(tokens.token_N, position_N, caches), 1 + decoder.depth)  # without the head
        self._states = states

    def state(self, row: int, tokens: int) -> PromptState:
        """Return the cache of the first `tokens` tokens of a prompt: a copy, unless that is all there is."""
        layers: Sequence[tuple[mx.array, ...]] = self._arrays
        if (self._rows, self._tokens) != (1, tokens):
            layers = [
                tuple(mx.array(np.ascontiguousarray(held[row : row + 1, :, :tokens])) for held in layer)
                for layer in self._layers
            ]
        return tuple(self._decoder.joined(layers, self._states.of(row)))


class HostPrefillBatch(PrefillBatch):
    """Prompts of clients that are prefilled on the host, which waits for no operation of a learner."""

    on_host = True

    def __init__(
        self,
        decoder: HostDecoder,
        layout: CacheLayout,
        jobs: Sequence[PrefillJob],
        turns: TurnBudget | None,
        version: int,
    ) -> None:
        self._decoder, self._count = decoder, 0
        super().__init__(layout, jobs, turns, version, computing=decoder.computing)

    def _restore(self) -> None:
        """Begin with what all jobs have computed."""
        self._caches = HostPrompts(self._decoder, len(self.jobs), self._length)
        for row, job in enumerate(self.jobs):
            if self._done and job.state is not None:
                self._caches.restore(row, job.state, self._done)

    def _most(self, budget: int) -> int:
        """Return how many tokens of each prompt the next chunk has at most."""
        return min(super()._most(budget), self._caches.most(self._length))

    def weights_changed(self, kinds: Collection[int]) -> None:
        """Record a swap of these kinds of weights. A chunk in progress begins again, so that it has those of one."""
        super().weights_changed(kinds)
        if self._parts is not None and any(key[0] in kinds for key in self.keys):
            self._parts = None
            self._done -= self._count

    def _start(self, count: int) -> None:
        parts = self._caches.parts(self._token_B_T[:, self._done : self._done + count], self._done)
        with pass_context(self._computing, [job.active.adapter for job in self.jobs for _ in range(count)]):
            next(parts)
        self._done += count
        self._count, self._parts = count, (self._turns or UNDIVIDED).limited(parts)

    def finish(self) -> None:
        """Set the state of each job."""
        for row, job in enumerate(self.jobs):
            tokens = len(job.tokens) - 1
            job.computed, job.state_tokens, job.state = True, tokens, self._caches.state(row, tokens)
