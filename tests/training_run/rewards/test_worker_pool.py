"""Worker processes of reward functions: whatever a function does costs its own group and nothing else."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from actors.scorer import Scorer
from clotho.rewards.registry import GroupParameters, RewardOptions
from clotho.rewards.values import Completions, Values
from protocols.errors import ProfileError
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from tests.e2e.child_processes import wait_until_ended
from tests.rewards.groups import group, problem
from training_run.profile.data import RewardSection
from training_run.rewards import worker_pool, worker_process
from training_run.rewards.runner import RewardRunner
from training_run.supervision.guarded_process import MAX_OUTPUT_LINES
from training_run.supervision.queues import Queue

HOSTILE = "tests.rewards.hostile_rewards:"

SCORED = "scored"
TIMEOUT = "took longer than "

SYNCHRONOUS = {
    "raises": "raised ValueError: no opinion",
    "unprintable": "raised UnprintableError: (str() of the exception failed)",
    "nan": "returned nan",
    "infinity": "returned inf",
    "huge": "returned -1e+308; a reward is at most",
    "huge_integer": "returned inf",
    "slightly_too_large": "returned 1000000.5; a reward is at most",
    "none": "no reward applies",
    "text": "returned str, not a number or None",
    "exits": "raised SystemExit: 3",
    "exits_at_once": "ended its process with exit status 3",
    "exits_sometimes": "ended its process with exit status 4",
    "keyboard_interrupt": "raised KeyboardInterrupt",
    "forks_and_exits": SCORED,
    "forks_and_returns": SCORED,
    "forks_and_raises_in_the_child": SCORED,
    "forks_a_child_that_stays": SCORED,
    "forks_a_child_that_stays_and_exits": "ended its process with exit status 5",
    "leaves_a_thread": SCORED,
    "changes_directory": SCORED,
    "signals_itself": "ended its process with signal SIGTERM",
    "signals_its_group": "ended its process with signal SIGKILL",
    "segmentation_fault": "ended its process with signal SIG",
    "closes_output": SCORED,
    "redirects_output": SCORED,
    "closes_descriptors": "closed the connection of its process",
    "replaces_descriptors": "closed the connection of its process",
    "writes_to_every_descriptor": "sent an invalid answer",
    "deep_recursion": "raised RecursionError",
    "recursion_without_limit": "",
    "changes_the_problem": SCORED,
}
"""Function -> reason after its name; `SCORED` if the function harms nobody."""

HANGING = {
    "hangs": TIMEOUT,
    "hangs_for_one_completion": TIMEOUT,
    "swallows_everything": TIMEOUT,
    "regex_without_end": TIMEOUT,
    "stops_itself": TIMEOUT,
    "prints_without_end": TIMEOUT,
}

ASYNCHRONOUS = {
    "works_async": SCORED,
    "hangs_async": TIMEOUT,
    "swallows_cancellation": TIMEOUT,
    "blocks_its_loop": TIMEOUT,
    "stops_its_loop": "ended its process with exit status 1",
}


@pytest.fixture(autouse=True)
def _events() -> Iterator[None]:
    """Keep the output of hostile functions off the terminal."""
    with capture_logs():
        yield


@asynccontextmanager
async def runner(name: str, *, timeout_seconds: float = 30.0, max_workers: int = 1) -> AsyncIterator[RewardRunner]:
    """Yield a runner of a function in worker processes, and close it."""
    section = RewardSection(
        name=name if ":" in name else HOSTILE + name, timeout_seconds=timeout_seconds, max_workers=max_workers
    )
    made = RewardRunner((section,))
    try:
        await made.start()
        yield made
    finally:
        made.close()


async def scored_in_order(rewards: RewardRunner, groups: Sequence[RolloutGroup]) -> list[GroupOutcome]:
    """Return the outcomes of groups that pass through a scorer."""
    inbox = Queue[RolloutGroup | Discarded]("rollouts", capacity=len(groups))
    outbox = Queue[GroupOutcome]("scored", capacity=len(groups))
    reader = outbox.inbox()
    scorer = Scorer(inbox=inbox.inbox(), outbox=outbox.outbox(), rewards=rewards, concurrency=rewards.concurrency)
    async with inbox.outbox() as writer:
        for one in groups:
            await writer.send(one)
    await scorer.run()
    async with reader:
        return [outcome async for outcome in reader]


@pytest.mark.parametrize(
    ("name", "timeout_seconds", "table"),
    [("misbehaves", 60.0, SYNCHRONOUS), ("misbehaves", 1.0, HANGING), ("misbehaves_async", 1.0, ASYNCHRONOUS)],
)
async def test_a_hostile_function_costs_only_its_own_group(
    name: str, timeout_seconds: float, table: dict[str, str]
) -> None:
    """The reason names the function and what happened. The groups around it are scored, and all leave in order."""
    groups: list[RolloutGroup] = []
    for hostile in table:
        groups += [group(f"{hostile} 1", f"{hostile} 22", group_id=len(groups))]
        groups += [group("a", "abc", group_id=len(groups))]
    async with runner(name, timeout_seconds=timeout_seconds, max_workers=2 if table is SYNCHRONOUS else 8) as rewards:
        outcomes = await scored_in_order(rewards, groups)
    found = {}
    for hostile, outcome, after in zip(table, outcomes[::2], outcomes[1::2], strict=True):
        assert isinstance(after, ScoredGroup), hostile
        assert after.rewards == (1.0, 3.0)
        if isinstance(outcome, ScoredGroup):
            found[hostile] = SCORED
            assert outcome.rewards == (len(hostile) + 2.0, len(hostile) + 3.0)
        else:
            assert outcome.reason == "reward_error", hostile
            found[hostile] = outcome.detail.removeprefix(f"reward {HOSTILE}{name} ")
    wrong = {hostile: reason for hostile, reason in found.items() if not reason.startswith(table[hostile])}
    assert wrong == {}


async def test_a_function_that_changes_a_problem_changes_it_for_no_later_group() -> None:
    """Every call of a worker has a problem of its own, although a frozen struct can be changed."""
    groups = [group("first", "second of the group", group_id=number) for number in range(2)]
    async with runner("raises_for_a_changed_problem") as rewards:
        outcomes = [await rewards.score(one) for one in groups]
    assert [outcome.rewards for outcome in outcomes if isinstance(outcome, ScoredGroup)] == [(5.0, 19.0)] * 2


@pytest.mark.parametrize(
    ("name", "limit", "told"),
    [
        ("grows", 300, "raised MemoryError|used more than 300 MB of memory"),
        ("too_much_memory_at_once", 300, "raised MemoryError|used more than 300 MB of memory"),
        ("grows_without_limit", 200, r"used more than 200 MB of memory \(rewards.memory_limit_mb\)"),
        ("keeps_memory", 200, r"used more than 200 MB of memory \(rewards.memory_limit_mb\)"),
    ],
)
async def test_a_function_that_uses_too_much_memory_is_stopped(name: str, limit: int, told: str) -> None:
    """Linux refuses the memory (MemoryError). Elsewhere the parent watches the resident memory, within a call and from
    one call to the next; it ends the process, and another one goes on.
    """
    rewards = RewardRunner((RewardSection(name=f"{HOSTILE}misbehaves", memory_limit_mb=limit),))
    try:
        outcome = await rewards.score(group(f"{name} 1", f"{name} 22"))
        assert isinstance(await rewards.score(group("a", "abc")), ScoredGroup)
    finally:
        rewards.close()
    assert isinstance(outcome, Discarded)
    assert re.search(told, outcome.detail)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(4)", "ended its process with exit status 4"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended its process with signal SIGSEGV"),
        ("import os; os.closerange(3, 4096)", "closed the connection of its process"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("reward = 3", "is not a function"),
        ("def reward(completion): return 0", "accepts neither"),
        ("def rewards(problem, completion): return 0", "did you mean rewards"),
    ],
)
async def test_a_function_that_cannot_be_imported_is_refused(tmp_path: Path, code: str, message: str) -> None:
    """At the start, in one line."""
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(ProfileError) as caught:
        async with runner(f"{file}:reward"):
            pass
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


async def test_a_function_whose_file_is_gone_discards_its_groups(tmp_path: Path) -> None:
    """A process that ended cannot be replaced then. Nothing waits for it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n"
        "def reward(problem, completion):\n"
        "    if completion == 'last': os._exit(1)\n"
        f"    if os.path.exists({str(file)!r}): os.unlink({str(file)!r})\n"
        "    return float(len(completion))\n"
    )
    async with runner(f"{file}:reward") as rewards:
        assert isinstance(await rewards.score(group("a", "abc")), ScoredGroup)
        assert isinstance(await rewards.score(group("last", "abc")), Discarded)
        outcome = await rewards.score(group("a", "abc"))
    assert isinstance(outcome, Discarded)
    assert "cannot be started again" in outcome.detail


