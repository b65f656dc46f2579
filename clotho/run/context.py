"""What the actors of one run share, and what can be seen of it from outside: gauges, health, the books.

The books of a run: how many groups there were, and where each of them is.
"""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
from msgspec import structs
from rich.console import Console

from clotho.config.schema import Profile
from clotho.cpu import compute_path
from clotho.inference.sample_log import SampleLog, token_cost
from clotho.models.machine import describe_machine, peak_memory
from clotho.monitoring.display import RunFacts
from clotho.monitoring.live_display import make_display
from clotho.monitoring.summary import resume_command
from clotho.monitoring.terminal_text import relative_path
from clotho.run.startup import Components
from clotho.runtime.child import ChildStatus
from clotho.runtime.compute_thread import finish
from clotho.runtime.latest import Latest
from clotho.runtime.plugins import Services
from clotho.runtime.queues import Queue
from clotho.runtime.sampling_client import Sampler
from clotho.scoring.prompt_logprobs import prompt_logprobs
from clotho.scoring.token_scores import SamplingDistribution
from clotho.serving.server import base_url
from clotho.serving.services import (
    EngineSnapshot,
    HealthReport,
    NullSampleLog,
    QueueSnapshot,
    RunSnapshot,
    ServerContext,
)
from clotho.training.ledger import Ledger
from protocols.accounting import Balance
from protocols.checkpoint import RunState
from protocols.evaluation import EvalReport
from protocols.sampling import PromptLogprobs
from protocols.step import PolicyUpdated, StepReport, SwapTimes, WeightsReady
from protocols.summary import QueueGauge, RunGauges, RunSummary

ON_THE_WAY = re.compile(r"(prompts|rollouts|scored)(\.(\d+|tapped))?")
"""Mailboxes that groups lie in on their way to the learner; a tap's are no such, for it is given copies."""


class GroupAccounting:
    """What the box at which groups begin says of them, the learner's ledger, and the mailboxes between the two.

    That box is the prompter, or the fetcher of what environments send; a user's own in its place may say less, and is
    taken at as much as it says.
    """

    def __init__(self, ledger: Ledger, state: RunState | None, *, groups: int) -> None:
        """state: what the run resumes from; groups: of the whole run."""
        self._ledger, self._state, self._groups = ledger, state, groups
        self._source: Any = None
        self._mailboxes: Sequence[Queue[Any]] = ()

    def look_at(self, source: Any, mailboxes: Sequence[Queue[Any]]) -> None:
        """source: the box at which groups begin."""
        self._source, self._mailboxes = source, mailboxes

    def asked(self) -> int:
        """Groups asked so far, over all lives of the run; of a box that does not say, those it has sent on."""
        asked: int | None = getattr(self._source, "prompted_until", None)
        if asked is not None:
            return asked
        state = self._state
        ended_before = state.ledger.trained + sum(state.ledger.discarded.values()) if state else 0
        return ended_before + sum(box.stats().sent for box in self._mailboxes if box.name == "prompts")

    def received(self) -> dict[str, int]:
        """Groups so far from each environment."""
        return dict(getattr(self._source, "received", {}))

    def under_way(self, ledger: Ledger) -> dict[int, str]:
        """Groups from environments that have not ended by these books, with where each came from."""
        sources: dict[int, str] = getattr(self._source, "under_way", {})
        if not sources:
            return {}
        unended = list(ledger.unended(self.asked()))
        forgotten = Counter(self.received())
        forgotten.subtract({name: books.ended for name, books in ledger.state().sources.items()})
        forgotten.subtract(sources[number] for number in unended if number in sources)
        names = forgotten.elements()
        return {number: sources[number] if number in sources else next(names, "") for number in unended}

    def balance(self, *, complete: bool) -> Balance:
        """Close the books.

        complete: every actor has ended by itself. What is left then lies in mailboxes, to be counted, or was asked by
        an earlier life of the run and is not part of this one, which has fewer steps.
        Of a run that was cut short the rest is carried over: exactly those groups that a resumed run asks again, or,
        where they came from environments, counts as lost.
        """
        asked = self.asked()
        waiting = sum(box.depth for box in self._mailboxes if ON_THE_WAY.fullmatch(box.name))
        unended = self._ledger.unended(asked)
        reached = getattr(self._source, "reached", self._groups)
        held = waiting + sum(group_id >= reached for group_id in unended) if complete else sum(1 for _ in unended)
        carried = Counter(() if complete else self.under_way(self._ledger).values())
        ended = {name: books.ended for name, books in self._ledger.state().sources.items()}
        received = ended | self.received()
        return self._ledger.balance(prompted=asked, carried_over=held, received=received, waiting=carried)


