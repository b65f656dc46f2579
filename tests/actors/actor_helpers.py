"""Helpers of the actor tests: prompts, queues, a compute thread, a small policy, and functions that run an actor."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio

from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute
from clotho.lanes.sampling_client import Engine, EngineSampler, Submit
from clotho.models.policy import Policy, load_policy
from clotho.settings.engine import EngineSection
from clotho.settings.model import ModelSection
from protocols.accounting import LedgerState
from protocols.prompt import Problem, Prompt
from protocols.queues import Inbox
from protocols.sampling import SampleRequest
from protocols.step import PolicyUpdated, StepReport, TrainedGroup
from tests.learner_settings import policy_settings
from tests.saved_models import CONFIG, save
from training_run.supervision.queues import Queue

T = TypeVar("T")


class RecordingSampler(EngineSampler):
    """A sampler that records which groups were submitted together."""

    def __init__(self, submit: Submit, engine: Engine) -> None:
        super().__init__(submit, engine)
        self.submissions: list[list[int]] = []

    def groups(self, requests: Sequence[SampleRequest]) -> AsyncGenerator[tuple[int, Any], None]:
        self.submissions.append([request.prompt[0] for request in requests])
        return super().groups(requests)


def prompt(group_id: int, tokens: tuple[int, ...] = (5, 9, 33)) -> Prompt:
    """Return the prompt of a group."""
    problem = Problem(prompt=f"question {group_id}", answer="42", type="arithmetic")
    return Prompt(group_id=group_id, problem=problem, tokens=tokens, seed=1000 + group_id)


def filled_queue(name: str, messages: Iterable[T], *, ended: bool = True) -> Queue[T]:
    """Return a queue that holds these messages. The queue is closed if `ended` is true."""
    held = list(messages)
    queue = Queue[T](name, capacity=max(1, len(held)))
    writer = queue.outbox()
    for message in held:
        writer.send_nowait(message)
    if ended:
        writer.close()
    return queue


async def receive_all(inbox: Inbox[T]) -> list[T]:
    """Receive messages until the queue ends."""
    return [message async for message in inbox]


async def run_and_receive(run: Callable[[], Awaitable[None]], inbox: Inbox[T]) -> list[T]:
    """Run an actor to its end and receive its messages at the same time."""
    received: list[T] = []

    async def read() -> None:
        received.extend(await receive_all(inbox))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await run()
    return received


async def cancel_when_blocked(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run until all tasks wait, then cancel."""
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()


def policy_updated(
    parameters: Any,
    *,
    step: int,
    version: int,
    fingerprint: str = "f",
    trained: tuple[TrainedGroup, ...] = (),
    optimizer: Any = None,
    random_state: tuple[int, ...] = (),
    ledger: LedgerState | None = None,
    **fields: Any,
) -> PolicyUpdated:
    """Return the update of a batch. fields: of `PolicyUpdated`."""
    report = StepReport(
        step=step, version=version, fingerprint=fingerprint, trained=trained, discarded=(),
        staleness=(0,) * len(trained), update=None, train_seconds=0.0, wait_seconds=0.0,
    )  # fmt: skip
    counts = {"bad_steps": 0, "train_seconds": 0.0, "trained_tokens": 0} | fields
    return PolicyUpdated(
        report=report, parameters=parameters, optimizer={} if optimizer is None else optimizer,
        random_state=random_state, ledger=ledger or LedgerState(), **counts,
    )  # fmt: skip


@contextmanager
def compute_thread() -> Iterator[Compute]:
    """Yield compute threads that stop with the test."""
    compute = Compute(decode_share=0.5, slots=2)
    compute.start()
    try:
        yield compute
    finally:
        compute.stop()


def served_policy(
    compute: Compute, directory: Path, settings: EngineSection | None = None, **config: Any
) -> tuple[Policy, DecodeEngine]:
    """Return a tiny policy with an adapter and its engine, both created in the compute thread.

    config: of the model, where it differs.
    """

    def make() -> tuple[Policy, DecodeEngine]:
        model = ModelSection(path=str(save(directory / "base", CONFIG | config)))
        policy = load_policy(model, policy_settings(rank=2, scale=2.0), seed=0, keep_reference=False)
        return policy, DecodeEngine(policy, settings or EngineSection(max_num_seqs=16))

    policy, engine = compute.decode.submit(make).result()
    compute.decode.attach(engine)
    return policy, engine
