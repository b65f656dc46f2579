"""The broadcaster swaps weights between decode steps, announces every step, and ends the run if the parity check
fails.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
import structlog
from anyio.abc import TaskStatus
from mlx.utils import tree_map
from msgspec import structs

from actors import broadcaster as broadcaster_module
from actors.broadcaster import Broadcaster
from clotho.lanes.compute_thread import Compute, finish
from clotho.lanes.sampling_client import EngineSampler
from clotho.models.parameters import flat
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.bounds import Off
from clotho.settings.engine import EngineSection, KvPolicy
from protocols.errors import ParityError
from protocols.queues import QueueClosed
from protocols.sampling import SampleRequest, Sampling
from protocols.step import PolicyUpdated, TrainedGroup, WeightsReady
from tests.actors.actor_helpers import filled_queue, policy_updated, served_policy
from tests.learner_settings import learner_settings
from tests.training.policies_and_groups import scored_group
from tests.training_run.simulated_run import METRICS
from training_run.groups.progress import SwapTimes
from training_run.parity_check import ParityChecker, ParityReport, ParitySample
from training_run.profile.schema import ParityCheck, ParitySection
from training_run.serving import swap_weights
from training_run.supervision.latest import Latest

PROMPT = (5, 9, 33, 2, 17, 60)


PARITY = ParityCheck(budget=1.0)


class BroadcasterHarness:
    """A broadcaster of a tiny policy and its engine."""

    def __init__(
        self,
        compute: Compute,
        directory: Path,
        *,
        kv_policy: KvPolicy = "keep",
        parity: ParitySection = PARITY,
        dropout: float = 0.0,
        engine: EngineSection | None = None,
        **config: Any,
    ) -> None:
        """engine: its settings, if they are others. config: of the model, where it differs."""
        self.compute = compute
        self.engine_settings = engine or EngineSection(max_num_seqs=16, kv_policy=kv_policy)
        self.policy, self.engine = served_policy(compute, directory, engine, **config)
        self.weights = Latest[WeightsReady]("weights")
        self.swap_times = SwapTimes()
        self.settings, self.dropout = parity, dropout
        model = self.policy.copy_model()
        self.forcing = TeacherForcing(model.model, model.vocab_size, layout="packed")

    def update(self, *, step: int, version: int, shift: float = 0.0, trained: bool = True) -> PolicyUpdated:
        """Return the update of a batch: the initial weights with `shift` added to every parameter."""
        scored = scored_group([[7, 8, 9, 10]], [1.0], prompt=PROMPT[:3])

        def moved() -> Any:
            parameters = tree_map(lambda array: array + shift, self.policy.trainable())
            mx.eval(parameters)
            return parameters

        return policy_updated(
            self.compute.learner.submit(moved).result(),
            step=step,
            version=version,
            fingerprint=f"of {version}",
            trained=(TrainedGroup(scored=scored, advantages=(1.0,)),) if trained else (),
        )

    def broadcaster(self, *updates: PolicyUpdated) -> Broadcaster:
        """Return the broadcaster of these updates."""
        self.updates = filled_queue("updates", updates)
        return Broadcaster(
            inbox=self.updates.inbox(),
            weights=self.weights,
            compute=self.compute,
            policy=self.policy,
            engine=self.engine,
            settings=self.settings,
            engine_settings=self.engine_settings,
            temperature=1.0,
            parity_prompt=PROMPT,
            swap_times=self.swap_times,
            learner=learner_settings(),
            dropout=self.dropout,
            forcing=self.forcing,
        )


async def test_parity_checks_take_over_the_layout_of_the_learner(compute: Compute, tmp_path: Path) -> None:
    """It is checked once per run."""
    harness = BroadcasterHarness(compute, tmp_path)
    broadcaster = harness.broadcaster()
    await broadcaster.run()
    assert broadcaster._checker is not None
    assert broadcaster._checker._models.forcing.layout == harness.forcing.layout == "packed"


async def test_every_update_is_served_and_announced(compute: Compute, tmp_path: Path) -> None:
    """The served parameters are the learner's arrays under the learner's version, and the parity check passes."""
    harness = BroadcasterHarness(compute, tmp_path)
    updates = [harness.update(step=1, version=1, shift=0.1), harness.update(step=2, version=2, shift=0.2)]
    broadcaster = harness.broadcaster(*updates)
    await broadcaster.run()
    assert harness.weights.value == WeightsReady(version=2, step=2, fingerprint="of 2")
    assert (harness.policy.version, harness.policy.fingerprint) == (2, "of 2")
    served = flat(harness.policy.trainable())
    assert all(served[name] is array for name, array in flat(updates[-1].parameters).items())
    swaps = harness.swap_times
    assert swaps.count == 2
    assert swaps.median
    assert swaps.longest
    assert 0 < swaps.median <= swaps.longest
    assert 0 <= broadcaster.largest_drift < 1e-3


async def test_a_step_without_an_update_is_announced(compute: Compute, tmp_path: Path) -> None:
    """The generator counts steps, so it would wait forever without the announcement."""
    harness = BroadcasterHarness(compute, tmp_path)
    broadcaster = harness.broadcaster(harness.update(step=1, version=0, trained=False))
    await broadcaster.run()
    assert (harness.weights.value.step, harness.weights.value.version) == (1, 0)
    assert (harness.swap_times.count, harness.swap_times.last) == (0, None)


@pytest.mark.parametrize(("policy", "versions"), [("keep", {0, 1}), ("recompute", {0, 1}), ("drain", {0})])
async def test_running_sequences_follow_the_kv_cache_policy(
    compute: Compute, tmp_path: Path, policy: KvPolicy, versions: set[int]
) -> None:
    """Each token has the version of the weights that sampled it. Under `drain`, a running sequence has one version."""
    harness = BroadcasterHarness(compute, tmp_path, kv_policy=policy, parity=Off())
    broadcaster = harness.broadcaster(harness.update(step=1, version=1, shift=0.3))
    sampler = EngineSampler(compute.decode.submit, harness.engine)
    request = SampleRequest(
        prompt=PROMPT, sampling=Sampling(max_tokens=100, ignore_eos=True), seeds=(1, 2), stream=True
    )
    sampled: list[int] = []
    async for event in sampler.stream(request):
        if not sampled:
            await broadcaster.run()
        sampled += [event.version] if hasattr(event, "version") else []
    assert set(sampled) == versions
    assert sampled == sorted(sampled)
    assert len(sampled) == 200
    [late] = await sampler.complete(SampleRequest(prompt=PROMPT, sampling=Sampling(max_tokens=3), seeds=(1,)))
    assert set(late.versions) == {1}, "afterwards rows are let in again"


@pytest.mark.parametrize("probe", ["at the start", "after a swap"])
async def test_nan_log_probabilities_end_the_run(compute: Compute, tmp_path: Path, probe: str) -> None:
    """NaN exceeds every threshold of the parity check."""
    harness = BroadcasterHarness(compute, tmp_path)
    broken = harness.update(step=1, version=1, shift=float("nan"))
    if probe == "at the start":
        compute.decode.submit(
            lambda: harness.policy.publish(broken.parameters, version=0, step=0, fingerprint="")
        ).result()
    broadcaster = harness.broadcaster(broken)
    with pytest.raises(ParityError, match="nan nats"):
        await broadcaster.run()
    with pytest.raises(QueueClosed):
        harness.updates.inbox()


def difference(*, kl: float = 0.0, nats: float = 0.0, served: float = 0.0) -> ParityReport:
    """Return the report of a check."""
    return ParityReport(rows=2, tokens=4, mean_kl=kl, max_difference=nats, served_kl=served)


@pytest.mark.parametrize("last", [difference(kl=0.2), difference(served=1e-6), difference(kl=float("nan"))])
async def test_the_mean_kl_divergence_stops_the_run(
    compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: ParityReport
) -> None:
    """At the start and after each swap, on the tokens of the last update. Large differences of one token only warn."""
    harness = BroadcasterHarness(compute, tmp_path, parity=ParityCheck(budget=1.0, stop_kl=0.1))
    found, probed = iter([difference(), difference(kl=0.09, nats=9.0), last]), []

    def probe(self: ParityChecker, sample: ParitySample, *_: Any, **__: Any) -> ParityReport:
        probed.append(sample)
        return next(found)

    monkeypatch.setattr(ParityChecker, "check", probe)
    broadcaster = harness.broadcaster(*(harness.update(step=step, version=step) for step in (1, 2, 3)))
    with pytest.raises(ParityError, match="version 2"):
        await broadcaster.run()
    assert probed[0] == ParitySample(PROMPT[:1], (PROMPT[1:],))
    assert probed[1:] == [ParitySample(PROMPT[:3], ((7, 8, 9, 10),))] * 2
    assert broadcaster.largest_drift == 9.0


@pytest.mark.parametrize(("budget", "checks"), [(0.0, 1), (1.0, 4)])
async def test_checks_after_the_first_one_keep_to_the_budget(
    compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float, checks: int
) -> None:
    """Without a budget only the start is checked; with the whole time, every swap."""
    harness = BroadcasterHarness(compute, tmp_path, parity=ParityCheck(budget=budget))
    probed: list[ParitySample] = []

    def probe(self: ParityChecker, sample: ParitySample, *_: Any, **__: Any) -> ParityReport:
        probed.append(sample)
        return difference()

    monkeypatch.setattr(ParityChecker, "check", probe)
    await harness.broadcaster(*(harness.update(step=step, version=step) for step in (1, 2, 3))).run()
    assert len(probed) == checks


async def test_decode_steps_of_a_check_have_at_most_as_many_rows_as_it_compares_tokens(
    compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine could decode 16 rows."""
    harness, rows = BroadcasterHarness(compute, tmp_path, parity=ParityCheck(tokens=3)), []
    check = ParityChecker.check

    def probe(*given: Any, **options: Any) -> ParityReport:
        report = check(*given, **options)
        rows.append(report.rows)
        return report

    monkeypatch.setattr(ParityChecker, "check", probe)
    await harness.broadcaster().run()
    assert rows == [3]


