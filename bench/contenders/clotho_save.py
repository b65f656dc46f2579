"""Decode steps of an engine with running sequences, alone and while another thread saves checkpoints."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map

from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model
from bench.contenders.worker import Case, MeasureOnce, serve
from bench.shapes import make_policy, unending
from clotho.inference.engine import DecodeEngine
from clotho.settings.engine import EngineSection
from clotho.settings.model import FullMethod, PolicySection
from protocols.accounting import LedgerState
from protocols.checkpoint import RunState
from training_run.directory.checkpoints import Snapshot, write_checkpoint

ROWS, STEPS_ALONE, SAVES = 8, 100, 5


def prepare(case: Case) -> MeasureOnce:
    """An engine with sequences that do not end, and the state of a learner that trains all weights with AdamW."""
    model, config = named_model(case["model"])
    policy = make_policy(model, config, section=PolicySection(method=FullMethod()))
    engine = DecodeEngine(policy, EngineSection())
    request = unending(policy, ROWS)
    parameters = policy.trainable()
    optimizer = {moment: tree_map(lambda array: array + 0.0, parameters) for moment in ("m", "v")}
    mx.eval(optimizer)

    def save(directory: Path, step: int) -> None:
        snapshot = Snapshot(
            parameters=parameters, optimizer=optimizer, state=state_at(step), adapter_config=policy.adapter_config
        )
        write_checkpoint(directory, snapshot, keep_last=1)

    def steps() -> dict[str, float]:
        rows = engine.submit(request, lambda _: None)
        engine.tick()
        alone = [_seconds(engine.tick) for _ in range(STEPS_ALONE)]
        during: list[float] = []
        saves: list[float] = []
        with tempfile.TemporaryDirectory() as directory:
            for step in range(1, SAVES + 1):
                began = time.perf_counter()
                thread = threading.Thread(target=partial(save, Path(directory), step))
                thread.start()
                while thread.is_alive():
                    during.append(_seconds(engine.tick))
                saves.append(time.perf_counter() - began)
        engine.abort(rows)
        engine.tick()
        usual = statistics.median(alone)
        return {
            "longest_delay_seconds": max(during) - usual,
            "median_delay_seconds": statistics.median(during) - usual,
            "longest_alone_seconds": max(alone) - usual,
            "save_seconds": statistics.median(saves),
        }

    return steps


def state_at(step: int) -> RunState:
    """Return the state of a run after a step."""
    return RunState(
        step=step,
        version=step,
        fingerprint=str(step),
        ledger=LedgerState(),
        prompted=0,
        random_state=(0, 0),
        bad_steps=0,
        train_seconds=0.0,
        sampled_tokens=0,
        trained_tokens=0,
        inputs={},
    )


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_save"], packages=["mlx", "mlx-lm"])
