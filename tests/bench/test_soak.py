"""`python -m bench soak`: the plan of the faults, growth of memory, and the verdict."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest
from msgspec.structs import replace

from bench.fingerprint import fingerprint
from bench.soak import CLOSE_OUTPUT, KILL, KILLS, PER_MINUTE, Groups, SoakRun, groups_of, plan, table
from bench.soak_memory import memory_in_use
from bench.soak_process import WARM_UP_SECONDS, growth
from bench.soak_rewards import FAULTS, VARIABLE, reward

GOOD = SoakRun(
    minutes=30.0,
    seed=0,
    requests={"chat": {"200": 5}, "bad request": {"400": 2}},
    completion_tokens=40,
    hung_up=1,
    interrupted=0,
    unanswered=[],
    unexpected=[],
    faults={KILL: 4},
    groups=Groups(prompted=16, trained=12, discarded={"zero_variance": 4}, lost=0, duplicated=0),
    steps=1,
    repeated_steps=0,
    lives=[],
    failures=[],
    command="python -m bench soak",
    fingerprint=fingerprint(),
)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_has_every_kind_of_fault_within_the_soak(seed: int) -> None:
    """The plan is a function of the seed. Every life has a fault of its output before it is killed."""
    faults = plan(1800.0, seed)
    assert faults == plan(1800.0, seed) != plan(1800.0, seed + 1)
    assert faults == sorted(faults)
    assert all(0.0 <= fault.at <= 1800.0 for fault in faults)
    assert {fault.kind for fault in faults} == {KILL, CLOSE_OUTPUT}.union(*(kinds for kinds, _ in PER_MINUTE))
    lives = [fault.kind for fault in faults if fault.kind in (KILL, CLOSE_OUTPUT)]
    assert lives == [CLOSE_OUTPUT, KILL] * KILLS + [CLOSE_OUTPUT]


def test_growth_is_measured_after_warmup() -> None:
    """100 bytes per second after warmup; the memory of the warmup does not count."""
    seconds = [float(second) for second in range(int(WARM_UP_SECONDS) + 600)]
    values = [1e9 if second < WARM_UP_SECONDS else 100.0 * second for second in seconds]
    grown = growth(seconds, values)
    assert grown is not None
    assert grown.per_hour == grown.low == grown.high == pytest.approx(360_000.0)
    assert len(grown.by_minute) == 10
    short = int(WARM_UP_SECONDS) + 200
    assert growth(seconds[:short], values[:short]) is None


def test_noise_without_growth_has_an_interval_around_zero() -> None:
    """The interval is a few times wider than the slope, and a single high minute does not move it."""
    draw = random.Random(0)
    seconds = [WARM_UP_SECONDS + second for second in range(1200)]
    level = {minute: draw.gauss(900.0, 3.0) for minute in range(20)} | {12: 2000.0}
    grown = growth(seconds, [level[int(second - WARM_UP_SECONDS) // 60] for second in seconds])
    assert grown is not None
    assert grown.low < 0.0 < grown.high
    assert grown.high - grown.low < 60.0


@pytest.mark.needs_linux(reason="mallinfo2 is a function of glibc")
def test_memory_in_use_is_that_of_arrays_or_of_other_blocks() -> None:
    """20 MB of each. MLX's cache of freed buffers is not in use."""
    size = 20_000_000
    before = memory_in_use()
    block = bytearray(size)
    with_block = memory_in_use()
    array = mx.ones(size // 4)
    mx.eval(array)
    with_array = memory_in_use()
    assert with_block.other - before.other == pytest.approx(size, rel=0.1)
    assert with_array.mlx - with_block.mlx == pytest.approx(size, rel=0.1)
    assert abs(with_array.other - with_block.other) < 0.1 * size
    del block, array
    after = memory_in_use()
    assert abs(after.other - before.other) + abs(after.mlx - before.mlx) < 0.1 * size


@pytest.mark.parametrize(
    "changes",
    [
        {"unanswered": ["chat: timeout"]},
        {"unexpected": ["chat: status 500"]},
        {"failures": ["life 1 ended with status 1"]},
        {"repeated_steps": 1},
        {"groups": replace(GOOD.groups, lost=1)},
        {"groups": replace(GOOD.groups, duplicated=1)},
    ],
)
def test_a_soak_run_with_a_failure_does_not_pass(changes: dict[str, object]) -> None:
    """A soak run without failures passes. The table contains the counts."""
    assert GOOD.passed
    assert not replace(GOOD, **changes).passed
    assert "| requests refused, by status | 2 x 400 |" in table([GOOD])


def test_lost_and_duplicated_groups_are_found(tmp_path: Path) -> None:
    """Group 2 of 4 has no line; group 1 has two lines."""
    state = tmp_path / "checkpoints" / "step-000001"
    state.mkdir(parents=True)
    (state / "state.json").write_text('{"prompted": 4}')
    lines = [{"group_id": number, "outcome": "trained", "reason": None} for number in (0, 1, 1, 3)]
    (tmp_path / "rollouts.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert groups_of(tmp_path) == Groups(prompted=4, trained=4, discarded={}, lost=1, duplicated=1)


def test_a_reward_has_a_requested_fault_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that removes the file has the fault; all other calls return 0."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "reward returns 1e308").touch()
    assert [reward(None, "") for _ in range(3)] == [1e308, 0.0, 0.0]
    (tmp_path / "reward raises").touch()
    with pytest.raises(RuntimeError):
        reward(None, "")
    assert set(FAULTS) > {"reward hangs", "reward exits", "reward segfaults"}