async def test_a_check_waits_until_it_is_within_its_share_of_the_time(
    compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check of 1 second every 20 seconds, with a budget of 3 %: the second one comes after 34 seconds."""
    harness = BroadcasterHarness(compute, tmp_path, parity=ParityCheck(budget=0.03))
    now = [0.0]
    monkeypatch.setattr("actors.broadcaster.time", SimpleNamespace(monotonic=lambda: now[0]))
    checked: list[float] = []

    def probe(self: ParityChecker, sample: ParitySample, *_: Any, **__: Any) -> ParityReport:
        checked.append(now[0])
        now[0] += 1.0
        return difference()

    monkeypatch.setattr(ParityChecker, "check", probe)
    swap = swap_weights

    async def later(*arguments: Any) -> float:
        now[0] += 20.0
        return await swap(*arguments)

    monkeypatch.setattr(broadcaster_module, "swap_weights", later)
    await harness.broadcaster(*(harness.update(step=step, version=step) for step in (1, 2, 3, 4))).run()
    assert checked == [0.0, 41.0, 82.0]


async def test_an_array_that_something_else_put_into_the_served_model_ends_the_run(
    compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found before the next swap, without a computation, whatever the budget is."""
    harness = BroadcasterHarness(compute, tmp_path, parity=ParityCheck(budget=0.0))
    first, second = (harness.update(step=step, version=step, shift=0.1 * step) for step in (1, 2))
    swap = swap_weights

    def exchange() -> None:
        adapted = harness.policy.adapted[0].adapted
        adapted["lora_a"] = mx.array(adapted["lora_a"])

    async def swap_and_exchange(*arguments: Any) -> float:
        seconds = await swap(*arguments)
        await finish(compute.decode.submit(exchange))
        return seconds

    monkeypatch.setattr(broadcaster_module, "swap_weights", swap_and_exchange)
    with pytest.raises(ParityError, match="version 1"):
        await harness.broadcaster(first, second).run()


async def test_a_warning_per_change_of_level(compute: Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest difference of one token is logged above `warn_nats`, and again if it has doubled."""
    harness = BroadcasterHarness(compute, tmp_path, parity=ParityCheck(budget=1.0, warn_nats=0.1))
    found = iter([0.05, 0.11, 0.12, 0.2, 0.23, 0.4, 0.05, 0.12])

    def probe(*_: Any, **__: Any) -> ParityReport:
        return difference(nats=next(found))

    monkeypatch.setattr(ParityChecker, "check", probe)
    broadcaster = harness.broadcaster(*(harness.update(step=step, version=step) for step in range(1, 8)))
    with structlog.testing.capture_logs() as logs:
        await broadcaster.run()
    assert [(line["event"], line["nats"], line["version"]) for line in logs] == [
        ("parity_drift", 0.11, 1),
        ("parity_drift", 0.23, 4),
    ]


@pytest.mark.parametrize(
    ("other", "dropout", "kv_policy"),
    [
        ({}, 0.0, "keep"),
        ({"staleness": (1,)}, 0.0, "keep"),
        ({"replayed": 1}, 0.0, "keep"),
        ({"update": None}, 0.0, "keep"),
        ({}, 0.1, "keep"),
        ({}, 0.0, "recompute"),
    ],
)
async def test_recorded_log_probabilities_that_differ_stop_the_run(
    compute: Compute, tmp_path: Path, *, other: dict[str, Any], dropout: float, kv_policy: KvPolicy
) -> None:
    """The recorded log-probabilities of a batch belong to its prompts, unless other weights sampled some tokens."""
    harness = BroadcasterHarness(compute, tmp_path, dropout=dropout, kv_policy=kv_policy)
    update = harness.update(step=1, version=1)
    metrics = structs.replace(METRICS, mismatch_kl=0.1)
    report = structs.replace(update.report, **({"update": metrics} | other))
    broadcaster = harness.broadcaster(structs.replace(update, report=report))
    stops = not other and not dropout
    with pytest.raises(ParityError, match="step 1") if stops else nullcontext():
        await broadcaster.run()
    assert harness.policy.version == (0 if stops else 1)


@pytest.mark.parametrize(("kv_policy", "stops"), [("keep", False), ("recompute", True), ("drain", True)])
async def test_kept_kv_caches_end_the_comparison_of_recorded_log_probabilities(
    compute: Compute, tmp_path: Path, *, kv_policy: KvPolicy, stops: bool
) -> None:
    """After a swap, tokens of the new version can follow a prompt whose KV cache is that of the old version."""
    harness = BroadcasterHarness(compute, tmp_path, kv_policy=kv_policy)
    updates = [harness.update(step=step, version=step) for step in (1, 2)]
    metrics = structs.replace(METRICS, mismatch_kl=0.1)
    updates[1] = structs.replace(updates[1], report=structs.replace(updates[1].report, update=metrics))
    with pytest.raises(ParityError, match="step 2") if stops else nullcontext():
        await harness.broadcaster(*updates).run()
    assert harness.policy.version == (1 if stops else 2)


@pytest.mark.needs_float32
async def test_the_broadcaster_is_ready_after_the_first_parity_check(compute: Compute, tmp_path: Path) -> None:
    """Actors that start later wait for the check, but not for an update."""
    broadcaster, seen = BroadcasterHarness(compute, tmp_path).broadcaster(), []

    class Handshake(TaskStatus[None]):
        def started(self, value: None = None) -> None:
            seen.append(broadcaster.largest_drift)

    await broadcaster.run(task_status=Handshake())
    assert len(seen) == 1
    assert 0 < seen[0] < 1e-3


async def test_the_parity_check_can_be_turned_off(compute: Compute, tmp_path: Path) -> None:
    """With `parity = "off"` NaN weights are served."""
    harness = BroadcasterHarness(compute, tmp_path, parity=Off())
    broadcaster = harness.broadcaster(harness.update(step=1, version=1, shift=float("nan")))
    await broadcaster.run()
    assert (harness.policy.version, broadcaster.largest_drift) == (1, 0.0)


async def test_a_failed_swap_is_not_announced(compute: Compute, tmp_path: Path) -> None:
    """Parameters of wrong shape leave the served weights and the announced step unchanged."""
    harness = BroadcasterHarness(compute, tmp_path)
    fitting = harness.update(step=1, version=1)
    broadcaster = harness.broadcaster(structs.replace(fitting, parameters={"model": {}}))
    with pytest.raises(ValueError, match="lora_a"):
        await broadcaster.run()
    assert (harness.policy.version, harness.weights.revision) == (0, 0)
