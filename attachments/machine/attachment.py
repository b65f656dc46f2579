"""The machine of a run: readings of its resources, findings about them, and fewer rows under memory pressure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clotho.process import load_blas
from protocols.finding import Finding
from protocols.summary import MemoryEstimate
from training_run.supervision.supervisor import Child, permanent, temporary

if TYPE_CHECKING:
    from clotho.inference.engine import DecodeEngine
    from clotho.lanes.compute_thread import Compute
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


METRICS: Mapping[str, str] = {
    "resources/resident_bytes": "Resident memory of the process. All values of resources are from the latest "
    "reading, which is at most about ten seconds old; null if the system does not report them.",
    "resources/cpu_share": "CPU seconds of the process per second; 1 is one core.",
    "resources/swap_bytes": "Used swap of the machine.",
    "resources/swap_change_bytes": "Change of the used swap since the start of the process.",
    "resources/available_bytes": "Memory of the machine that is available without swap.",
    "resources/gpu_share": "Fraction of the time in which the GPU works.",
    "resources/power_watts": "Power of the GPU (NVIDIA), or of the whole machine (Mac with a battery).",
}


def facts(profile: Profile) -> Mapping[str, str]:
    """Return the state of the system."""
    from attachments.machine.machine import described, read_machine
    from training_run.machine import describe_machine

    blas = load_blas()
    return {"system": described(read_machine(Path(profile.run_dir), blas=blas), describe_machine(blas=blas).system)}


def findings(profile: Profile, estimate: MemoryEstimate) -> Iterable[Finding]:
    """Yield what the run lacks on this machine."""
    from attachments.machine.machine import machine_findings, needs_of, read_machine

    state = read_machine(Path(profile.run_dir), blas=load_blas())
    yield from machine_findings(state, needs_of(profile, estimate))


def watches(compute: Compute, engine: DecodeEngine) -> Sequence[Child]:
    """Return the child that limits the rows of an engine under memory pressure."""
    from attachments.machine.periodic import PeriodicCheck
    from attachments.machine.pressure import CHECK_SECONDS, MemoryWatch, read_memory
    from clotho.models.machine import free_buffers

    def apply(rows: int) -> None:
        """Set the limit in the decode thread; if it is lower, also free the buffers that MLX keeps for reuse."""

        def limit() -> None:
            if rows < engine.stats().rows_limit:
                free_buffers()
            engine.limit_rows(rows)

        compute.decode.submit(limit)

    def updates() -> int:
        return sum(compute.arbiter.turn_times()["update"].seconds.counts)

    rehearsed = updates()

    def settled() -> bool:
        """Whether the first completions have ended and, beside a learner, its first update has."""
        learns = rehearsed and (updates() == rehearsed or compute.arbiter.works("update"))
        return bool(sum(engine.stats().finished.values())) and not learns

    watch = MemoryWatch(engine.stats().rows_limit, apply=apply, read=read_memory, settled=settled)
    return [permanent(PeriodicCheck("memory watch", watch.check, seconds=CHECK_SECONDS))]


async def prepare(plan: Plan) -> Attach | None:
    """Read the resources of the machine while the run goes on."""

    async def attach(run: RunContext) -> None:
        """Add the checks of the machine, and what measures its resources."""
        from attachments.machine.alarms import MachineCheck
        from attachments.machine.periodic import PeriodicReading
        from attachments.machine.pressure import read_memory
        from attachments.machine.resources import READ_SECONDS, ResourceProbe, ResourceReading

        check = MachineCheck()
        run.findings.add_check(check)

        latest = ResourceReading()

        def take(reading: ResourceReading) -> None:
            nonlocal latest
            latest = reading
            check.take(reading)
            run.findings.refresh()

        def measure(_: float) -> Mapping[str, Any]:
            return {name: getattr(latest, name.removeprefix("resources/")) for name in METRICS}

        run.attached.measures.append(measure)

        probe = ResourceProbe(read_memory)
        watch = PeriodicReading("resource watch", probe.read, take, seconds=READ_SECONDS)
        run.attached.services.append(temporary(watch))

    return attach
