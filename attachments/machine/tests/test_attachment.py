"""The machine of a run: its watches, readings and findings."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from attachments.machine import attachment
from attachments.machine.periodic import PeriodicCheck
from attachments.machine.pressure import MemoryReading
from attachments.machine.resources import ResourceProbe, ResourceReading
from attachments.machine.tests import simulated_mac
from protocols.sampling import SampleRequest, Sampling
from tests.training_run.built_context import open_context, tiny_profile
from training_run.memory.estimate import estimate_memory
from training_run.run_monitor import RunMonitor


async def test_memory_pressure_limits_the_engine_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is a metric of /metrics and of metrics.jsonl; MLX's freed buffers are returned."""
    freed: list[None] = []
    monkeypatch.setattr("clotho.models.machine.free_buffers", lambda: freed.append(None))
    critical = MemoryReading(level="critical", swap_bytes=0, available_bytes=0)
    monkeypatch.setattr("attachments.machine.pressure.read_memory", lambda: critical)
    async with open_context(tiny_profile(tmp_path)) as run:
        monitor = RunMonitor(run, queues=[], children=dict)
        (child,) = attachment.watches(run.compute, run.sampler.engine)
        assert (run.sampler.engine.stats().rows_limit, monitor.gauges().rows_limit) == (256, 256)
        assert isinstance(child.actor, PeriodicCheck)
        child.actor.check()
        run.compute.decode.submit(lambda: None).result()
        assert (run.sampler.engine.stats().rows_limit, monitor.gauges().rows_limit) == (128, 128)
    assert len(freed) == 1


async def test_growing_swap_counts_after_the_first_completions_and_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, a run takes memory once, and the system makes room for it."""
    swap = 0

    def read() -> MemoryReading:
        nonlocal swap
        swap += 2**30
        return MemoryReading(level="normal", swap_bytes=swap, available_bytes=2**33)

    monkeypatch.setattr("attachments.machine.pressure.read_memory", read)
    async with open_context(tiny_profile(tmp_path)) as run:
        (child,) = attachment.watches(run.compute, run.sampler.engine)
        watch = child.actor
        assert isinstance(watch, PeriodicCheck)

        def limit_after_two_checks() -> int:
            watch.check()
            watch.check()
            run.compute.decode.submit(lambda: None).result()
            return run.sampler.engine.stats().rows_limit

        assert limit_after_two_checks() == 256
        request = SampleRequest(prompt=(1, 2, 3), sampling=Sampling(max_tokens=2), seeds=(1,))
        await run.sampler.client.complete_all([request])
        assert limit_after_two_checks() == 256
        run.compute.learner.submit(lambda: None).result()
        assert limit_after_two_checks() == 128


async def test_a_run_has_the_readings_of_its_machine_and_their_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first reading on."""
    reading = ResourceReading(on_battery=True, resident_bytes=5)
    monkeypatch.setattr(ResourceProbe, "read", lambda _: reading)
    async with open_context(tiny_profile(tmp_path)) as run, anyio.create_task_group() as tasks:
        (watch,) = (child.actor for child in run.attached.services if child.actor.name == "resource watch")
        tasks.start_soon(watch.run)
        metrics = [measure for measure in run.attached.measures if "resources/resident_bytes" in measure(1.0)]
        while metrics[0](1.0)["resources/resident_bytes"] != 5:
            await anyio.lowlevel.checkpoint()
        assert "on_battery" in [finding.name for finding in run.findings.now]
        tasks.cancel_scope.cancel()


def test_the_state_of_the_machine_is_a_fact_and_its_lack_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the policy is loaded, at the start of a run and in `doctor`."""
    state = simulated_mac.machine(swap=3 << 30)
    monkeypatch.setattr("attachments.machine.machine.read_machine", lambda path, blas: state)
    profile = tiny_profile(tmp_path)
    assert "of swap in use" in attachment.facts(profile)["system"]
    found = attachment.findings(profile, estimate_memory(profile.model, profile))
    assert [finding.name for finding in found] == ["swap_in_use"]
