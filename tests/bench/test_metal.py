"""`metal`: the report of a Mac owner, on a tiny model and without a GPU."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from bench import metal
from bench.contenders import clotho_metal, mlx_lm_metal
from bench.contenders.metal_model import LOGITS, OTHERS, SHAPES, metal_configuration, packed_model
from bench.contenders.process import VARIABLE, Contender, running
from bench.contenders.worker import Metrics
from bench.measurement import Case, Measurement, Metric, read
from bench.metal_report import NOT_MEASURED, report, write_report
from clotho.backend import Backend, backend
from tests.bench.made_measurements import HERE
from training_run.main import RELAXED_GPU_TIMEOUT

pytestmark = pytest.mark.usefixtures("device_path")

TINY = metal.TINY[0]
QUICK = metal.phases(TINY, quick=True)


def test_this_module_computes_on_the_device_path() -> None:
    """As a Mac does."""
    assert type(backend()) is Backend


def cases(phase: str, **changes: str | float) -> list[Case]:
    """The quick cases of a phase, with enough time."""
    found = [one.case for one in QUICK if one.case["phase"] == phase]
    return [{"model": TINY, "seconds": 60.0, **case, **changes} for case in found]


@cache
def of_clotho(phase: str) -> list[Metrics]:
    """What Clotho reports of the quick cases of a phase."""
    return [clotho_metal.prepare(case)() for case in cases(phase)]


@pytest.mark.parametrize("phase", clotho_metal.PHASES)
def test_every_phase_reports_metrics_that_the_report_knows(phase: str) -> None:
    """Finite, with unit and direction. `partial` is a mark and no metric.

    On the CPU, equal seeds give equal completions with their log-probabilities, and equal updates, bit for bit.
    """
    for reported in of_clotho(phase):
        metrics = {name: value for name, value in reported.items() if name != "partial"}
        assert reported.get("partial", 0.0) == 0.0
        assert metrics
        assert set(metrics) <= set(metal.METRICS)
        assert all(map(math.isfinite, metrics.values()))
        equal = {"determinism": {"samples_equal": 1.0}, "update": {"updates_equal": 1.0}}.get(phase, {})
        assert equal.items() <= metrics.items()


def test_both_contenders_compute_the_same_function() -> None:
    """Equal base weights and equal adapters: logits are equal up to the rounding of bfloat16, and have its range."""
    config = metal_configuration(TINY)
    tokens_1_T = mx.array([[5, 7, 900, 3, 44]])
    ours, theirs = clotho_metal.adapted(config).model, mlx_lm_metal.adapted(config)
    found, expected, bare = (
        np.array(model(tokens_1_T).astype(mx.float32)) for model in (ours, theirs, packed_model(config))
    )
    rounding, adapter = (found - expected).std(), (found - bare).std()
    assert rounding < 0.05 * LOGITS
    assert adapter > 3 * rounding
    assert LOGITS / 2 < found.std() < 2 * LOGITS


def test_mlx_lm_reports_the_same_metrics_and_needs_more_kernels() -> None:
    """Its LoRA layers are not folded."""
    for phase in ("decode", "first_token", "graph"):
        for case, ours in zip(cases(phase), of_clotho(phase), strict=True):
            theirs = mlx_lm_metal.prepare(case)()
            assert set(ours) == set(theirs)
    assert ours["kernels"] < theirs["kernels"]
    assert ours["nodes"] < theirs["nodes"]


@pytest.mark.parametrize("model", metal.TINY[1:])
def test_other_layers_have_decode_steps_and_an_update(model: str) -> None:
    """Recurrent layers, and experts; the shapes for a Mac have the same architectures."""
    assert OTHERS[model]["model_type"] == OTHERS[model.removeprefix("tiny ")]["model_type"]
    planned = metal.phases(model, quick=True)
    assert [phase.case["phase"] for phase in planned] == ["decode", "update"]
    for phase in planned:
        metrics = clotho_metal.prepare({"model": model, "seconds": 60.0, **phase.case})()
        assert all(map(math.isfinite, metrics.values()))


def test_a_phase_without_time_reports_what_it_has() -> None:
    """At least one decode step and one swap; an update stops between two turns. A parity check has no result."""
    with pytest.raises(RuntimeError):
        clotho_metal.parity(cases("parity", seconds=1e-9)[0])
    for phase in ("decode", "swap", "update"):
        metrics = clotho_metal.prepare(cases(phase, seconds=1e-9)[0])()
        assert metrics["partial"] == 1.0
        assert set(metrics) <= {"partial", *metal.METRICS}


def test_the_shapes_are_those_of_qwen3() -> None:
    """Parameters in the blocks and in the tied embedding, in billions."""
    for name, total in (("Qwen3-0.6B", 0.596), ("Qwen3-1.7B", 1.72)):
        layers, width, heads, key_heads, feed_forward, vocabulary = SHAPES[name]
        head = metal_configuration(name)["head_dim"]
        block = 2 * width * head * (heads + key_heads) + 3 * width * feed_forward
        assert (layers * block + vocabulary * width) / 1e9 == pytest.approx(total, rel=0.01)


def fake(name: str) -> Contender:
    """A contender that does what its cases say."""
    return Contender(name=name, module="tests.bench.fake_contender", environment={"FAKE": name})


def measured(*phases: metal.Phase, seconds: float) -> list[Measurement]:
    """Measure these phases."""
    clock = metal.Clock(seconds, [phase.weight for phase in phases])
    return list(metal.Bench(clock, HERE).model("made", phases))


def test_a_process_that_ends_or_hangs_costs_its_phase_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if macOS had ended it for lack of memory. The next phase has a new process."""
    monkeypatch.setitem(metal.METRICS, "runs", Metric(name="runs", unit="runs", better="higher"))
    monkeypatch.setattr(metal, "GRACE", 0.1)
    monkeypatch.setattr(metal, "LEAST_GRACE", 0.1)
    both = (fake("one"),)
    found = measured(
        metal.Phase({"phase": "a", "then": "die"}, both, 1.0),
        metal.Phase({"phase": "b", "then": "hang"}, both, 0.001),
        metal.Phase({"phase": "c"}, both, 1.0),
        seconds=2000.0,
    )
    assert [(one.case["phase"], one.metric) for one in found] == [
        ("a", NOT_MEASURED), ("b", NOT_MEASURED), ("c", "runs"),
    ]  # fmt: skip
    assert "no result within" in found[1].semantics
    table = report(found)
    assert all(one.semantics in table for one in found[:2])


