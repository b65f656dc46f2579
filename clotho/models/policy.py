"""The policy: one set of base weights, with the trainable weights that are served and trained.

An engine can also sample from a base model that is not trained, and from weights that are pinned.

The served model belongs to the thread of the decode engine. Parameters change by reference: nothing is copied, and
arrays are never modified.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from msgspec.structs import replace

from clotho.backend import backend
from clotho.models.folded_lora import FoldedAdapter
from clotho.models.loading import context_length, describe_model, load_base, quantization_of
from clotho.models.lora import AdaptedModule, fused_weights, install_adapter, open_all_weights
from clotho.models.model_files import model_fingerprint, one_line
from clotho.models.parameters import Parameters, fingerprint, flat, nested
from clotho.models.policy_model import PolicyModel, WeightedModel
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.model import FullMethod, ModelSection, PolicySection, QuantizeAtLoad
from protocols.checkpoint import AdapterConfig, BaseQuantization
from protocols.compute import PolicyDescription
from protocols.errors import ClothoError, ModelError
from protocols.prompt import Problem


def load_policy(model: ModelSection, policy: PolicySection, *, seed: int, keep_reference: bool) -> Policy:
    """Load base model and tokenizer and create the policy; seeds the random state of the calling thread.

    keep_reference: keep the initial values of weights that are trained in full, which a reference policy needs; an
    adapter needs none. Raises `ModelError` if the model cannot be loaded or does not support the settings in `policy`.
    """
    base, config, files = load_base(model)
    tokenizer = ChatTokenizer.of_model(files, model)
    with _usable(model):
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


@contextmanager
def _usable(section: ModelSection) -> Iterator[None]:
    """Raise ModelError for any exception: shapes and settings of a foreign model can fail anywhere in its code."""
    try:
        yield
    except ClothoError:
        raise
    except Exception as error:
        raise ModelError(f"model {section.path} cannot be used: {type(error).__name__}: {one_line(error)}") from error


class TrainablePolicy(Protocol):
    """The part of `Policy` that the learner uses. flips_routes: see there."""

    version: int
    fingerprint: str
    flips_routes: bool

    def trainable(self) -> Parameters:
        """Return the tree of the served trainable parameters."""

    def copy_model(self) -> WeightedModel:
        """Return a model of its own over the arrays of the policy."""


class Policy:
    """The served model with its trainable parameters, and the version that is served.

    model: computes with the served parameters. Whatever computes with others has a model of its own (`copy_model`).
    version, step, fingerprint: of the served parameters; initially 0, 0 and that of the initial weights.
    files: directory or GGUF file of base model and tokenizer, also for models of the hub.
    adapter_config: settings with which mlx-lm rebuilds the trained layers from a file.
    flips_routes: whether a parity check has found experts that the learner chooses and the sampler does not.
    pack: makes the files of an adapter smaller, without a change of what it computes; None: nothing does.
    """

    flips_routes = False
    pack: Callable[[Parameters, AdapterConfig], tuple[Parameters, AdapterConfig]] | None = None

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
        """Make the parameters of the method trainable in `model`. base_path, base_quantization: of the base model."""
        adapted: tuple[AdaptedModule, ...] = ()
        if isinstance(section.method, FullMethod):
            adapter_config = open_all_weights(model)
            mx.random.seed(seed)
        else:
            adapter_config, adapted = install_adapter(model, section.method, seed=seed)
        backend().install_layers(model)
        self.model = model
        self.files = files
        self.tokenizer = tokenizer
        self.adapter_config = replace(adapter_config, model=base_path, base_quantization=base_quantization)
        self.description: PolicyDescription = describe_model(model, config)
        self.vocab_size = self.description.vocab_size
        self.context_length = context_length(config)
        served = flat(model.trainable_parameters())
        if not served:
            raise ModelError("this model has no trainable parameters")
        mx.eval(served)
        in_full = [name for name in served if not adapted or name in adapter_config.trained_weights]
        self._served = PolicyModel(
            model,
            vocab_size=self.vocab_size,
            adapted=adapted,
            initial={name: served[name] for name in in_full} if keep_reference else {},
            in_full=in_full,
            grad_checkpoint=section.recomputes(self.description.parameters),
            folded=FoldedAdapter(model),
        )
        self._served.fold()
        self._template = self._served.copy()  # never computes, so that any thread can copy it at any time
        self._template.release()
        self.adapted = adapted
        self.keeps_base = not in_full
        self.version = 0
        self.step = 0
        self.fingerprint = fingerprint(self.trainable())

    def chat(
        self, conversation: str | Problem | Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the prompt of a conversation as token ids, in the chat template of the model.

        conversation: what the user says, a problem, or messages with `role` and `content`. tools: definitions of
        functions, for templates that show them; by default those of the problem. Raises RequestError if the model has
        no chat template, or if it refuses the messages.
        """
        if isinstance(conversation, Problem):
            tools = tools or conversation.tools
            conversation = conversation.messages or conversation.prompt
        messages = [{"role": "user", "content": conversation}] if isinstance(conversation, str) else conversation
        return self.tokenizer.render_chat(messages, tools=tools)

    def trainable(self) -> Parameters:
        """Return the tree of the served parameters; changing the tree does not change the policy."""
        return self._served.trainable()

    def served(self) -> tuple[Parameters, int]:
        """Return the served parameters and their version."""
        return self.trainable(), self.version

    def serves(self, parameters: Parameters) -> bool:
        """Whether every layer of the served model refers to the very arrays of these parameters."""
        return self._served.computes_with(parameters)

    def copy_model(self) -> PolicyModel:
        """Return a model of its own over the arrays of the policy, which computes with the served parameters.

        Any thread may call this; the copy belongs to the caller's.
        """
        model = self._template.copy()
        model.use(self.trainable())
        return model

    def pinned(self) -> Policy:
        """Return a policy with a model of its own over the same arrays, which serves what is published to it."""
        pinned = copy.copy(self)
        pinned._served = self.copy_model()
        pinned.model, pinned.adapted = pinned._served.model, pinned._served.adapted
        return pinned

    def release(self) -> None:
        """Refer to no parameters until the next `publish`."""
        self._served.release()

    def publish(self, parameters: Parameters, *, version: int, step: int, fingerprint: str) -> float:
        """Serve `parameters` from now on, without a copy; return the duration in seconds.

        Call this between decode steps, in the thread that built arrays which are not evaluated yet: they are evaluated,
        because other threads compute with them. Raises `ValueError`, and changes no parameter, unless the tree has
        exactly the names, shapes and types of the trainable parameters.
        """
        started = time.perf_counter()
        mx.eval(parameters)
        self._served.use(parameters)
        self._served.fold()
        self.version, self.step, self.fingerprint = version, step, fingerprint
        return time.perf_counter() - started

    def loadable(self, parameters: Parameters) -> tuple[Parameters, AdapterConfig]:
        """Return the evaluated weights that make `mlx_lm.load(base, adapter_path=...)` compute with `parameters`.

        Usually these are the parameters. If embeddings or head are trained beside an adapter, mlx-lm would read the
        adapter only. The adapter is then fused into its base weights, W + scale (A B)^T, up to rounding to their type,
        and all changed weights are returned as a "full" fine-tuning.
        """
        if not self.adapter_config.trained_weights:
            config = self.adapter_config
            return self.pack(parameters, config) if self.pack is not None else (parameters, config)
        model = self.copy_model()
        model.use(parameters)
        arrays = flat(parameters)
        weights = {name: arrays[name] for name in self.adapter_config.trained_weights}
        weights |= fused_weights(model.adapted)
        mx.eval(weights)
        return nested(weights), AdapterConfig(fine_tune_type="full", num_layers=-1, model=self.adapter_config.model)


class BaseModel:
    """A base model as the decode engine samples from it: nothing is trained, so the version is always 0.

    files: directory or GGUF file of model and tokenizer. config: the configuration that mlx-lm built the model from.
    """

    version, step, keeps_base = 0, 0, True
    adapted: tuple[AdaptedModule, ...] = ()

    def __init__(self, section: ModelSection) -> None:
        """Load model and tokenizer, in a compute thread. Raises ModelError."""
        model, config, files = load_base(section)
        self.tokenizer = ChatTokenizer.of_model(files, section)
        with _usable(section):
            model.freeze()
            model.eval()
            backend().install_layers(model)
            self.description = describe_model(model, config)
        self.model: nn.Module = model
        self.config = config
        self.files, self.vocab_size = files, self.description.vocab_size
        self._template = PolicyModel(model, vocab_size=self.vocab_size, folded=FoldedAdapter(model)).copy()
        self.context_length = context_length(config)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of its files."""
        return model_fingerprint(self.files)

    def served(self) -> tuple[Parameters, int]:
        """Return an empty tree, because nothing is trained, and the version."""
        return {}, self.version

    def copy_model(self) -> PolicyModel:
        """Return a model of its own over the same arrays. Any thread may call this."""
        return self._template.copy()
