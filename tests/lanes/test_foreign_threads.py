"""Public methods of engine, sampler, policy and compute thread work in a thread that did not create the objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from clotho.lanes.compute_thread import Compute
from clotho.lanes.sampling_client import EngineSampler
from clotho.models.parameters import flat
from protocols.sampling import CompletionDone, SampleEvent, SampleRequest, Sampling
from tests import model_lanes
from tests.actors.actor_helpers import compute_thread, served_policy
from tests.serving.test_with_engine import Stack
from tests.training.policies_and_groups import learner, random_groups, tiny_policy
from training_run.forced_decoder import ForcedDecoder

REQUEST = SampleRequest(prompt=(1, 2, 3), sampling=Sampling(max_tokens=3, ignore_eos=True), seeds=(1,))


def doubled(parameters: Any) -> Any:
    """Return evaluated parameters of twice the values."""
    changed = tree_map(lambda array: array * 2, parameters)
    mx.eval(changed)
    return changed


class Objects:
    """An engine and a policy that another thread created."""

    def __init__(self) -> None:
        self.stack = Stack()
        self.compute, self.engine = self.stack.compute, self.stack.engine
        self.sampler = EngineSampler(self.compute.decode.submit, self.engine)
        self.policy = self.compute.decode.submit(tiny_policy).result(30)
        self.changed = self.compute.decode.submit(self.doubled).result(30)

    def doubled(self) -> Any:
        """Evaluate the policy, as a model that is loaded from files, and return other parameters."""
        mx.eval(self.policy.model.parameters())
        return doubled(self.policy.trainable())

    def publish(self) -> float:
        """Serve the other parameters."""
        return self.policy.publish(self.changed, version=1, step=1, fingerprint="x")


def decoded(objects: Objects) -> int:
    """Sample a completion without the compute thread."""
    events: list[object] = []
    objects.compute.stop(timeout=30)
    objects.engine.submit(REQUEST, events.append)
    while objects.engine.has_work:
        objects.engine.tick()
    return len(events)


def computed(objects: Objects) -> object:
    """Compute with a model of its own: with other parameters, as the reference, and in training mode."""
    model, tokens = objects.policy.copy_model(), mx.array([[1, 2, 3]])
    model.use(objects.changed)
    with model.training_mode():
        mx.eval(model.model(tokens))
    model.use_reference()
    return mx.sum(model.model(tokens)).item()


CALLS: dict[str, Callable[[Objects], object]] = {
    "ComputeThread.submit": lambda it: [
        thread.submit(lambda: mx.ones(3).sum().item()).result(30) for thread in (it.compute.decode, it.compute.learner)
    ],
    "ComputeThread.attach": lambda it: it.compute.decode.attach(it.engine),
    "Compute.rates": lambda it: (
        it.compute.decode.rates(),
        it.compute.arbiter.busy_since,
        it.compute.arbiter.turn_times(),
    ),
    "Compute.stop": lambda it: it.compute.stop(timeout=30),
    "Sampler.complete": lambda it: anyio.run(it.sampler.complete, REQUEST),
    "DecodeEngine.submit, tick": decoded,
    "DecodeEngine.abort": lambda it: it.engine.abort(1),
    "DecodeEngine.stats": lambda it: (it.engine.stats(), it.engine.running, it.engine.has_work),
    "DecodeEngine.fail_all": lambda it: it.engine.fail_all("by the test"),
    "DecodeEngine.swap": lambda it: it.engine.swap(it.publish, "recompute").result(30),
    "ForcedDecoder.teacher_forced_logits": lambda it: [
        model_lanes.numpy(logits).sum()
        for logits in ForcedDecoder.of_engine(it.engine).teacher_forced_logits((1, 2), ((3, 4),), rows=2)
    ],
    "Policy.publish": lambda it: it.publish(),
    "Policy.trainable": lambda it: mx.eval(it.policy.trainable()),
    "Policy.copy_model": computed,
    "Policy.loadable": lambda it: mx.eval(it.policy.loadable(it.changed)[0]),
}


@pytest.fixture
def foreign() -> Iterator[Compute]:
    """Yield a second thread. Like the compute thread it never ends, because it compiles functions of MLX."""
    thread = Compute(decode_share=0.5, slots=2)
    thread.start()
    yield thread
    thread.stop(timeout=30)


@pytest.mark.parametrize("name", CALLS)
def test_another_thread_may_call_a_public_method(foreign: Compute, name: str) -> None:
    """Evaluated arrays are not bound to the stream of the thread that made them."""
    objects = Objects()
    try:
        foreign.decode.submit(lambda: CALLS[name](objects)).result(60)
    finally:
        objects.compute.stop(timeout=30)


def test_copies_compute_in_every_thread_while_the_engine_decodes(tmp_path: Path) -> None:
    """Each with the weights of its copy, whatever is served meanwhile."""
    with compute_thread() as compute:
        policy, engine = served_policy(compute, tmp_path)
        tokens, ended = [[1, 2, 3, 4]], threading.Event()
        first = policy.trainable()
        changed = compute.learner.submit(lambda: doubled(first)).result(60)

        def logits(parameters: Any) -> Any:
            model = policy.copy_model()
            model.use(parameters)
            return model_lanes.numpy(model.model(mx.array(tokens)))

        def heard(event: SampleEvent) -> None:
            if isinstance(event, CompletionDone):
                ended.set()

        def swap(parameters: Any, version: int) -> float:
            publish = partial(policy.publish, parameters, version=version, step=version, fingerprint="x")
            return compute.decode.submit(lambda: engine.swap(publish, "keep")).result(60).result(60)

        expected = [compute.scoring.submit(partial(logits, one)).result(60) for one in (first, changed)]
        sampling = Sampling(max_tokens=100, ignore_eos=True)
        compute.decode.submit(
            lambda: engine.submit(SampleRequest(prompt=(1, 2), sampling=sampling, seeds=(1, 2, 3)), heard)
        ).result(60)
        for version in range(1, 7):
            threads = (compute.learner, compute.evaluation, compute.parity, compute.scoring)
            found = [thread.submit(partial(logits, one)) for thread in threads for one in (first, changed)]
            swap(changed if version % 2 else first, version)
            for number, future in enumerate(found):
                np.testing.assert_array_equal(future.result(60), expected[number % 2])
        assert ended.wait(60)


def test_what_the_learner_publishes_can_be_read_in_every_thread() -> None:
    """Parameters, and the state that checkpoints write, are evaluated."""
    with compute_thread() as compute:
        policy = compute.learner.submit(tiny_policy).result(60)
        groups = random_groups(32)

        def trained() -> tuple[Any, Any]:
            one = learner(policy, kl_beta=0.1, num_minibatches=2, measure_update_kl=True)
            one.update(groups)
            one.roll_back(one.snapshot(), rate=0.5)
            one.update(groups, step=1)
            return flat(one.parameters), one.state()

        for arrays in compute.learner.submit(trained).result(120):
            for thread in (compute.decode, compute.evaluation):
                read = thread.submit(lambda: [model_lanes.numpy(array) for array in arrays.values()])  # noqa: B023
                assert len(read.result(60)) == len(arrays)