def test_phases_after_the_end_of_the_time_are_listed() -> None:
    """No process is started for them."""
    phase = metal.Phase({"phase": "a"}, (Contender(name="none", module="no.such.module"),), 1.0)
    assert [one.metric for one in measured(phase, seconds=0.5)] == [NOT_MEASURED]


def test_one_contender_computes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All phases of a contender come before those of the next, whose process starts when the first one has ended."""
    alive: list[str] = []
    most: list[int] = []

    @contextmanager
    def process(contender: Contender) -> Iterator[Any]:
        alive.append(contender.name)
        most.append(len(alive))
        try:
            with running(contender) as started:
                yield started
        finally:
            alive.remove(contender.name)

    monkeypatch.setitem(metal.METRICS, "runs", Metric(name="runs", unit="runs", better="higher"))
    monkeypatch.setattr(metal, "running", process)
    both = (fake("one"), fake("two"))
    phases = [metal.Phase({"phase": name}, both, 1.0) for name in ("a", "b")]
    found = measured(*phases, seconds=2000.0)
    assert [(one.contender, one.case["phase"]) for one in found] == [
        ("one", "a"), ("one", "b"), ("two", "a"), ("two", "b"),
    ]  # fmt: skip
    assert most == [1, 1]


def test_a_contender_without_its_environment_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says how to install it; the phase of others goes on."""
    monkeypatch.setenv(VARIABLE, "/nonexistent/python")
    (one,) = measured(metal.Phase({"phase": "update"}, (metal.MLX_LM_LORA,), 1.0), seconds=100.0)
    assert one.metric == NOT_MEASURED
    assert "requirements.txt" in one.semantics


def test_measurements_are_protected_as_runs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Mac: no sleep, and a driver of the GPU that waits longer."""
    inside: list[bool] = []

    @contextmanager
    def awake(*, enabled: bool) -> Iterator[None]:
        inside.append(enabled)
        yield

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(metal, "no_idle_sleep", awake)
    monkeypatch.delenv(RELAXED_GPU_TIMEOUT, raising=False)
    with metal.protected():
        assert inside == [True]
        assert os.environ[RELAXED_GPU_TIMEOUT] == "1"
    monkeypatch.delenv(RELAXED_GPU_TIMEOUT)


def test_unused_time_is_given_to_later_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are those of the time that is left."""
    now = [0.0]
    monkeypatch.setattr("bench.metal.time.monotonic", lambda: now[0])
    clock = metal.Clock(100.0, [1.0, 1.0, 2.0])
    assert clock.take(1.0) == 25.0
    now[0] = 1.0
    assert clock.take(1.0) == 33.0
    now[0] = 60.0
    assert (clock.take(2.0), clock.left) == (40.0, 40.0)


@pytest.mark.slow
def test_the_command_writes_tables_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every phase of the quick mode, in processes; the file has machine, versions and backend with every number."""
    file = tmp_path / "metal.jsonl"
    assert metal.main(["--quick", "--out", str(file)]) == 0
    results = read(file)
    assert {one.case["phase"] for one in results} == {"machine", "learning", *clotho_metal.PHASES}
    assert {one.contender for one in results if one.metric == NOT_MEASURED} <= {"mlx-lm-lora"}
    assert all(one.fingerprint == results[0].fingerprint for one in results)
    assert {one.contender for one in results if one.metric == "tokens_per_second"} == {"clotho", "mlx-lm"}
    assert {one.case["profile"] for one in results if one.metric == "accuracy"} == set(metal.PROFILES)
    page = tmp_path / "page.md"
    page.write_text("<!-- macs:begin --><!-- macs:end -->")
    assert "```text" in write_report([file], page)
    assert "no Mac yet" in page.read_text()  # the tiny models are none of README's
    table = capsys.readouterr().out
    assert str(file) in table
    assert all(word in table for word in ("kernels", "clotho / mlx-lm", "mean kl", "longest turn seconds"))
