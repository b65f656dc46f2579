"""A model of the policy for one component that computes: modules of its own over the immutable arrays of all others.

The decode engine, the learner, an evaluation and the parity check each have a copy of the modules. Copies refer to the
same arrays, so a copy takes no memory, and components compute at the same time in different threads without a lock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import _BaseCache
from msgspec.structs import replace

from clotho.models.attention import KeysAndValues, LayerKeys
from clotho.models.folded_lora import FoldedAdapter
from clotho.models.lora import AdaptedModule
from clotho.models.module_calls import called, with_classes
from clotho.models.parameters import Arrays, Parameters, ParameterSlots, flat, locate, nested
from clotho.models.stages import backward_of, current_block


class WeightedModel(Protocol):
    """The part of `PolicyModel` that scoring and training use."""

    model: nn.Module
    vocab_size: int

    def trainable(self) -> Parameters:
        """Return the tree of the trainable parameters that the model computes with."""

    def use(self, parameters: Parameters) -> None:
        """Compute with these parameters from now on."""

    def use_reference(self) -> None:
        """Compute as the reference policy from now on."""

    def release(self) -> None:
        """Refer to no parameters until the next `use`, so that those that nothing else uses are freed."""

    def training_mode(self) -> Any:
        """Return a context that prepares the model for gradients."""


NONE: Mapping[str, mx.array] = MappingProxyType({})


class PolicyModel:
    """Modules, and the parameters that they compute with; for one thread at a time. `use` changes references only."""

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab_size: int,
        folded: FoldedAdapter,
        adapted: Sequence[AdaptedModule] = (),
        initial: Mapping[str, mx.array] = NONE,
        in_full: Collection[str] = (),
        grad_checkpoint: bool = False,
    ) -> None:
        """adapted: the modules that hold the policy's adapter. in_full: names of parameters trained in full.

        initial: their initial values, if the reference policy needs them. folded: converts the adapter of `use`.
        """
        self.model = model
        self.vocab_size = vocab_size
        self.adapted = tuple(adapted)
        self._initial, self._in_full, self._grad_checkpoint = initial, in_full, grad_checkpoint
        self._slots, self._folded = ParameterSlots(model), folded
        self._arrays = self._slots.current()
        self._zeros: Arrays = {}
        self._is_reference = False

    def trainable(self) -> Parameters:
        """Return the tree of the parameters that the model computes with; changing the tree changes no model."""
        return self._slots.tree(self._arrays)

    def copy(self) -> PolicyModel:
        """Return a model with modules of its own over the same arrays; 30 blocks take 28 ms and no array memory.

        Evaluates arrays that are not, because another thread cannot evaluate them.
        """
        arrays = _leaves_of([self.model, self._folded])
        mx.eval([leaf for leaf in arrays if isinstance(leaf, mx.array)])
        memo: dict[int, Any] = {id(leaf): leaf for leaf in arrays}
        model, folded = copy.deepcopy((self.model, self._folded), memo)
        folded.forget()
        adapted = []
        for one in self.adapted:
            parent, key = locate(model, one.name)
            base = copy.deepcopy(one.base, memo)
            parent[key] = copy.deepcopy(one.adapted, memo)
            adapted.append(replace(one, parent=parent, key=key, base=base, adapted=parent[key]))
        copied = copy.copy(self)
        copied.model, copied.adapted, copied._folded = model, tuple(adapted), folded
        copied._slots = ParameterSlots(model)
        copied._arrays, copied._is_reference = copied._slots.current(), False
        copied._switch(reference=self._is_reference)
        return copied

    def computes_with(self, parameters: Parameters) -> bool:
        """Whether every layer refers to the very arrays of these parameters. Compares references, not numbers."""
        given = self._slots.checked(parameters)
        return all(array is given[name] for name, array in self._slots.current().items())

    def use(self, parameters: Parameters) -> None:
        """Compute with these parameters. Raises `ValueError`, and changes nothing, if they do not fit (`checked`)."""
        self._use(self._slots.checked(parameters))
        self._switch(reference=False)

    def use_reference(self) -> None:
        """Compute as the base model, with initial values of what is trained in full. Raises `ValueError` without."""
        if len(self._initial) < len(self._in_full):
            raise ValueError("the reference policy was not kept: load the policy with keep_reference=True")
        self._use({**self._arrays, **self._initial})
        self._switch(reference=True)

    def release(self) -> None:
        """Hold zeros, which take no memory, until the next `use`, so that unused parameters are freed."""
        if not self._zeros:
            arrays = self._arrays.items()
            self._zeros = {name: mx.broadcast_to(mx.zeros((), dtype=one.dtype), one.shape) for name, one in arrays}
            mx.eval(self._zeros)
        self._use(self._zeros)
        self._folded.forget()

    def fold(self) -> None:
        """Convert the adapter of the current parameters once, for many calls."""
        if self._folded.groups:
            self._folded.serve(self._arrays)

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """Prepare the model for gradients inside the context: dropout is active, blocks are checkpointed if configured.

        Some architectures (gated delta networks) use kernels without a gradient outside this mode.
        """
        self.model.train()
        try:
            with checkpointed_blocks(self.model.layers) if self._grad_checkpoint else nullcontext():
                yield
        finally:
            self.model.eval()

    def _use(self, arrays: Arrays) -> None:
        self._slots.assign(arrays)
        self._arrays = arrays

    def _switch(self, *, reference: bool) -> None:
        if reference is not self._is_reference:
            for module in self.adapted:
                module.parent[module.key] = module.base if reference else module.adapted
            self._is_reference = reference


def _leaves_of(roots: Sequence[Any]) -> list[Any]:
    """Return what a copy shares: arrays, and all objects without attributes of their own, such as types of MLX."""
    found: dict[int, Any] = {}
    waiting, seen = list(roots), set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        inside: list[Any] = []
        if isinstance(one, dict):
            inside += one.values()
        elif isinstance(one, (list, tuple, set)):
            inside += one
        if hasattr(one, "__dict__") and not isinstance(one, (type, FunctionType, ModuleType)):
            inside += vars(one).values()
        elif not isinstance(one, (dict, list, tuple, set)):
            found[id(one)] = one
        waiting += inside
    return list(found.values())


def checkpointed_blocks(blocks: list[nn.Module]) -> AbstractContextManager[None]:
    """Inside, each block keeps only its input and recomputes its activations in the backward pass (arXiv:1604.06174).

    Gradients are unchanged. Keys and values that a block passes to another block, or to a later pass over the blocks
    (`LayerKeys`), are inputs and outputs of the recomputed function, so gradients flow through them. A block that gets
    a cache of mlx-lm, which has no such outputs, keeps all its activations.
    mlx-lm's `grad_checkpoint` changes the class permanently, also for decoding and for other models of the process.
    """
    checkpointed = cache(_checkpointed_class)
    return with_classes(blocks, lambda cls: checkpointed(cls))


ARRAY = object()
"""In the place of an array in what a block returns."""

BUILDING: list[Callable[[], Callable[[], AbstractContextManager[None]]]] = []
"""Called when a block is built that will be computed again; each returns what makes the context of that computation."""


def _checkpointed_class(cls: type[Any]) -> type[Any]:
    forward = cls.__call__

    def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute a block, and keep its inputs only."""
        given = [leaf for _, leaf in cast(list[Any], tree_flatten([args, kwargs]))]
        if any(isinstance(arg, _BaseCache) for arg in given):
            return forward(block, *args, **kwargs)
        keys = {id(arg): arg for arg in given if isinstance(arg, LayerKeys)}
        number, contexts = current_block(), [one() for one in BUILDING]

        parameters = flat(block.trainable_parameters())
        edges = [0, *accumulate([len(parameters), *(len(one.held) for one in keys.values())])]
        returned: Any = None  # a block may return other values beside arrays

        def inner(*arrays: mx.array) -> tuple[list[mx.array], list[KeysAndValues]]:
            """Compute the block with its parameters, and with keys and values of other blocks, as inputs."""
            of_parameters, *held = (arrays[start:stop] for start, stop in pairwise(edges))
            block.update(nested(dict(zip(parameters, of_parameters, strict=True))))
            own = {key: one.holding(its) for (key, one), its in zip(keys.items(), held, strict=True)}
            rest = iter(arrays[edges[-1] :])

            def mine(arg: Any) -> Any:
                return next(rest) if isinstance(arg, mx.array) else own.get(id(arg), arg)  # own: nobody else sees it

            own_args, own_kwargs = tree_map(mine, [args, kwargs])
            with backward_of(number), ExitStack() as entered:  # without effect in the forward pass
                for again in contexts:
                    entered.enter_context(again())
                output = forward(block, *own_args, **own_kwargs)
            nonlocal returned
            returned = tree_map(lambda leaf: ARRAY if isinstance(leaf, mx.array) else leaf, output)
            # New nodes, because returning the same array twice would lose a gradient if a block also returns its keys.
            found = [leaf for _, leaf in cast(list[Any], tree_flatten(output)) if isinstance(leaf, mx.array)]
            return found, [tuple(mx.contiguous(array) for array in one.held) for one in own.values()]

        held_before = [array for one in keys.values() for array in one.held]
        inputs = [*parameters.values(), *held_before, *(arg for arg in given if isinstance(arg, mx.array))]
        found, held = _recomputed(inner)(*inputs)
        for one, its in zip(keys.values(), held, strict=True):
            one.held = its
        rest = iter(found)
        return tree_map(lambda leaf: next(rest) if leaf is ARRAY else leaf, returned)

    return called(cls, call)


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that keeps its inputs only, and is computed again once its cotangents are.

    `mx.checkpoint` has no such order: in one evaluation, MLX would compute several blocks again before the first of
    their gradients, and hold the activations of all of them.
    """

    def leaves(tree: Any) -> list[mx.array]:
        return [leaf for _, leaf in cast(list[Any], tree_flatten(tree)) if isinstance(leaf, mx.array)]

    computed = mx.custom_function(function)

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        given = leaves(cotangents)
        _, gradients = mx.vjp(lambda *arrays: leaves(function(*arrays)), mx.depends(leaves(primals), given), given)
        return gradients

    computed.vjp(backward)
    return cast(Callable[..., Any], computed)
