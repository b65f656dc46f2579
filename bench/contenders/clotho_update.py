"""Clotho's policy update, one step at a time, as the compute thread runs it."""

from __future__ import annotations

from bench.contenders.clotho_learn import finished, groups
from bench.contenders.rollouts import RANK, RATE, SCALE, measured, rollouts
from bench.contenders.semantics import SEMANTICS
from bench.contenders.shapes import named_model
from bench.contenders.worker import Case, MeasureOnce, serve
from bench.shapes import make_policy
from clotho.config.schema import Lora, PolicySection, SamplingSection
from clotho.config.sections_training import AdamW, ConstantSchedule, LearnerSection
from clotho.training.update import PolicyLearner


def prepare(case: Case) -> MeasureOnce:
    """A learner and one batch that every run trains on."""
    model, config = named_model(case["model"], vocabulary=case["vocabulary"])
    policy = make_policy(model, config, section=PolicySection(method=Lora(rank=RANK, scale=SCALE)))
    settings = LearnerSection(optimizer=AdamW(learning_rate=RATE), schedule=ConstantSchedule())
    learner = PolicyLearner(policy, settings, SamplingSection(max_tokens=case["completion_tokens"]), steps=1)
    batch, tokens = groups(case), rollouts(case).tokens

    def update() -> None:
        if not finished(learner, batch).applied:
            raise RuntimeError("the update was not applied")

    return lambda: measured(update, tokens)


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_update"], packages=["mlx", "mlx-lm"])
