"""Broadcaster -> generator, server: serves the newest weights, and checks parity between sampler and learner."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Generator

import anyio
import structlog
from anyio.abc import TaskStatus

from clotho.config.schema import KvPolicy, ParityCheck, ParitySection
from clotho.inference import DecodeEngine
from clotho.models.policy import Policy
from clotho.runtime.compute_thread import ComputeExecutor, finish
from clotho.runtime.latest import Latest
from clotho.scoring.teacher_forcing import ParityReport, TeacherForcing, check_parity
from protocols.errors import ParityError
from protocols.queues import Inbox
from protocols.step import PolicyUpdated, WeightsReady

log = structlog.get_logger(actor="broadcaster")

SWAPS_KEPT = 4096


class SwapTimes:
    """Durations of the weight swaps since the last start, in seconds; None before the first swap.

    count: number of swaps; median and longest are those of the last `SWAPS_KEPT`.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seconds: deque[float] = deque(maxlen=SWAPS_KEPT)

    def add(self, seconds: float) -> None:
        """Record a swap."""
        self.count += 1
        self._seconds.append(seconds)

    @property
    def last(self) -> float | None:
        """Duration of the last swap."""
        return self._seconds[-1] if self._seconds else None

    @property
    def median(self) -> float | None:
        """Median duration."""
        return statistics.median(self._seconds) if self._seconds else None

    @property
    def longest(self) -> float | None:
        """Longest duration."""
        return max(self._seconds, default=None)


class Broadcaster:
    """Swaps the served weights between decode steps, then announces the version.

    A swap copies nothing: the served parameters become references to the learner's arrays. After each swap, a parity
    check computes the log-probabilities of a few tokens both by decoding and by teacher forcing. Differences above
    `parity.warn_nats` are logged; a difference above `parity.stop_nats` raises ParityError.

    largest_drift: largest difference so far, in nats.
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
        parity_prompt: tuple[int, ...],
        swap_times: SwapTimes,
    ) -> None:
        """parity_prompt: tokens for parity checks before the first group has been trained on."""
        self._inbox, self._weights = inbox, weights
        self._executor, self._policy, self._engine = executor, policy, engine
        self._settings, self._kv_policy, self._temperature = settings, kv_policy, temperature
        self._parity_tokens = settings.tokens if isinstance(settings, ParityCheck) else 0
        self._sample = _split(parity_prompt, self._parity_tokens)
        self._swap_times = swap_times
        self._forcing: TeacherForcing | None = None
        self.largest_drift = 0.0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Check parity once, signal readiness, then swap for every update that changed the policy."""
        async with self._inbox:
            await self._check_parity()
            task_status.started()
            async for update in self._inbox:
                await self._broadcast(update)

    async def _broadcast(self, update: PolicyUpdated) -> None:
        report = update.report
        if report.version != self._policy.version:
            self._swap_times.add(await finish(self._executor.submit_steps(self._swap(update))))
            if report.trained:
                group = report.trained[0].scored.group
                self._sample = (group.prompt.tokens, group.completions[0].tokens[: self._parity_tokens])
        self._weights.put(WeightsReady(version=report.version, step=report.step, fingerprint=report.fingerprint))
        if report.trained:
            await self._check_parity()

    def _swap(self, update: PolicyUpdated) -> Generator[None, None, float]:
        if self._kv_policy == "drain":
            self._engine.admission_paused = True
            try:
                while self._engine.policy_rows:
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

    async def _check_parity(self) -> None:
        (prompt, completion), settings = self._sample, self._settings
        if not completion or not isinstance(settings, ParityCheck):
            return
        parity: ParityReport = await finish(self._executor.submit(lambda: self._compare(prompt, completion)))
        self.largest_drift = max(self.largest_drift, parity.max_difference)
        if not parity.max_difference <= settings.stop_nats:  # NaN counts as exceeding the threshold
            raise ParityError(
                f"the log-probabilities of sampler and learner differ by {parity.max_difference:.3g} nats at version "
                f"{self._policy.version} (parity.stop_nats = {settings.stop_nats:g}): "
                "the served weights are not the trained weights"
            )
        if parity.max_difference > settings.warn_nats:
            log.warning("parity_drift", nats=parity.max_difference, version=self._policy.version)

    def _compare(self, prompt: tuple[int, ...], completion: tuple[int, ...]) -> ParityReport:
        """Run the parity check in the compute thread."""
        self._forcing = self._forcing or TeacherForcing(self._policy.model, self._policy.vocab_size)
        return check_parity(
            self._policy,
            self._engine,
            prompt,
            completion,
            temperature=self._temperature,
            forcing=self._forcing,
        )


def _split(tokens: tuple[int, ...], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split off the last `count` tokens as a completion; the prompt keeps at least one token."""
    cut = max(1, len(tokens) - count)
    return tokens[:cut], tokens[cut:]