log = structlog.get_logger(actor="session")


class RunContext:
    """The shared state of one run, for its wiring and for whoever looks.

    weights: which version serves. refills: how many groups are asked in place of others. recorded: the step that the
    histories have reached. sampler: everyone's way to the decode engine. services: what custom actors may use. display:
    what shows the run. address, atropos_url: where the HTTP API and the API server of Atropos answer; empty where there
    is none. sampled: what the engine drew for clients of the HTTP API. seconds_before: how old the run was when this life
    of it began.
    source: the box at which groups begin. books: where each group is.
    children: states of the supervised actors, by name. api_requests: how many the HTTP API has let in.
    """

    def __init__(self, parts: Components, console: Console, *, blas: str, listener: socket.socket | None) -> None:
        """blas: its name; listener: where the HTTP API will answer, None if it will not."""
        policy, profile = parts.policy, parts.profile
        self.parts = parts
        self._before, self._after = parts.history.before, parts.history.after
        self.seconds_before = parts.history.seconds
        self._began = time.monotonic()
        self.recorded = Latest[int]("recorded")
        self.refills = Latest[int]("refills")
        self.refills.put(parts.ledger.ended - parts.progress.step * profile.learner.batch_size)
        self.weights = Latest[WeightsReady]("weights")
        self.weights.put(WeightsReady(version=policy.version, step=policy.step, fingerprint=policy.fingerprint))
        self.sampler = Sampler(parts.executor.submit, parts.engine)
        self.address = base_url(listener) if listener else ""
        self.atropos_url = profile.atropos.url
        self.sampled = SampleLog(capacity_tokens=_tokens_under_way(profile), logit_bias=profile.sampling.logit_bias)
        self.services = Services(
            profile=profile,
            directory=parts.directory.path,
            sampler=self.sampler,
            tokenizer=policy.tokenizer,
            weights=self.weights,
        )
        self.children: Callable[[], dict[str, ChildStatus]] = dict
        self.api_requests: Callable[[], int] = int
        self._stalled = False
        self.books = GroupAccounting(parts.ledger, parts.state, groups=profile.steps * profile.learner.batch_size)
        self._actors: dict[str, Any] = {}
        self.source: Any = None
        self._mailboxes: list[Queue[Any]] = []
        facts = RunFacts(
            profile=parts.directory.path.name,
            model=relative_path(profile.model.path),
            machine=describe_machine(blas=blas),
            compute_path=compute_path(blas),
            policy=policy.description,
            address=self.address or None,
            run_dir=relative_path(parts.directory.path),
            steps=profile.steps,
            estimated_memory=parts.estimated_memory,
            resumed_from=parts.resumed_from,
        )
        self.display = make_display(profile.monitor.display, console, facts, self.gauges)

    def measure(self, mailboxes: Iterable[Queue[Any]]) -> None:
        """Count these mailboxes in the gauges and in the books."""
        self._mailboxes += mailboxes

    def observe(self, actors: dict[str, Any]) -> None:
        """Look at the boxes by name: a replaced box is looked at only as far as it has what the default has."""
        self._actors = actors
        self.source = actors.get("prompter") or actors["atropos_fetcher"]
        self.books.look_at(self.source, self._mailboxes)
        if getattr(actors["monitor"], "recorded", None) is not self.recorded:
            self.recorded.close()

    def drain(self) -> None:
        """Let the run end with what has been asked."""
        drain = getattr(self.source, "drain", None)
        if drain is None:
            log.warning(f"the {self.source.name} cannot be drained: once more stops the run at once")
        else:
            drain()
            log.warning("no new prompts: the run ends with what it has asked; once more stops it at once")

    def stall(self, seconds: float) -> None:
        """The watchdog's word: the compute thread has not moved for so long."""
        self._stalled = True
        log.error("the compute thread does not move", seconds=round(seconds, 1))

    def recover(self) -> None:
        """The watchdog's word: it moves again."""
        self._stalled = False
        log.warning("the compute thread moves again")

    def report_failure(self, name: str, error: Exception) -> None:
        """A failure that does not end the run."""
        log.warning("actor failed; the run goes on without it", actor=name, error=f"{type(error).__name__}: {error}")

    def gauges(self) -> RunGauges:
        """The run at this moment."""
        rates, swaps = self.parts.executor.rates(), self._swaps()
        return RunGauges(
            mailboxes=tuple(
                QueueGauge(name=box.name, depth=box.depth, capacity=box.capacity) for box in self._mailboxes
            ),
            tokens_sampled=self.parts.engine.stats().tokens_sampled,
            decode_seconds=rates.seconds,
            decode_rate_idle=rates.idle or None,
            decode_rate_learning=rates.learning or None,
            rows_running=self.parts.engine.running,
            api_requests=self.api_requests(),
            swaps=swaps.count,
            swap_seconds_last=swaps.last if swaps.count else None,
            swap_seconds_median=swaps.median if swaps.count else None,
            swap_seconds_max=swaps.longest if swaps.count else None,
            peak_memory_bytes=peak_memory(),
        )

    def run_state(self, update: PolicyUpdated) -> RunState:
        """What a checkpoint keeps beside the tensors."""
        before = self.parts.state
        return RunState(
            step=update.report.step,
            version=update.report.version,
            fingerprint=update.report.fingerprint,
            ledger=update.ledger,
            prompted=self.books.asked(),
            random_state=update.random_state,
            bad_steps=update.bad_steps,
            train_seconds=update.train_seconds,
            sampled_tokens=self.parts.engine.stats().tokens_sampled + (before.sampled_tokens if before else 0),
            trained_tokens=update.trained_tokens,
            inputs=self.parts.inputs,
            collapse=update.collapse,
            rollbacks=update.rollbacks,
            received=self.books.received(),
            in_flight=self.books.under_way(Ledger(update.ledger)),
        )

    def health(self) -> HealthReport:
        """How the run is, for /health."""
        children = {name: status.state.value for name, status in self.children().items()}
        failed = sorted(name for name, state in children.items() if state == "failed")
        busy = max(0.0, time.monotonic() - self.parts.executor.busy_since)
        if self._stalled:
            detail = f"the compute thread has not moved for {busy:.0f} seconds"
            return HealthReport(status="stalled", detail=detail, children=children, progress_seconds=busy)
        if failed:
            detail = f"failed: {', '.join(failed)}; the API and the training go on without"
            return HealthReport(status="ok", detail=detail, children=children, progress_seconds=busy)
        return HealthReport(status="ok", children=children, progress_seconds=busy)

    def snapshot(self) -> RunSnapshot:
        """Return the state of the run for /metrics."""
        stats, report, swaps = self.parts.engine.stats(), self._last_report(), self._swaps()
        books = self.parts.ledger.state()
        rewards = [reward for group in report.trained for reward in group.scored.rewards] if report else []
        staleness = report.staleness if report else ()
        return RunSnapshot(
            engine=EngineSnapshot(
                sequences_running=stats.running_rows,
                sequences_waiting=stats.waiting_rows,
                cache_usage=stats.cache_tokens / self.parts.profile.engine.kv_cache_tokens,
                prefix_queries=stats.prefix_hits + stats.prefix_misses,
                prefix_hits=stats.prefix_hits,
                prefix_tokens=stats.prefix_cache_tokens,
                prefill_tokens=stats.prefill_tokens,
                decode_steps=stats.decode_steps,
                tokens_sampled=stats.tokens_sampled,
                finished=stats.finished,
                failed=stats.failed,
                listener_errors=stats.listener_errors,
            ),
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            staleness_mean=sum(staleness) / len(staleness) if staleness else None,
            staleness_max=max(staleness, default=None),
            swap_seconds=swaps.last if swaps.count else None,
            groups_trained=books.trained,
            discarded=books.discarded,
            environments_trained={name: own.trained for name, own in books.sources.items()},
            environments_discarded={name: own.ended - own.trained for name, own in books.sources.items()},
            queues=tuple(QueueSnapshot(**structs.asdict(queue.stats())) for queue in self._mailboxes),
            restarts={name: status.restarts for name, status in self.children().items()},
        )

    async def prompt_logprobs(self, tokens: tuple[int, ...], top: int) -> PromptLogprobs:
        """Score a prompt under the weights that serve, between the turns of everything else in the compute thread."""
        chunk = self.parts.profile.engine.prefill_chunk
        steps = prompt_logprobs(self.parts.policy, tokens, top=top, chunk=chunk)
        return await finish(self.parts.executor.submit_steps(steps))

    async def recompute_logprobs(self, tokens: tuple[int, ...], temperature: float) -> PromptLogprobs:
        """The same under the run's own distribution, at a temperature, for tokens whose log-probabilities nobody remembers."""
        profile = self.parts.profile
        distribution = SamplingDistribution(temperature, profile.sampling.logit_bias)
        steps = prompt_logprobs(
            self.parts.policy, tokens, top=0, chunk=profile.engine.prefill_chunk, distribution=distribution
        )
        return await finish(self.parts.executor.submit_steps(steps))

    def server_context(self) -> ServerContext:
        """Return the HTTP server's interface to the run."""
        policy, profile = self.parts.policy, self.parts.profile
        return ServerContext(
            sampler=self.sampler,
            tokenizer=policy.tokenizer,
            settings=profile.server,
            sampling=profile.sampling,
            prompt_logprobs=self.prompt_logprobs,
            weights=lambda: self.weights.value,
            health=self.health,
            snapshot=self.snapshot,
            context_length=policy.context_length,
            vocab_size=policy.vocab_size,
            sample_log=self.sampled if profile.atropos.enabled else NullSampleLog(),
            record_supports=profile.atropos.enabled,
        )

    def summary(self, *, complete: bool) -> RunSummary:
        """What came of the run. complete: as for `balance`."""
        measured: list[EvalReport] = getattr(self._actors.get("evaluator"), "measured", [])
        first = next((report for report in measured if report.step == 0 and not report.final), None)
        total = time.monotonic() - self._began
        evaluating = sum(report.seconds for report in measured)
        return RunSummary(
            steps=self.parts.progress.step,
            planned_steps=self.parts.profile.steps,
            version=self.parts.policy_learner.version,
            before=first or self._before,
            after=next((report for report in measured if report.final), self._after),
            balance=self.books.balance(complete=complete),
            gauges=self.gauges(),
            training_seconds=self._training_seconds(),
            update_seconds=self.parts.progress.train_seconds,
            evaluation_seconds=evaluating,
            total_seconds=total,
            base_model=relative_path(self.parts.profile.model.path),
            adapter=relative_path(self.parts.directory.adapters),
            resume_command=resume_command(self.parts.directory.profile),
        )

    def _training_seconds(self) -> float:
        """From the first prompt of this life to its last update."""
        learner = self._actors.get("learner")
        began: float = getattr(learner, "began", self._began)
        last: float = getattr(learner, "last_update", began)
        return max(0.0, last - began)

    def _swaps(self) -> SwapTimes:
        swaps = getattr(self._actors.get("broadcaster"), "swaps", SwapTimes)
        times: SwapTimes = swaps()
        return times

    def _last_report(self) -> StepReport | None:
        return getattr(self._actors.get("learner"), "last_report", None)


def _tokens_under_way(profile: Profile) -> int:
    """More than all completions that environments may hold before the learner has them, with room for other clients."""
    batch = profile.learner.batch_size * profile.sampling.group_size
    longest = profile.sampling.max_tokens * token_cost(profile.sampling) + 32
    return max(2**20, 2 * (profile.rollouts.max_batches_ahead + 3) * batch * longest)