async def test_processes_are_replaced_a_limited_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the function is not called for a while, and its groups are discarded."""
    monkeypatch.setattr(worker_pool, "MAX_ENDED", 2)
    async with runner("misbehaves") as rewards:
        details = [await rewards.score(group("exits_at_once 1", "exits_at_once 22")) for _ in range(3)]
        monkeypatch.setattr(worker_pool, "WINDOW_SECONDS", 0.0)
        assert isinstance(await rewards.score(group("a", "abc")), ScoredGroup)
    reasons = [outcome.detail for outcome in details if isinstance(outcome, Discarded)]
    assert ["was not called" in reason for reason in reasons] == [False, False, True]


class OnLostMachine(worker_process.WorkerProcess):
    """A process whose machine leaves during its first call."""

    async def call(self, completions: Completions) -> Values:
        """Lose the machine."""
        self.kill()
        raise worker_process.WorkerLost("the machine left")


@pytest.mark.parametrize(("lost", "is_scored"), [(1, True), (2, False)])
async def test_a_group_whose_machine_leaves_is_scored_again(
    lost: int, is_scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another worker. A group that loses many workers is discarded; lost workers do not count as ended ones."""
    monkeypatch.setattr(worker_pool, "MAX_LOST", 2)
    kinds: list[type[worker_process.WorkerProcess]] = [OnLostMachine] * lost

    def start(
        function: worker_process.ProcessFunction, *, on_output: Callable[[bytes], None], further: bool
    ) -> worker_process.Worker:
        return (kinds.pop() if kinds else worker_process.WorkerProcess)(function, on_output=on_output)

    section = RewardSection(name=f"{HOSTILE}misbehaves", where="cluster", max_workers=1)
    rewards = RewardRunner((section,), workers={"cluster": start})
    try:
        outcome = await rewards.score(group("a", "abc"))
    finally:
        rewards.close()
    assert isinstance(outcome, ScoredGroup) == is_scored
    assert not rewards._pools[0]._ended
    assert isinstance(outcome, ScoredGroup) or outcome.reason == "reward_error"


