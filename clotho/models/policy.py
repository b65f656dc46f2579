"""The policy: one set of base weights, with the trainable weights that are served and trained.

It belongs to the compute thread. Parameters change by reference: nothing is copied, and arrays are never modified.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from msgspec.structs import replace

from clotho.config.schema import FullMethod, ModelSection, PolicySection, QuantizeAtLoad
from clotho.cpu.layers import install_cpu_layers
from clotho.models.folded_lora import FoldedAdapter
from clotho.models.gradient_checkpoint import checkpointed_blocks
from clotho.models.loading import context_length, describe_model, load_base
from clotho.models.lora import AdaptedModule, fused_weights, install_adapter, open_all_weights
from clotho.models.model_files import one_line
from clotho.models.parameters import Parameters, ParameterSlots, fingerprint, flat, nested
from clotho.models.quantization import quantization_of
from clotho.models.tokenizer import ChatTokenizer
from protocols.checkpoint import AdapterConfig, BaseQuantization
from protocols.errors import ClothoError, ModelError
from protocols.summary import PolicyDescription

__all__ = ["Parameters", "Policy", "TrainablePolicy", "load_policy"]


def load_policy(model: ModelSection, policy: PolicySection, *, seed: int, keep_reference: bool) -> Policy:
    """Load base model and tokenizer and create the policy, in the compute thread, whose random state it seeds.

    keep_reference: keep the initial values of weights that are trained in full, which `reference()` needs; an adapter
    needs none. Raises `ModelError` if the model cannot be loaded or does not support the settings in `policy`.
    """
    base, config, files = load_base(model)
    tokenizer = ChatTokenizer.of_model(files, model)
    try:
        return Policy(
            base,
            tokenizer,
            policy,
            config=config,
            seed=seed,
            keep_reference=keep_reference,
            base_path=model.path,
            base_quantization=quantization_of(model.quantize) if isinstance(model.quantize, QuantizeAtLoad) else None,
            files=files,
        )
    except ClothoError:
        raise
    except Exception as error:  # shapes and settings of a foreign model can fail anywhere in its code
        raise ModelError(f"model {model.path} cannot be used: {type(error).__name__}: {one_line(error)}") from error


class TrainablePolicy(Protocol):
    """The part of `Policy` that scoring and training use."""

    model: nn.Module
    version: int
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Number of logits."""

    def trainable(self) -> Parameters:
        """Return the tree of the served trainable parameters."""

    def using(self, parameters: Parameters) -> AbstractContextManager[None]:
        """Compute with these parameters inside the context; contexts nest."""

    def reference(self) -> AbstractContextManager[None]:
        """Compute as the initial policy inside the context."""

    def training_mode(self) -> AbstractContextManager[None]:
        """Prepare the model for gradients inside the context."""


