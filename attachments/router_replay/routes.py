"""Routes in a pass of the learner: replayed from the sampler, and compared with the learner's own (arXiv:2510.11370).

Models of mlx-lm choose the k experts of a token with `mx.argpartition` of its scores, and then gather the weights of
these experts from the scores. A replayed pass takes the numbers of the experts from the sampler instead. The weights
are still those of the learner's scores, so that gradients flow into them as in the paper.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from clotho.models.attention import model_modules
from clotho.models.experts import EXPERTS, Mixtures
from clotho.models.policy_model import BUILDING
from protocols.errors import ModelError

plain = mx.argpartition
"""The function of MLX."""

COMPILED = type(mx.compile(lambda: None))
"""What `mx.compile` returns, which refers to the function and has no attribute for it."""


class PassRoutes(NamedTuple):
    """The routes of the tokens of a pass, (B, S, C): of one layer with experts after another.

    known_B_S: tokens that have a route; the learner's routers choose the experts of others. None if all have one.
    """

    route_B_S_C: mx.array
    known_B_S: mx.array | None


class RoutedPass:
    """A pass over the blocks. own: what the learner's routers choose, by layer; layer: number of the next one."""

    def __init__(self, mixtures: Mixtures, routes: PassRoutes, layer: int = 0) -> None:
        self.own: list[mx.array] = []
        self.layer = layer
        self._mixtures, self._routes, self._per_token = mixtures, routes, mixtures.per_token

    def again(self, layer: int) -> RoutedPass:
        """Return the pass from a layer on, for blocks that are computed again."""
        return RoutedPass(self._mixtures, self._routes, layer)

    def choose(self, scores: mx.array, order: mx.array, kth: int) -> mx.array:
        """Return the experts of every token, or the order of `scores` if it is not that of a router."""
        if self.layer == len(self._mixtures.counts):
            return order
        width, experts = self._per_token[self.layer], self._mixtures.counts[self.layer]
        if scores.shape[-1] != experts or kth not in (width - 1, -width):
            return order
        own = order[..., :width] if kth >= 0 else order[..., -width:]
        start = sum(self._per_token[: self.layer])
        self.layer += 1
        self.own.append(own)
        replayed = self._routes.route_B_S_C[..., start : start + width].reshape(own.shape).astype(own.dtype)
        known_B_S = self._routes.known_B_S
        return replayed if known_B_S is None else mx.where(known_B_S.reshape(*own.shape[:-1], 1), replayed, own)


_current: ContextVar[RoutedPass | None] = ContextVar("routed pass", default=None)


def argpartition(a: mx.array, kth: int, axis: int | None = -1, **given: Any) -> mx.array:
    """Return the order of `a` as MLX does; for a router in a routed pass, the numbers of the experts only.

    Models take the first k or the last k of the result, which are then all of them.
    """
    order = plain(a, kth, axis, **given)
    routed = _current.get()
    return order if routed is None else routed.choose(a, order, kth)


class _Core(ModuleType):
    """`mlx.core` with another `argpartition`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


_core: Any = _Core("mlx.core")
_core.argpartition = argpartition


def install_routes() -> None:
    """Replace `mx` in the modules of mlx-lm's models with experts that are loaded, for good; threads share them.

    So are compiled functions that choose experts: a routed pass computes them without compilation, because a compiled
    function keeps the routes of the pass that traced it.
    """
    if _repeated not in BUILDING:
        BUILDING.append(_repeated)
    for module in map(vars, model_modules()):
        if module.get("mx") is mx and any(cls in module.values() for cls in EXPERTS):
            module["mx"] = _core
            module.update({name: _own_in_routed_pass(one) for name, one in module.items() if type(one) is COMPILED})


def _own_in_routed_pass(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, whose original is called instead inside a routed pass."""
    function = next((one for one in gc.get_referents(compiled) if isinstance(one, FunctionType)), compiled)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if _current.get() is None else function)(*args, **kwargs)

    return call


@contextmanager
def routed(mixtures: Mixtures, routes: PassRoutes) -> Iterator[RoutedPass]:
    """Compute one pass over the blocks along these routes inside the context.

    Raises ModelError if a layer with experts has chosen in another way than with `mx.argpartition`.
    """
    one = RoutedPass(mixtures, routes)
    token = _current.set(one)
    try:
        yield one
    finally:
        _current.reset(token)
    if one.layer < len(mixtures.counts):
        raise ModelError("the routers of this model do not choose experts with mx.argpartition")


def _repeated() -> Callable[[], AbstractContextManager[None]]:
    """Return what computes a block again in the pass that is being built, from its next layer with experts on."""
    one = _current.get()
    return partial(_again, one, 0 if one is None else one.layer)


@contextmanager
def _again(one: RoutedPass | None, layer: int) -> Iterator[None]:
    """Compute a block as in a pass from this layer on; without effect while a pass is built."""
    if one is None or _current.get() is not None:
        yield
        return
    token = _current.set(one.again(layer))
    try:
        yield
    finally:
        _current.reset(token)


def can_replay(model: Any, mixtures: Mixtures) -> bool:
    """Whether passes of a model take other routes than their own, after `install_routes`: a test with two tokens."""
    tokens_1_2 = mx.zeros((1, 2), dtype=mx.int32)
    with mixtures.recorded() as chosen:
        model(tokens_1_2)  # compiled functions are traced without routes
    routes = mixtures.routes(chosen)
    counts_C = np.repeat(mixtures.counts, mixtures.per_token)
    others = (routes.astype(mx.int32) + 1) % mx.array(counts_C.astype(np.int32))
    try:
        with mixtures.recorded() as replayed, routed(mixtures, PassRoutes(others, None)):
            model(tokens_1_2)
    except ModelError:
        return False
    return bool(mx.array_equal(mixtures.routes(replayed), others.astype(mixtures.dtype)).item())


def flipped(own_N_C: mx.array, route_N_C: mx.array, per_token: Sequence[int]) -> mx.array:
    """Return how many experts of `own` the routes of the same token and layer lack, by layer, (N, L)."""
    parts = np.cumsum(per_token)[:-1].tolist()
    pairs = zip(mx.split(own_N_C, parts, axis=-1), mx.split(route_N_C, parts, axis=-1), strict=True)
    lacking = [mx.all(own_N_K[:, :, None] != route_N_K[:, None], axis=-1) for own_N_K, route_N_K in pairs]
    return mx.stack([mx.sum(one_N_K, axis=-1) for one_N_K in lacking], axis=-1)
