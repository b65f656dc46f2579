"""Clotho's policy update, one turn at a time, as the learner's thread runs it."""

from __future__ import annotations

import os

from bench.contenders.measured_turns import MeasuredTurns
from bench.contenders.rollouts import RANK, RATE, SCALE, measured, rollouts
from bench.contenders.scored_groups import groups
from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve
from bench.shapes import make_policy
from clotho.models.turns import UNSHARED, Turns
from clotho.settings.engine import SamplingSection
from clotho.settings.learner import AdamW, ConstantSchedule, LearnerSection
from clotho.settings.model import Lora, PolicySection
from clotho.settings.objectives import Grpo, Objective
from clotho.training.update import PolicyLearner

MAX_TURN_MS = "CLOTHO_BENCH_MAX_TURN_MS"
"""Environment variable with `learner.max_turn_ms`; the default of the profile without it."""
GRAD_CHECKPOINT = "CLOTHO_BENCH_GRAD_CHECKPOINT"
"""Environment variable that turns on `policy.grad_checkpoint`."""


def learner_of(case: Case, objective: Objective, lane: Turns = UNSHARED) -> PolicyLearner:
    """A learner of the case's model with a new adapter; other settings are the defaults of a profile."""
    model, config = named_model(case["model"], vocabulary=case["vocabulary"])
    section = PolicySection(method=Lora(rank=RANK, scale=SCALE), grad_checkpoint=GRAD_CHECKPOINT in os.environ)
    policy = make_policy(model, config, section=section)
    defaults = LearnerSection()
    settings = LearnerSection(
        objective=objective,
        optimizer=AdamW(learning_rate=RATE),
        schedule=ConstantSchedule(),
        micro_batch_tokens=case.get("micro_batch_tokens", defaults.micro_batch_tokens),
        max_turn_ms=float(os.environ.get(MAX_TURN_MS, defaults.max_turn_ms)),
    )
    sampling = SamplingSection(max_tokens=case["completion_tokens"])
    return PolicyLearner(policy, settings, sampling, steps=1, lane=lane)


def prepare(case: Case) -> MeasureOnce:
    """A learner and one batch that every run trains on."""
    turns = MeasuredTurns()
    learner = learner_of(case, Grpo(), turns)
    batch, tokens = groups(case), rollouts(case).tokens

    def update() -> None:
        ended = turns.run(lambda: learner.update(batch))
        if ended is None or not ended.applied:
            raise RuntimeError("the update was not applied")

    def once() -> Metrics:
        metrics = measured(update, tokens)
        return {**metrics, "longest_turn_seconds": turns.longest}

    return once


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_update"], packages=["mlx", "mlx-lm"])
