"""Public methods of engine, sampler, policy and compute thread work in a thread that did not create the objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anyio
import mlx.core as mx
import pytest
from mlx.utils import tree_map

from clotho.runtime.compute_thread import ComputeExecutor
from clotho.runtime.sampling_client import Sampler
from protocols.sampling import SampleRequest, Sampling
from tests import lanes
from tests.serving.test_with_engine import Stack
from tests.training.policies_and_groups import tiny_policy

REQUEST = SampleRequest(prompt=(1, 2, 3), sampling=Sampling(max_tokens=3, ignore_eos=True), seeds=(1,))


class Objects:
    """An engine and a policy that another thread created."""

    def __init__(self) -> None:
        self.stack = Stack()
        self.executor, self.engine = self.stack.executor, self.stack.engine
        self.sampler = Sampler(self.executor.submit, self.engine)
        self.policy = self.executor.submit(tiny_policy).result(30)
        self.changed = self.executor.submit(self.doubled).result(30)

    def doubled(self) -> Any:
        """Evaluate the policy, as a model that is loaded from files, and return other parameters."""
        changed = tree_map(lambda array: array * 2, self.policy.trainable())
        mx.eval(self.policy.model.parameters(), changed)
        return changed


def decoded(objects: Objects) -> int:
    """Sample a completion without the compute thread."""
    events: list[object] = []
    objects.executor.stop(timeout=30)
    objects.engine.submit(REQUEST, events.append)
    while objects.engine.has_work:
        objects.engine.tick()
    return len(events)


def computed(objects: Objects) -> object:
    """Compute with other parameters, with the reference, and in training mode."""
    policy, tokens = objects.policy, mx.array([[1, 2, 3]])
    with policy.using(objects.changed), policy.training_mode():
        mx.eval(policy.model(tokens))
    with policy.reference():
        return mx.sum(policy.model(tokens)).item()


CALLS: dict[str, Callable[[Objects], object]] = {
    "ComputeExecutor.submit": lambda it: it.executor.submit(lambda: mx.ones(3).sum().item()).result(30),
    "ComputeExecutor.submit_steps": lambda it: it.executor.submit_steps(
        (step for step in (None, None)), kind="update"
    ).result(30),
    "ComputeExecutor.attach": lambda it: it.executor.attach(it.engine),
    "ComputeExecutor.rates": lambda it: (it.executor.rates(), it.executor.busy_since),
    "ComputeExecutor.stop": lambda it: it.executor.stop(timeout=30),
    "Sampler.complete": lambda it: anyio.run(it.sampler.complete, REQUEST),
    "DecodeEngine.submit, tick": decoded,
    "DecodeEngine.abort": lambda it: it.engine.abort(1),
    "DecodeEngine.stats": lambda it: (it.engine.stats(), it.engine.running, it.engine.has_work),
    "DecodeEngine.fail_all": lambda it: it.engine.fail_all("by the test"),
    "DecodeEngine.weights_changed": lambda it: it.engine.weights_changed("recompute"),
    "DecodeEngine.teacher_forced_logits": lambda it: [
        lanes.numpy(logits).sum() for logits in it.engine.teacher_forced_logits((1, 2), ((3, 4),), rows=2)
    ],
    "Policy.publish": lambda it: it.policy.publish(it.changed, version=1, step=1, fingerprint="x"),
    "Policy.trainable": lambda it: mx.eval(it.policy.trainable()),
    "Policy.using, reference, training_mode": computed,
    "Policy.loadable": lambda it: mx.eval(it.policy.loadable(it.changed)[0]),
}


@pytest.fixture
def foreign() -> Iterator[ComputeExecutor]:
    """Yield a second thread. Like the compute thread it never ends, because it compiles functions of MLX."""
    thread = ComputeExecutor(decode_share=0.5)
    thread.start()
    yield thread
    thread.stop(timeout=30)


@pytest.mark.parametrize("name", CALLS)
def test_another_thread_may_call_a_public_method(foreign: ComputeExecutor, name: str) -> None:
    """Evaluated arrays are not bound to the stream of the thread that made them."""
    objects = Objects()
    try:
        foreign.submit(lambda: CALLS[name](objects)).result(60)
    finally:
        objects.executor.stop(timeout=30)