async def test_calls_that_wait_start_further_processes(tmp_path: Path) -> None:
    """Two calls run at the same time if `max_workers` allows."""
    async with runner("misbehaves", max_workers=2) as rewards, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(
                rewards.score, group("meets_another_call 1", "meets_another_call 22", of=problem(str(tmp_path)))
            )
    assert len(os.listdir(tmp_path)) == 2


class SecondsByHand:
    """The clock of a pool: `START` for the start of a worker, `CALL` for each of its calls."""

    START, CALL = 1.0, 0.4

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the seconds since the start."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


class TimedWorker:
    """A worker that takes the seconds of a clock by hand."""

    group: GroupParameters | None = None
    alive = True

    def __init__(self, clock: SecondsByHand) -> None:
        self._clock = clock

    async def ready(self) -> None:
        """Start."""
        self._clock.now += self._clock.START

    async def call(self, completions: Completions) -> Values:
        """Return a value for each completion."""
        await anyio.lowlevel.checkpoint()
        self._clock.now += self._clock.CALL
        return tuple(0.0 for _ in completions.texts)

    def leave(self) -> None:
        """Nothing remains."""

    kill = leave


def timed_pool(
    clock: SecondsByHand, started: list[worker_process.Worker], *, max_workers: int
) -> worker_pool.WorkerPool:
    """Return a pool of timed workers, which are added to `started`."""

    def start(
        function: worker_process.ProcessFunction, *, on_output: Callable[[bytes], None], further: bool
    ) -> worker_process.Worker:
        started.append(TimedWorker(clock))
        return started[-1]

    function = worker_process.ProcessFunction(name="timed", options=RewardOptions(), memory_bytes=0)
    return worker_pool.WorkerPool(function, max_workers=max_workers, new_worker=start)


async def test_short_waits_that_return_with_every_batch_start_further_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As soon as the waiting time of all batches since the last start has reached the duration of a start."""
    clock = SecondsByHand()
    monkeypatch.setattr(worker_pool, "time", clock)
    started: list[worker_process.Worker] = []
    pool = timed_pool(clock, started, max_workers=8)
    await pool.start()
    counts = []
    for _ in range(4):
        async with anyio.create_task_group() as batch:
            for _ in range(2):
                batch.start_soon(pool, Completions(problem=problem(), texts=("a",)))
        counts.append(len(started))
    pool.close()
    assert counts == [1, 1, 1, 2]


async def test_a_call_that_is_cancelled_as_it_gets_a_process_returns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call uses the process. No further process is needed."""
    clock = SecondsByHand()
    monkeypatch.setattr(worker_pool, "time", clock)
    started: list[worker_process.Worker] = []
    pool = timed_pool(clock, started, max_workers=1)
    await pool.start()
    completions = Completions(problem=problem(), texts=("a",))
    holding, waiting = asyncio.create_task(pool(completions)), asyncio.create_task(pool(completions))
    holding.add_done_callback(lambda _: waiting.cancel())
    await asyncio.wait({holding, waiting})
    assert waiting.cancelled()
    with anyio.fail_after(10):
        assert await pool(completions) == [(0.0,)]
    pool.close()
    assert len(started) == 1


