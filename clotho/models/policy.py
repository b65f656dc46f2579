"""The policy: one set of base weights, and the trainable ones that serve, learn and step aside for the reference.

All of it belongs to the compute thread. Parameters change by pointer: nothing is copied, and arrays never change.
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

from clotho.config.schema import ModelSection, PolicySection
from clotho.config.sections_data import FullMethod
from clotho.cpu.layers import install_cpu_layers
from clotho.models.describe import context_length, describe_model
from clotho.models.gradient_checkpoint import checkpointed_blocks
from clotho.models.loading import load_base
from clotho.models.lora import AdaptedModule, fused_weights, install_adapter, open_all_weights
from clotho.models.parameter_slots import ParameterPlaces, Parameters
from clotho.models.parameters import fingerprint, flat, nested
from clotho.models.tokenizer import ChatTokenizer
from protocols.checkpoint import AdapterConfig
from protocols.errors import ModelError
from protocols.summary import PolicyDescription

__all__ = ["Parameters", "Policy", "TrainablePolicy", "load_policy"]


def load_policy(model: ModelSection, policy: PolicySection, *, seed: int, keep_reference: bool) -> Policy:
    """Load base and tokenizer and make the policy of them; call it in the compute thread, which it seeds.

    keep_reference: hold on to the initial weights of all that is trained in full, so that `reference()` works; an
    adapter needs none. Raises `ModelError`, in one line, for whatever is wrong with the model or its combination
    with `policy`.
    """
    base, config, directory = load_base(model)
    tokenizer = ChatTokenizer.from_directory(directory, trust_remote_code=model.trust_remote_code)
    return Policy(
        base,
        tokenizer,
        policy,
        config=config,
        seed=seed,
        keep_reference=keep_reference,
        base_path=model.path,
        directory=directory,
    )


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
    """The model with what is trained of it, and which version of that serves.

    model: computes with the served parameters, except inside `using` and `reference`.
    version, step, fingerprint: of the served parameters; they start as 0, 0 and the initial weights' own.
    directory: where base and tokenizer were read from, hub models included.
    adapter_config: what mlx-lm needs to rebuild the trained layers from a file.
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
        directory: Path | None = None,
    ) -> None:
        """Install what is to be trained over `model`, whose mlx-lm configuration is `config`.

        base_path: what the adapter's file calls the base. directory: where the base was read from, if from files.
        """
        adapted: tuple[AdaptedModule, ...] = ()
        if isinstance(section.method, FullMethod):
            adapter_config = open_all_weights(model)
            mx.random.seed(seed)
        else:
            adapter_config, adapted = install_adapter(model, section.method, seed=seed)
        install_cpu_layers(model)
        self.model = model
        self.directory = directory
        self.tokenizer = tokenizer
        self.grad_checkpoint = section.grad_checkpoint
        self.adapter_config = replace(adapter_config, model=base_path)
        self.description: PolicyDescription = describe_model(model, config)
        self.vocab_size = self.description.vocab_size
        self.context_length = context_length(config)
        self._adapted = adapted
        self._places = ParameterPlaces(model)
        self._served = self._places.current()
        if not self._served:
            raise ModelError("nothing of this model can be trained")
        mx.eval(self._served)
        self._overrides: list[list[mx.array]] = []
        beside = set(adapter_config.trained_weights)
        self._in_full = [i for i, name in enumerate(self._places.names) if not adapted or name in beside]
        self._initial = {i: self._served[i] for i in self._in_full} if keep_reference else {}
        self.version = 0
        self.step = 0
        self.fingerprint = fingerprint(self.trainable())

    def trainable(self) -> Parameters:
        """Tree of the served parameters; changing the tree does not change the policy."""
        return self._places.tree(self._served)

    def publish(self, parameters: Parameters, *, version: int, step: int, fingerprint: str) -> float:
        """Make `parameters` the served ones, by pointer; return the seconds it took.

        Call it between decode ticks. Raises `ValueError`, and changes nothing, where the tree does not have exactly
        the names, shapes and types of the trainable parameters.
        """
        started = time.perf_counter()
        leaves = self._places.leaves(parameters)
        if not self._overrides:
            self._places.assign(leaves)
        self._served = leaves
        self.version, self.step, self.fingerprint = version, step, fingerprint
        return time.perf_counter() - started

    @contextmanager
    def using(self, parameters: Parameters) -> Iterator[None]:
        """Compute with these parameters inside, and with the served ones after, whatever happens inside.

        The engine must not tick inside: it would label tokens with the served version. Nests.
        """
        with self._computing(self._places.leaves(parameters)):
            yield

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Compute as the reference policy inside: adapters taken out of the model, so exactly the base.

        For what is trained in full (all, or embeddings and head) the initial weights stand in; raises `ValueError`
        unless they were kept at load.
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
        """Inside, for gradients: dropout draws, layers take their differentiable form; checkpoints blocks if asked.

        Some architectures (gated delta networks) have kernels without a gradient and avoid them only in this mode.
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
        """What a directory must hold for `mlx_lm.load(base, adapter_path=...)` to compute with `parameters`; evaluated.

        The parameters themselves, unless embeddings or head are trained beside an adapter: mlx-lm reads no other
        weight beside one. Then the adapter is fused into the weights it sits on, W + scale (A B)^T in their own type,
        equal up to rounding, and all changed weights are given, for which mlx-lm's word is "full": a copy of as many.
        """
        if not self.adapter_config.trained_weights:
            return parameters, self.adapter_config
        arrays = flat(parameters)
        weights = {name: arrays[name] for name in self.adapter_config.trained_weights}
        with self.using(parameters):
            weights |= fused_weights(self._adapted)
            mx.eval(weights)
        return nested(weights), AdapterConfig(fine_tune_type="full", num_layers=-1, model=self.adapter_config.model)

    @contextmanager
    def _computing(self, leaves: list[mx.array]) -> Iterator[None]:
        """Let the model compute with `leaves` inside."""
        self._overrides.append(leaves)
        try:
            self._places.assign(leaves)
            yield
        finally:
            self._overrides.pop()
            self._places.assign(self._overrides[-1] if self._overrides else self._served)
