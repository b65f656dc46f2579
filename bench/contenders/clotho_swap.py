"""Clotho's weight swap between two decode steps of an engine with running sequences."""

from __future__ import annotations

import statistics
import time

import mlx.core as mx
from mlx.utils import tree_map

from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model
from bench.contenders.worker import Case, MeasureOnce, serve
from bench.shapes import make_policy, unending
from clotho.inference.engine import DecodeEngine
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.settings.engine import EngineSection
from clotho.settings.model import FullMethod, PolicySection

SWAPS, ROWS = 50, 8
KINDS = {"lora": PolicySection(), "full": PolicySection(method=FullMethod())}


def prepare(case: Case) -> MeasureOnce:
    """An engine with sequences that do not end, and two sets of weights that alternate."""
    model, config = named_model(case["model"])
    policy = make_policy(model, config, section=KINDS[case["weights"]])
    engine = DecodeEngine(policy, EngineSection())
    request = unending(policy, ROWS)
    versions = [policy.trainable(), tree_map(lambda array: array + 0.0, policy.trainable())]
    mx.eval(versions)

    def swaps() -> dict[str, float]:
        rows = engine.submit(request, lambda _: None)
        engine.tick()
        seconds = [_swap(policy, engine, versions[turn % 2], turn) for turn in range(SWAPS)]
        engine.abort(rows)
        engine.tick()
        return {"swap_seconds": statistics.median(seconds), "longest_swap_seconds": max(seconds)}

    return swaps


def _swap(policy: Policy, engine: DecodeEngine, parameters: Parameters, version: int) -> float:
    began = time.perf_counter()
    policy.publish(parameters, version=version, step=version, fingerprint=str(version))
    engine.weights_changed("keep")
    seconds = time.perf_counter() - began
    engine.tick()
    return seconds


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_swap"], packages=["mlx", "mlx-lm"])
