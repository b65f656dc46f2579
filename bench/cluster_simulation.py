"""A discrete-event simulation of a run on a cluster, with the rules of the real run.

The staleness rule and the collection of batches are the code of the program; the rule that chooses a worker is that of
`attachments.remote.place.freest`, on arrays. Time passes only where `Costs` says so.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import simpy

from bench.cluster_costs import Costs, Plan, Workload
from bench.cluster_engine import Engine, Group, LearnerDevice
from bench.cluster_tally import Forecast, State, Tally, bottleneck
from bench.processor_sharing import SharedRate, cores, link
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, ScoredGroup
from protocols.step import WeightsReady
from training_run.groups.batch_collector import BatchCollector
from training_run.groups.progress import StalenessRule
from training_run.supervision.latest import Latest

Process = Generator[simpy.Event, Any, None]
Array = npt.NDArray[Any]
SCORED_AT_ONCE = 8
HEARTBEAT_SECONDS = 1.0
FAILED = -(10**9)
"""Version of a worker that cannot be used."""

_PROMPT = Prompt(group_id=0, problem=Problem(prompt="", answer="", type=""), tokens=(0,), seed=0)
DISCARDED = Discarded(prompt=_PROMPT, reason="zero_variance", detail="")


class Worker:
    """A place where groups are sampled. epoch: number of failures."""

    def __init__(self, number: int, share: float, machine: int) -> None:
        self.number, self.share, self.machine = number, share, machine
        self.engine: Engine
        self.rate: SharedRate | None = None
        self.state: State = "idle"
        self.rows_counted = self.epoch = 0
        self.alive: simpy.Event | None = None


class EventLoop:
    """The event loop of the run, which does one thing after the other. Heartbeats of workers are a constant load."""

    def __init__(self, env: simpy.Environment, machine: SharedRate, load: float) -> None:
        """machine: whose cores the loop shares. load: share of the time that is always used."""
        self._env, self._machine, self.load = env, machine, min(load, 0.99)
        self._last: simpy.Event = env.event().succeed()
        self.used = 0.0

    def work(self, seconds: float) -> simpy.Event:
        """Do something after everything that waits; return the event of its end."""
        self.used += seconds
        if seconds:
            self._last = self._env.process(self._after(self._last, seconds / (1.0 - self.load)))
        return self._last if seconds else self._env.timeout(0.0)

    def _after(self, before: simpy.Event, seconds: float) -> Process:
        yield before
        yield self._machine.start(seconds).done


class Simulation:
    """A run from its first prompt to the end of its last batch."""

    def __init__(self, costs: Costs, workload: Workload, plan: Plan) -> None:
        self._costs, self._workload, self._plan = costs, workload, plan
        self._env = env = simpy.Environment()
        self._random = random.Random(plan.seed)
        self._weights, self._replacements = Latest[WeightsReady]("weights"), Latest[int]("replacements")
        self._weights.put(WeightsReady(version=0, step=0, fingerprint=""))
        self._replacements.put(0)
        self._rule = StalenessRule(
            weights=self._weights,
            replacements=self._replacements,
            batch_size=plan.batch_size,
            max_batches_ahead=plan.max_batches_ahead,
        )
        self._may_start = env.event()
        self._version = self._step = self._target = 0
        self._target_changed, self._published = env.event(), env.event().succeed()
        self._updates = simpy.Store(env, capacity=1)
        self._scored = simpy.Store(env)
        self._slots = simpy.Resource(env, SCORED_AT_ONCE)
        self._sent = env.event().succeed()
        self._scoring_seconds = 0.0
        self._open: set[Group] = set()
        self._prompted = self._trained = self._discarded = self._again = 0
        self._staleness: list[int] = []
        self._learner_seconds = 0.0
        self._over = env.event()
        self._began = 0.0
        self._marks: dict[str, float] = {}
        self._build_machines()

    def _build_machines(self) -> None:
        costs, plan, env = self._costs, self._plan, self._env
        rate = cores(costs.cores, costs.efficiency) if costs.cores else (lambda _: 1.0)
        learner = SharedRate(env, rate)
        self._device = LearnerDevice(learner, plan.decode_share)
        self._up, self._down = (SharedRate(env, link(costs.bandwidth or 1.0)) for _ in range(2))
        self._fetches: dict[tuple[int, int], simpy.Event] = {}
        places = [Worker(number, 1.0, number // plan.workers_per_machine) for number in range(plan.workers)]
        machines: dict[int, SharedRate] = {}
        for worker in places:
            shared = machines.setdefault(worker.machine, SharedRate(env, rate))
            worker.rate = learner if plan.on_learner_machine else shared if costs.cores else SharedRate(env, rate)
            worker.engine = Engine(worker.rate, costs, plan, self._serves(worker), self._changes(worker))
        if plan.local_share:
            local = Worker(len(places), plan.local_share, -1)
            local.engine = Engine(self._device, costs, plan, lambda: self._weights.value.version, self._changes(local))
            places.append(local)
        self._places = places
        self._versions = np.zeros(len(places), dtype=np.int64)
        self._rows, self._share = np.zeros(len(places)), np.array([place.share for place in places])
        self._queue: deque[Group] = deque()
        self._waiting_rows = 0
        self._tally = Tally(env, len(places))
        heartbeats = len(places) * costs.head_call_seconds / HEARTBEAT_SECONDS
        self._loop = EventLoop(env, learner, heartbeats)

    def _serves(self, worker: Worker) -> Callable[[], int]:
        return lambda: int(self._versions[worker.number])

    def _changes(self, worker: Worker) -> Callable[[], None]:
        return lambda: self._observe(worker)

    def run(self) -> Forecast:
        """Simulate, and return the result."""
        env = self._env
        env.process(self._generate())
        env.process(self._learn())
        env.process(self._broadcast())
        for worker in self._places:
            if worker.machine >= 0:
                env.process(self._keep_current(worker))
                if self._costs.failures_per_hour:
                    env.process(self._fail_at_times(worker))
        env.run(until=self._over)
        return self._forecast()

    # -- generator ------------------------------------------------------------------------------------------------

    def _generate(self) -> Process:
        started, env, plan = 0, self._env, self._plan
        while True:
            while (room := self._rule.capacity(started)) <= 0:
                yield self._may_start
            groups = [self._prompt() for _ in range(min(room, plan.batch_size))]
            started += len(groups)
            sampled = [env.process(self._sample(group)) for group in groups]
            if plan.synchronous:
                yield env.all_of(sampled)
            else:
                yield env.timeout(0.0)

    def _prompt(self) -> Group:
        position = self._random.randrange(len(self._workload.lengths))
        group = Group(self._workload.lengths[position], self._workload.zero_variance[position])
        self._open.add(group)
        self._prompted += 1
        return group

    def _announce(self) -> None:
        """Wake the generator."""
        woken, self._may_start = self._may_start, self._env.event()
        woken.succeed()

    # -- sampler of the cluster -----------------------------------------------------------------------------------

    def _sample(self, group: Group) -> Process:
        env, costs = self._env, self._costs
        while True:
            self._queue.append(group)
            self._waiting_rows += len(group.lengths)
            group.done = env.event()
            self._assign()
            sampled: bool = yield group.done
            if sampled:
                break
            self._again += 1
            group.oldest, group.open = -1, len(group.lengths)
        yield self._loop.work(costs.head_group_seconds)
        env.process(self._score(group))

    def _assign(self) -> None:
        """Give groups that wait to places, in their order, until `freest` finds no place."""
        while self._queue:
            oldest = self._weights.value.version - self._plan.sync_interval + 1
            number = freest(self._versions, self._rows, self._share, oldest=oldest, waiting=self._waiting_rows)
            if number is None:
                return
            group = self._queue.popleft()
            self._waiting_rows -= len(group.lengths)
            self._rows[number] += len(group.lengths)
            self._env.process(self._request(self._places[number], group))

    def _request(self, place: Worker, group: Group) -> Process:
        env, costs, epoch = self._env, self._costs, place.epoch
        is_remote, answer = place.machine >= 0, group.done
        assert answer is not None
        group.done = env.event()
        if is_remote and costs.latency_seconds:
            yield env.timeout(costs.latency_seconds)
        if place.epoch == epoch:
            place.engine.submit(group)
            self._observe(place)
            sampled = yield group.done
        else:
            yield env.timeout(costs.detection_seconds)
            sampled = False
        if sampled and is_remote:
            yield from self._transfer(self._down, costs.token_bytes * sum(group.lengths))
            if costs.latency_seconds:
                yield env.timeout(costs.latency_seconds)
        self._rows[place.number] -= len(group.lengths)
        self._assign()
        answer.succeed(sampled)

    def _transfer(self, line: SharedRate, size: float) -> Process:
        if size and self._costs.bandwidth is not None and not self._plan.on_learner_machine:
            yield line.start(size).done

    def _keep_current(self, worker: Worker) -> Process:
        """Give a worker the newest weights, one version after the other; versions that are replaced are skipped."""
        env, costs, number = self._env, self._costs, worker.number
        assert worker.rate is not None
        while True:
            if worker.alive is not None:
                yield worker.alive
            elif self._versions[number] >= self._target:
                yield self._target_changed
            else:
                target, epoch = self._target, worker.epoch
                yield self._published
                yield self._loop.work(costs.head_call_seconds)
                yield env.timeout(costs.latency_seconds)
                yield from self._fetch(worker.machine, target)
                if costs.load_seconds:
                    yield worker.rate.start(costs.load_seconds).done
                if worker.epoch == epoch:
                    self._versions[number] = target
                    self._observe(worker)
                    self._assign()

    def _fetch(self, machine: int, version: int) -> Process:
        """Bring a version to a machine. Workers of the machine share one copy."""
        key = (machine, version)
        if key in self._fetches:
            yield self._fetches[key]
            return
        self._fetches[key] = arrived = self._env.event()
        yield from self._transfer(self._up, self._costs.weight_bytes)
        arrived.succeed()

    def _fail_at_times(self, worker: Worker) -> Process:
        env, costs = self._env, self._costs
        while True:
            yield env.timeout(self._random.expovariate(costs.failures_per_hour / 3600.0))
            worker.epoch += 1
            worker.alive = env.event()
            self._versions[worker.number] = FAILED
            lost = worker.engine.fail()
            self._observe(worker)
            yield env.timeout(min(costs.detection_seconds, costs.recovery_seconds))
            for group in lost:
                assert group.done is not None
                group.done.succeed(False)
            yield env.timeout(max(0.0, costs.recovery_seconds - costs.detection_seconds))
            alive, worker.alive = worker.alive, None
            alive.succeed()
            self._observe(worker)

    def _observe(self, worker: Worker) -> None:
        """Record the state of a worker."""
        if worker.alive is not None:
            state: State = "failed"
        elif worker.engine.has_work:
            state = "decoding"
        elif self._versions[worker.number] < self._weights.value.version - self._plan.sync_interval + 1:
            state = "weights"
        else:
            state = "idle"
        rows = worker.engine.rows
        if (state, rows) != (worker.state, worker.rows_counted):
            self._tally.advance()
            self._tally.number[worker.state] -= 1
            self._tally.number[state] += 1
            self._tally.number["rows"] += rows - worker.rows_counted
            worker.state, worker.rows_counted = state, rows

    # -- scorer ---------------------------------------------------------------------------------------------------

    def _score(self, group: Group) -> Process:
        """Score a group; groups are sent in the order of arrival."""
        before, self._sent = self._sent, (sent := self._env.event())
        with self._slots.request() as slot:
            yield slot
            if self._costs.score_seconds:
                self._scoring_seconds += self._costs.score_seconds
                yield self._env.timeout(self._costs.score_seconds)
            yield before
            self._scored.put(group)
            sent.succeed()

    # -- learner and broadcaster ----------------------------------------------------------------------------------

    def _learn(self) -> Process:
        plan, held = self._plan, deque[Group]()
        lag = plan.max_batches_ahead * plan.batch_size if plan.synchronous else 0
        batch, fresh, dropped = self._next_batch(), list[Group](), 0
        while True:
            group = yield self._scored.get()
            held.append(group)
            if len(held) <= lag:
                continue
            group = held.popleft()
            if group.zero_variance or self._version - group.oldest > plan.staleness_limit:
                self._tally.counts["stale"] += not group.zero_variance
                batch.add(DISCARDED)
                self._end(group)
                self._discarded += 1
                dropped += 1
            else:
                batch.add(cast(ScoredGroup, group))
                fresh.append(group)
            if more := batch.request_replacements():
                self._replacements.put(self._replacements.value + more)
                self._announce()
            if batch.complete:
                yield from self._consume(fresh, dropped)
                batch, fresh, dropped = self._next_batch(), [], 0

    def _next_batch(self) -> BatchCollector:
        size = self._plan.batch_size
        limit = int(self._plan.dynamic_sampling_max_ratio * size) or size
        return BatchCollector(size=size, limit=limit, rounds=self._plan.synchronous)

    def _consume(self, fresh: list[Group], dropped: int) -> Process:
        costs, tokens = self._costs, sum(sum(group.lengths) for group in fresh)
        if fresh:
            began = self._env.now
            yield self._device.job(costs.update_seconds + costs.update_token_seconds * tokens)
            self._learner_seconds += self._env.now - began
        self._staleness += [self._version - group.oldest for group in fresh]
        for group in fresh:
            self._end(group)
        self._trained += len(fresh)
        self._version += bool(fresh)
        self._step += 1
        counts = self._tally.counts
        counts["ended"] += len(fresh) + dropped
        counts["updates"] += bool(fresh)
        counts["tokens"] += tokens
        if self._step == self._plan.began:
            self._begin_measurement()
        elif self._step >= self._plan.began + self._plan.steps:
            self._over.succeed()
        yield self._updates.put((self._step, self._version))
        if self._version >= self._target + self._plan.sync_interval:
            self._publish()

    def _end(self, group: Group) -> None:
        """Remove a group from those in flight. Raises KeyError if it has ended before."""
        self._open.remove(group)

    def _publish(self) -> None:
        """Announce new weights to the workers; they can be fetched when they are in the object store."""
        self._target = self._version
        self._published = published = self._env.event()
        ready = self._env.timeout(self._costs.publish_seconds)
        assert ready.callbacks is not None
        ready.callbacks.append(lambda _: _succeed(published))
        woken, self._target_changed = self._target_changed, self._env.event()
        woken.succeed()

    def _broadcast(self) -> Process:
        """Serve new weights in the run's process, announce the step, and check parity."""
        while True:
            step, version = yield self._updates.get()
            self._weights.put(WeightsReady(version=version, step=step, fingerprint=""))
            if self._plan.local_share:
                self._versions[-1] = version
            for worker in self._places:
                if worker.state == "idle":
                    self._observe(worker)
            self._announce()
            self._assign()
            if self._costs.version_seconds:
                yield self._device.job(self._costs.version_seconds)

    # -- result ---------------------------------------------------------------------------------------------------

    def _used(self) -> dict[str, float]:
        network = max(self._up.used(), self._down.used())
        return {
            "learner": self._learner_seconds,
            "network": network,
            "loop": self._loop.used,
            "rewards": self._scoring_seconds / SCORED_AT_ONCE,
        }

    def _begin_measurement(self) -> None:
        self._began, self._marks = self._env.now, self._used()
        self._tally.reset()
        self._staleness.clear()

    def _forecast(self) -> Forecast:
        self._tally.advance()
        seconds, counts, spent = self._env.now - self._began, self._tally.counts, self._tally.seconds
        used = {name: min(1.0, (value - self._marks[name]) / seconds) for name, value in self._used().items()}
        used["loop"] = min(1.0, used["loop"] + self._loop.load)
        total = seconds * len(self._places)
        shares = {name: spent[name] / total for name in ("decoding", "weights", "idle", "failed")}
        staleness = sorted(self._staleness)
        return Forecast(
            workers=self._plan.workers,
            max_batches_ahead=self._plan.max_batches_ahead,
            groups_per_second=counts["ended"] / seconds,
            updates_per_second=counts["updates"] / seconds,
            tokens_per_second=counts["tokens"] / seconds,
            decoding=shares["decoding"],
            waiting_for_weights=shares["weights"],
            idle=shares["idle"],
            failed=shares["failed"],
            rows=spent["rows"] / spent["decoding"] if spent["decoding"] else 0.0,
            learner_busy=used["learner"],
            network_busy=used["network"],
            loop_busy=used["loop"],
            rewards_busy=used["rewards"],
            staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
            staleness_p95=float(staleness[math.ceil(0.95 * len(staleness)) - 1]) if staleness else 0.0,
            stale=counts["stale"] / max(1, counts["ended"]),
            bottleneck=bottleneck(used, shares),
            prompted=self._prompted,
            trained=self._trained,
            discarded=self._discarded,
            in_flight=len(self._open),
            requested_again=self._again,
        )


def freest(versions: Array, rows: Array, shares: Array, *, oldest: int, waiting: int) -> int | None:
    """Return the number of the place that gets the next group, as `attachments.remote.place.freest` does."""
    current = versions >= oldest
    number = int(np.where(current, rows / shares, math.inf).argmin())
    if not current[number]:
        return None
    used = versions > FAILED
    has_room = rows[number] * shares[used].sum() < (waiting + rows[used].sum()) * shares[number]
    return number if has_room else None


def _succeed(event: simpy.Event) -> None:
    event.succeed()


def simulate(costs: Costs, workload: Workload, plan: Plan) -> Forecast:
    """Simulate a run. Equal arguments give equal results."""
    return Simulation(costs, workload, plan).run()