async def test_a_worker_inherits_no_descriptors(tmp_path: Path) -> None:
    """Not even those that are marked as inheritable, such as a lock or a listening socket of a library."""
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    for descriptor in kept:
        os.set_inheritable(descriptor, True)
    file = tmp_path / "count"
    async with runner("misbehaves") as rewards:
        await rewards.score(group("many_descriptors 1", "b", of=problem(str(file))))
    for descriptor in kept:
        os.close(descriptor)
    assert int(file.read_text()) <= 2, "the listing itself and an open file of the worker"


DETACHED, DETACHES = (
    pytest.param(name, marks=pytest.mark.needs_linux(reason="macOS does not find detached processes"))
    for name in ("detaches_a_process_and_hangs", "detaches_a_process_and_names_it")
)


@pytest.mark.parametrize("name", ["forks_a_child_and_names_it", DETACHES])
async def test_children_of_a_function_end_with_the_runner(tmp_path: Path, name: str) -> None:
    """Also one that was forked twice, and has a session of its own."""
    file = tmp_path / "children"
    async with runner("misbehaves") as rewards:
        assert isinstance(await rewards.score(group(f"{name} 1", "b", of=problem(str(file)))), ScoredGroup)
    assert wait_until_ended([int(number) for number in file.read_text().split()])


@pytest.mark.parametrize("name", ["names_itself_and_hangs", DETACHED])
async def test_a_cancelled_call_ends_its_process(tmp_path: Path, name: str) -> None:
    """A run that is stopped does not wait for its reward functions; a later call uses a new process."""
    file = tmp_path / "process"
    os.mkfifo(file)
    async with runner("misbehaves") as rewards:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rewards.score, group(f"{name} 1", "b", of=problem(str(file))))
            process = int(await anyio.to_thread.run_sync(file.read_text))
            tasks.cancel_scope.cancel()
        assert wait_until_ended([process])
        assert isinstance(await rewards.score(group("a", "abc")), ScoredGroup)


PARENT = """
import anyio, sys
from training_run.profile.schema import RewardSection
from training_run.rewards.runner import RewardRunner
from tests.rewards.groups import group, problem

async def main():
    section = RewardSection(name="tests.rewards.hostile_rewards:misbehaves", timeout_seconds=float(sys.argv[3]))
    await RewardRunner((section,)).score(group(sys.argv[1] + " 1", "b", of=problem(sys.argv[2])))

anyio.run(main)
"""


@pytest.mark.parametrize(
    ("name", "timeout_seconds"),
    [
        ("names_itself_and_hangs", 3600.0),
        pytest.param("detaches_a_process_and_hangs", 3600.0, marks=DETACHED.marks),
        pytest.param("names_itself_and_keeps_the_gil", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path, name: str, timeout_seconds: float) -> None:
    """At once; soon after the time limit if the function holds the GIL."""
    file = tmp_path / "process"
    os.mkfifo(file)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, name, str(file), str(timeout_seconds)])
    worker = int(file.read_text())
    parent.send_signal(signal.SIGSTOP)  # must not end the worker itself
    parent.kill()
    parent.wait()
    assert wait_until_ended([worker])


async def test_what_a_function_prints_is_in_the_event_log() -> None:
    """Up to a number of lines; the terminal stays as it is."""
    with capture_logs() as events:
        async with runner("misbehaves") as rewards:
            outcome = await rewards.score(group("prints 1", "prints 22"))
            with anyio.fail_after(60):
                while events[-1]["event"] != "reward_output_suppressed":  # noqa: ASYNC110
                    await anyio.sleep(0.01)
    assert isinstance(outcome, ScoredGroup)
    lines = [event for event in events if event["event"] == "reward_output"]
    assert len(lines) == MAX_OUTPUT_LINES
    assert lines[3]["line"] == "3 \x1b[2J"
    assert lines[3]["reward"] == f"{HOSTILE}misbehaves"


@pytest.mark.parametrize("name", ["sleeps_in_c", pytest.param("backtracks", marks=pytest.mark.slow)])
async def test_native_code_of_a_function_of_a_group_ends_at_the_time_limit(name: str) -> None:
    """Also while it holds the GIL: the process is killed, and the next group has another one."""
    async with runner(f"tests.rewards.trl_rewards:{name}", timeout_seconds=0.2) as rewards:
        outcome = await rewards.score(group("a", "b"))
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "reward_error"
    assert TIMEOUT in outcome.detail
