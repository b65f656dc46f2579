"""The served engine as the HTTP server sees it: health, metrics, models by name, and scores of prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import structlog
from prometheus_client.core import Metric

from clotho.engine_metrics import engine_metrics
from clotho.extension import Door
from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute, ComputeThread, finish
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.sampler import Sampler
from clotho.serving.metrics import counter
from clotho.serving.services import EngineAccess, HealthReport
from clotho.settings.engine import KvPolicy
from protocols.sampling import PromptLogprobs
from protocols.step import WeightsReady
from training_run.profile.schema import MonitorSection
from training_run.records.terminal_text import relative_path
from training_run.supervision.supervisor import Child, ChildState, ChildStatus, RestartPolicy, describe_error, permanent
from training_run.supervision.watchdog import ENGINE_RESTARTS, EngineGuard, Watchdog

log = structlog.get_logger(actor="pipeline")

SERVER_RESTARTS = RestartPolicy(max_restarts=3)
"""How often the HTTP server is restarted."""

WATCHES: Door[[Compute, DecodeEngine], Sequence[Child]] = Door("attachment.watches")
"""Returns children that look after a decode engine, in a run and in `serve`."""


def report_failure(name: str, error: Exception) -> None:
    """Log a failure of an actor that does not end the run, or the server."""
    log.warning("actor_failed", actor=name, error=describe_error(error))


class ServingState:
    """Reads the state of the compute threads, the engine and the supervised actors.

    All methods but the coroutines return at once.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        children: Callable[[], dict[str, ChildStatus]],
        continues: str = "the server continues",
    ) -> None:
        """children: status of the supervised actors, by name.

        continues: what a failed temporary actor does not end.
        """
        self._sampler, self._children, self._continues = sampler, children, continues
        self._stalled = False

    def guards(self, settings: MonitorSection) -> list[Child]:
        """Return what reports stalls of the compute threads, looks after the engine, and restarts it if it fails."""
        sampler = self._sampler
        watchdog = Watchdog(
            "watchdog",
            lambda: sampler.compute.arbiter.busy_since,
            limit_seconds=settings.watchdog_seconds,
            on_stall=self.on_stall,
            on_recovered=self.on_recovery,
        )
        guard = EngineGuard(
            sampler.failure,
            submit=sampler.compute.decode.submit,
            fail_requests=sampler.engine.fail_all,
            attach=sampler.restart,
        )
        watches = WATCHES(sampler.compute, sampler.engine)
        return [permanent(watchdog), *chain.from_iterable(watches), permanent(guard, ENGINE_RESTARTS)]

    def on_stall(self, seconds: float) -> None:
        """Record that a compute thread has made no progress for `seconds`."""
        self._stalled = True
        log.error("compute_thread_stalled", seconds=round(seconds, 1))

    def on_recovery(self) -> None:
        """Record that it makes progress again."""
        self._stalled = False
        log.warning("compute_thread_recovered")

    def health(self) -> HealthReport:
        """The state for /health. A stalled compute thread and a decode engine that restarts are outages.

        A failed temporary actor is not.
        """
        children = {name: status.state.value for name, status in self._children().items()}
        failed = sorted(name for name, state in children.items() if state == ChildState.FAILED)
        busy = max(0.0, time.monotonic() - self._sampler.compute.arbiter.busy_since)
        report = partial(HealthReport, children=children, progress_seconds=busy)
        if self._stalled:
            return report(status="stalled", detail=f"a compute thread has made no progress for {busy:.0f} seconds")
        if children.get(EngineGuard.name) == ChildState.RESTARTING:
            return report(status="restarting", detail=f"{EngineGuard.name} restarts after a failure")
        return report(status="ok", detail=f"failed: {', '.join(failed)}; {self._continues}" if failed else "")

    async def score(self, tokens: tuple[int, ...], top: int, source: str) -> PromptLogprobs:
        """Log-probabilities of a prompt under the policy, the base model or an adapter, with `top` alternatives.

        source: as `SampleRequest.weights`. Raises RequestError for an unknown adapter.
        """
        return await self._sampler.prompt_logprobs(tokens, top=top, weights=source)

    def engine_access(self) -> EngineAccess:
        """Return the engine for attachments that control it."""
        return EngineAccess(submit=self._sampler.compute.decode.submit, engine=self._sampler.engine)

    def metrics(self, model: str, timed_out: Mapping[str, int]) -> Iterator[Metric]:
        """Yield metrics of engine, compute threads and actors, for /metrics. model, timed_out: as `engine_metrics`."""
        sampler = self._sampler
        stats, turns = sampler.engine.stats(), sampler.compute.arbiter.turn_times()
        tokens = sampler.settings.kv_cache_tokens
        yield from engine_metrics(stats, turns, kv_cache_tokens=tokens, model=model, timed_out=timed_out)
        restarts = {name: status.restarts for name, status in self._children().items()}
        yield counter("clotho_child_restarts", "Restarts of a supervised child.", restarts, by="child")


def names_of(path: str, files: Path | None) -> frozenset[str]:
    """Return the names of a base model in requests: its path, and the hub repository whose files it was loaded from."""
    cached = [part for part in (files.parts if files else ()) if part.startswith("models--")]
    repositories = [part.removeprefix("models--").replace("--", "/") for part in cached[-1:]]
    return frozenset({path, relative_path(path), *([str(files)] if files else []), *repositories})


async def swap_weights(
    decode: ComputeThread,
    policy: Policy,
    engine: DecodeEngine,
    kv_policy: KvPolicy,
    parameters: Parameters,
    ready: WeightsReady,
) -> float:
    """Serve `parameters`, which are evaluated, from now on; return the duration of the swap in seconds.

    With the KV policy `drain`, running rows finish first. Raises ValueError if the parameters are not the policy's.
    """

    def publish() -> float:
        return policy.publish(parameters, version=ready.version, step=ready.step, fingerprint=ready.fingerprint)

    return await finish(await finish(decode.submit(lambda: engine.swap(publish, kv_policy))))
