"""The broadcaster: new weights take over between ticks, everyone hears of it, and a wrong swap ends the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import structlog
from anyio.abc import TaskStatus
from mlx.utils import tree_map
from msgspec import structs

from actors import broadcaster as module
from actors.broadcaster import Broadcaster, SwapTimes
from clotho.config.schema import KvPolicy, ParitySection
from clotho.models.parameters import flat
from clotho.runtime.compute_thread import ComputeExecutor
from clotho.runtime.latest import Latest
from clotho.runtime.sampling_client import Sampler
from clotho.scoring.teacher_forcing import ParityReport
from protocols.accounting import LedgerState
from protocols.errors import ParityError
from protocols.queues import QueueClosed
from protocols.sampling import SampleRequest, Sampling
from protocols.step import PolicyUpdated, StepReport, TrainedGroup, WeightsReady
from tests.actors.boxes import compute_thread, filled, served_policy
from tests.training.policies_and_groups import scored_group

PROMPT = (5, 9, 33, 2, 17, 60)


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    """A compute thread."""
    with compute_thread() as running:
        yield running


class Scene:
    """A broadcaster of a tiny policy that an engine decodes."""

    def __init__(
        self, executor: ComputeExecutor, directory: Path, *, kv_policy: KvPolicy = "keep", **settings: Any
    ) -> None:
        self.executor = executor
        self.policy, self.engine = served_policy(executor, directory)
        self.weights = Latest[WeightsReady]("weights")
        self.swap_times = SwapTimes()
        self.settings, self.kv_policy = ParitySection(**settings), kv_policy

    def update(self, *, step: int, version: int, shift: float = 0.0, taught: bool = True) -> PolicyUpdated:
        """The learner's word after a batch: the weights of before, every number moved by `shift`."""
        scored = scored_group([[7, 8, 9, 10]], [1.0], prompt=PROMPT[:3])
        report = StepReport(
            step=step,
            version=version,
            fingerprint=f"of {version}",
            trained=(TrainedGroup(scored=scored, advantages=(1.0,)),) if taught else (),
            discarded=(),
            staleness=(0,) if taught else (),
            update=None,
            train_seconds=0.0,
            wait_seconds=0.0,
        )

        def moved() -> Any:
            parameters = tree_map(lambda array: array + shift, self.policy.trainable())
            mx.eval(parameters)
            return parameters

        return PolicyUpdated(
            report=report,
            parameters=self.executor.submit(moved).result(),
            optimizer={},
            random_state=(),
            ledger=LedgerState(),
            bad_steps=0,
            train_seconds=0.0,
            trained_tokens=0,
        )

    def box(self, *updates: PolicyUpdated) -> Broadcaster:
        """The broadcaster of these updates."""
        self.updates = filled("updates", updates)
        return Broadcaster(
            inbox=self.updates.inbox(),
            weights=self.weights,
            executor=self.executor,
            policy=self.policy,
            engine=self.engine,
            settings=self.settings,
            kv_policy=self.kv_policy,
            temperature=1.0,
            parity_prompt=PROMPT,
            swap_times=self.swap_times,
        )


async def test_every_update_takes_over_and_is_announced(executor: ComputeExecutor, tmp_path: Path) -> None:
    """The very arrays of the learner serve, under their version; sampler and learner agree about them."""
    scene = Scene(executor, tmp_path)
    updates = [scene.update(step=1, version=1, shift=0.1), scene.update(step=2, version=2, shift=0.2)]
    box = scene.box(*updates)
    await box.run()
    assert scene.weights.value == WeightsReady(version=2, step=2, fingerprint="of 2")
    assert (scene.policy.version, scene.policy.fingerprint) == (2, "of 2")
    served = flat(scene.policy.trainable())
    assert all(served[name] is array for name, array in flat(updates[-1].parameters).items())
    swaps = scene.swap_times
    assert swaps.count == 2
    assert swaps.median
    assert swaps.longest
    assert 0 < swaps.median <= swaps.longest
    assert 0 <= box.largest_drift < 1e-3


async def test_a_batch_that_taught_nothing_is_announced_too(executor: ComputeExecutor, tmp_path: Path) -> None:
    """The generator waits for steps: without the announcement it would wait for ever."""
    scene = Scene(executor, tmp_path)
    box = scene.box(scene.update(step=1, version=0, taught=False))
    await box.run()
    assert (scene.weights.value.step, scene.weights.value.version) == (1, 0)
    assert (scene.swap_times.count, scene.swap_times.last) == (0, None)