class Policy:
    """The model with its trainable parameters, and the version that is served.

    model: computes with the served parameters, except inside `using` and `reference`.
    version, step, fingerprint: of the served parameters; initially 0, 0 and that of the initial weights.
    files: directory or GGUF file of base model and tokenizer, also for models of the hub.
    adapter_config: settings with which mlx-lm rebuilds the trained layers from a file.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: ChatTokenizer,
        section: PolicySection,
        *,
        config: dict[str, Any],
        seed: int,
        keep_reference: bool,
        base_path: str = "",
        base_quantization: BaseQuantization | None = None,
        files: Path | None = None,
    ) -> None:
        """Make the parameters of the method trainable in `model`, whose mlx-lm configuration is `config`.

        base_path, base_quantization: the base model, as the adapter's file describes it.
        files: directory or GGUF file of that model.
        """
        adapted: tuple[AdaptedModule, ...] = ()
        if isinstance(section.method, FullMethod):
            adapter_config = open_all_weights(model)
            mx.random.seed(seed)
        else:
            adapter_config, adapted = install_adapter(model, section.method, seed=seed)
        install_cpu_layers(model)
        self.model = model
        self.files = files
        self.tokenizer = tokenizer
        self.grad_checkpoint = section.grad_checkpoint
        self.adapter_config = replace(adapter_config, model=base_path, base_quantization=base_quantization)
        self.description: PolicyDescription = describe_model(model, config)
        self.vocab_size = self.description.vocab_size
        self.context_length = context_length(config)
        self._adapted = adapted
        self._slots = ParameterSlots(model)
        self._served = self._slots.current()
        if not self._served:
            raise ModelError("this model has no trainable parameters")
        mx.eval(self._served)
        self._folded = FoldedAdapter(model)
        self._serve_folded(self._served)
        self._overrides: list[list[mx.array]] = []
        beside = set(adapter_config.trained_weights)
        self._in_full = [i for i, name in enumerate(self._slots.names) if not adapted or name in beside]
        self._initial = {i: self._served[i] for i in self._in_full} if keep_reference else {}
        self.version = 0
        self.step = 0
        self.fingerprint = fingerprint(self.trainable())

    @property
    def adapted(self) -> tuple[AdaptedModule, ...]:
        """The modules that hold the policy's adapter."""
        return self._adapted

    @property
    def keeps_base(self) -> bool:
        """Whether the weights of the base model are frozen."""
        return not self._in_full

    def trainable(self) -> Parameters:
        """Return the tree of the served parameters; changing the tree does not change the policy."""
        return self._slots.tree(self._served)

    def publish(self, parameters: Parameters, *, version: int, step: int, fingerprint: str) -> float:
        """Serve `parameters` from now on, without a copy; return the duration in seconds.

        Call this between decode steps. Raises `ValueError`, and changes no parameter, unless the tree has exactly the
        names, shapes and types of the trainable parameters.
        """
        started = time.perf_counter()
        leaves = self._slots.leaves(parameters)
        self._serve_folded(leaves)
        if not self._overrides:
            self._slots.assign(leaves)
        self._served = leaves
        self.version, self.step, self.fingerprint = version, step, fingerprint
        return time.perf_counter() - started

    @contextmanager
    def using(self, parameters: Parameters) -> Iterator[None]:
        """Compute with these parameters inside the context, and with the served ones afterwards; contexts nest.

        The engine must not run decode steps inside, because it would label tokens with the served version.
        """
        with self._computing(self._slots.leaves(parameters)):
            yield

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Compute as the reference policy inside the context: without adapters, which is exactly the base model.

        Weights that are trained in full (all, or embeddings and head) get their initial values. Raises `ValueError`
        unless these were kept at load.
        """
        if len(self._initial) < len(self._in_full):
            raise ValueError("the reference policy was not kept: load the policy with keep_reference=True")
        leaves = self._overrides[-1] if self._overrides else self._served
        with self._computing([self._initial.get(index, array) for index, array in enumerate(leaves)]):
            try:
                for module in self._adapted:
                    module.parent[module.key] = module.base
                yield
            finally:
                for module in self._adapted:
                    module.parent[module.key] = module.adapted

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """Prepare the model for gradients inside the context: dropout is active, blocks are checkpointed if configured.

        Some architectures (gated delta networks) use kernels without a gradient outside this mode.
        """
        self.model.train()
        try:
            if self.grad_checkpoint:
                with checkpointed_blocks(self.model.layers):
                    yield
            else:
                yield
        finally:
            self.model.eval()

    def loadable(self, parameters: Parameters) -> tuple[Parameters, AdapterConfig]:
        """Return the evaluated weights that make `mlx_lm.load(base, adapter_path=...)` compute with `parameters`.

        Usually these are the parameters. If embeddings or head are trained beside an adapter, mlx-lm would read the
        adapter only. The adapter is then fused into its base weights, W + scale (A B)^T, up to rounding to their type,
        and all changed weights are returned as a "full" fine-tuning.
        """
        if not self.adapter_config.trained_weights:
            return parameters, self.adapter_config
        arrays = flat(parameters)
        weights = {name: arrays[name] for name in self.adapter_config.trained_weights}
        with self.using(parameters):
            weights |= fused_weights(self._adapted)
            mx.eval(weights)
        return nested(weights), AdapterConfig(fine_tune_type="full", num_layers=-1, model=self.adapter_config.model)

    def _serve_folded(self, leaves: list[mx.array]) -> None:
        if self._folded.groups:
            self._folded.serve(self._slots.named(leaves))

    @contextmanager
    def _computing(self, leaves: list[mx.array]) -> Iterator[None]:
        """Compute with `leaves` inside the context."""
        self._overrides.append(leaves)
        try:
            self._slots.assign(leaves)
            yield
        finally:
            self._overrides.pop()
            self._slots.assign(self._overrides[-1] if self._overrides else self._served)
