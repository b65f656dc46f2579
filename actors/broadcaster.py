"""Broadcaster: makes the newest weights the ones that serve, and proves that they are the ones that were learned."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Generator

import anyio
import structlog
from anyio.abc import TaskStatus

from clotho.config.schema import KvPolicy, ParitySection
from clotho.inference import DecodeEngine
from clotho.models.policy import Policy
from clotho.runtime.compute_thread import ComputeExecutor, finish
from clotho.runtime.latest import Latest
from clotho.scoring.parity import ParityReport, probe
from clotho.scoring.teacher_forcing import TeacherForcing
from protocols.errors import ParityError
from protocols.queues import Inbox
from protocols.step import PolicyUpdated, SwapTimes, WeightsReady

log = structlog.get_logger(actor="broadcaster")

REMEMBERED_SWAPS = 4096


class Broadcaster:
    """Swaps weights in between decode ticks, then tells everyone who samples.

    Nothing is copied or serialised: the served parameters become pointers to the arrays that the learner computed.
    After every swap a few tokens are scored both ways, as the engine decodes and as the learner learns: a small
    difference is rounding, a larger one is logged, one beyond `stop_nats` nats raises ParityError.

    largest_drift: the largest difference seen so far, in nats.
    """

    name = "broadcaster"

    def __init__(
        self,
        *,
        inbox: Inbox[PolicyUpdated],
        weights: Latest[WeightsReady],
        executor: ComputeExecutor,
        policy: Policy,
        engine: DecodeEngine,
        settings: ParitySection,
        kv_policy: KvPolicy,
        temperature: float,
        probe_prompt: tuple[int, ...],
    ) -> None:
        """probe_prompt: what is scored both ways until the first group has been trained on."""
        self._inbox, self._weights = inbox, weights
        self._executor, self._policy, self._engine = executor, policy, engine
        self._settings, self._kv_policy, self._temperature = settings, kv_policy, temperature
        self._sample = _split(probe_prompt, settings.tokens)
        self._swap_seconds: deque[float] = deque(maxlen=REMEMBERED_SWAPS)
        self._forcing: TeacherForcing | None = None
        self.largest_drift = 0.0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Probe once as it stands, which makes it ready; then swap for every update that changed the policy."""
        async with self._inbox:
            await self._probe()
            task_status.started()
            async for update in self._inbox:
                await self._broadcast(update)

    async def _broadcast(self, update: PolicyUpdated) -> None:
        report = update.report
        if report.version != self._policy.version:
            self._swap_seconds.append(await finish(self._executor.submit_steps(self._swap(update))))
            if report.trained:
                group = report.trained[0].scored.group
                self._sample = (group.prompt.tokens, group.completions[0].tokens[: self._settings.tokens])
        self._weights.put(WeightsReady(version=report.version, step=report.step, fingerprint=report.fingerprint))
        if report.trained:
            await self._probe()

    def swaps(self) -> SwapTimes:
        """How long the swaps so far took."""
        seconds = self._swap_seconds or (0.0,)
        return SwapTimes(
            count=len(self._swap_seconds), last=seconds[-1], median=statistics.median(seconds), longest=max(seconds)
        )

    def _swap(self, update: PolicyUpdated) -> Generator[None, None, float]:
        if self._kv_policy == "drain":
            self._engine.admission_paused = True
            try:
                while self._engine.running:
                    self._engine.tick()
                    yield
            finally:
                self._engine.admission_paused = False
        report = update.report
        seconds = self._policy.publish(
            update.parameters, version=report.version, step=report.step, fingerprint=report.fingerprint
        )
        self._engine.weights_changed(self._kv_policy)
        return seconds

    async def _probe(self) -> None:
        prompt, completion = self._sample
        if not completion or not self._settings.tokens:
            return
        parity: ParityReport = await finish(self._executor.submit(lambda: self._compare(prompt, completion)))
        self.largest_drift = max(self.largest_drift, parity.max_difference)
        if not parity.max_difference <= self._settings.stop_nats:  # also where it is not a number
            raise ParityError(
                f"sampler and learner differ by {parity.max_difference:.3g} nats on the same tokens at version "
                f"{self._policy.version} (parity.stop_nats = {self._settings.stop_nats:g}): "
                "what is served is not what is trained"
            )
        if parity.max_difference > self._settings.warn_nats:
            log.warning("parity drift", nats=parity.max_difference, version=self._policy.version)

    def _compare(self, prompt: tuple[int, ...], completion: tuple[int, ...]) -> ParityReport:
        """In the compute thread, which also makes what scores as the learner does."""
        self._forcing = self._forcing or TeacherForcing(self._policy.model, self._policy.vocab_size)
        return probe(
            self._policy,
            self._engine,
            prompt,
            completion,
            temperature=self._temperature,
            forcing=self._forcing,
        )


def _split(tokens: tuple[int, ...], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt and its last `count` tokens, as if they had been sampled; the prompt keeps at least one."""
    cut = max(1, len(tokens) - count)
    return tokens[:cut], tokens[cut:]