@pytest.mark.parametrize(("policy", "versions"), [("keep", {0, 1}), ("recompute", {0, 1}), ("drain", {0})])
async def test_what_becomes_of_sequences_under_way(
    executor: ComputeExecutor, tmp_path: Path, policy: KvPolicy, versions: set[int]
) -> None:
    """Each token names the weights that drew it; under `drain`, none that has begun ever sees other weights."""
    scene = Scene(executor, tmp_path, kv_policy=policy, tokens=0)
    box = scene.box(scene.update(step=1, version=1, shift=0.3))
    sampler = Sampler(executor.submit, scene.engine)
    request = SampleRequest(
        prompt=PROMPT, sampling=Sampling(max_tokens=100, ignore_eos=True), seeds=(1, 2), stream=True
    )
    sampled: list[int] = []
    async for event in sampler.stream(request):
        if not sampled:
            await box.run()
        sampled += [event.version] if hasattr(event, "version") else []
    assert set(sampled) == versions
    assert sampled == sorted(sampled)
    assert len(sampled) == 200
    [late] = await sampler.complete(SampleRequest(prompt=PROMPT, sampling=Sampling(max_tokens=3), seeds=(1,)))
    assert set(late.versions) == {1}, "afterwards rows are let in again"


@pytest.mark.parametrize("probe", ["at the start", "after a swap"])
async def test_weights_whose_probabilities_are_not_numbers_end_the_run(
    executor: ComputeExecutor, tmp_path: Path, probe: str
) -> None:
    """A difference that is not a number is no small one."""
    scene = Scene(executor, tmp_path)
    broken = scene.update(step=1, version=1, shift=float("nan"))
    if probe == "at the start":
        executor.submit(lambda: scene.policy.publish(broken.parameters, version=0, step=0, fingerprint="")).result()
    box = scene.box(broken)
    with pytest.raises(ParityError, match="differ by nan nats"):
        await box.run()
    with pytest.raises(QueueClosed):
        scene.updates.inbox()


async def test_drift_is_reported_and_beyond_the_bound_ends_the_run(
    executor: ComputeExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`warn_nats` and `stop_nats`, in nats, at the start and after each swap, on the tokens last trained on."""
    scene = Scene(executor, tmp_path, warn_nats=0.01, stop_nats=0.1)
    differences, probed = iter([0.001, 0.05, 0.2]), []

    def probe(policy: Any, engine: Any, prompt: Any, completion: Any, **_: Any) -> ParityReport:
        probed.append((prompt, completion))
        difference = next(differences)
        return ParityReport(tokens=4, max_difference=difference)

    monkeypatch.setattr(module, "check_parity", probe)
    box = scene.box(*(scene.update(step=step, version=step) for step in (1, 2, 3)))
    with structlog.testing.capture_logs() as logs, pytest.raises(ParityError, match=r"0\.2 nats at version 2"):
        await box.run()
    assert [(line["event"], line["nats"], line["version"]) for line in logs] == [("parity_drift", 0.05, 1)]
    assert probed == [(PROMPT[:2], PROMPT[2:]), (PROMPT[:3], (7, 8, 9, 10)), (PROMPT[:3], (7, 8, 9, 10))]
    assert box.largest_drift == 0.2


async def test_it_is_ready_when_sampler_and_learner_agree(executor: ComputeExecutor, tmp_path: Path) -> None:
    """Those that start after it, and with them the first prompt, wait for that; not for any update."""
    box, seen = Scene(executor, tmp_path).box(), []

    class Handshake(TaskStatus[None]):
        def started(self, value: None = None) -> None:
            seen.append(box.largest_drift)

    await box.run(task_status=Handshake())
    assert len(seen) == 1
    assert 0 < seen[0] < 1e-3


async def test_no_probe_where_none_is_wanted(executor: ComputeExecutor, tmp_path: Path) -> None:
    """`tokens = 0` compares nothing, not even what would end the run."""
    scene = Scene(executor, tmp_path, tokens=0)
    box = scene.box(scene.update(step=1, version=1, shift=float("nan")))
    await box.run()
    assert (scene.policy.version, box.largest_drift) == (1, 0.0)


async def test_a_swap_that_fails_announces_nothing(executor: ComputeExecutor, tmp_path: Path) -> None:
    """Parameters that do not fit leave the served ones, and the generator where it was."""
    scene = Scene(executor, tmp_path)
    fitting = scene.update(step=1, version=1)
    box = scene.box(structs.replace(fitting, parameters={"model": {}}))
    with pytest.raises(ValueError, match="lora_a"):
        await box.run()
    assert (scene.policy.version, scene.weights.revision) == (0, 0)
