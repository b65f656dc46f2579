"""Our policy update, in this process, as the compute thread takes its passes."""

from __future__ import annotations

from bench.contenders.clotho_learn import finished, groups
from bench.contenders.loop import Case, Once, serve
from bench.contenders.rollouts import RANK, RATE, SCALE, measured, rollouts
from bench.contenders.shapes import named_model
from bench.shapes import policy_of
from clotho.config.schema import LearnerSection, PolicySection, SamplingSection
from clotho.training.update import PolicyLearner

SEMANTICS = (
    "An update with the profile's default settings, from scored groups to evaluated weights and their fingerprint: "
    "advantages, micro-batches, the clipped ratio to the log-probabilities that the completions were sampled with, the "
    "exact entropy and the other metrics of an update, clipping of the gradient, AdamW."
)


def prepare(case: Case) -> Once:
    """A learner, and a batch that it learns from again and again."""
    model, config = named_model(case["model"], vocabulary=case["vocabulary"])
    policy = policy_of(model, config, section=PolicySection(rank=RANK, scale=SCALE))
    settings = LearnerSection(learning_rate=RATE, schedule="constant")
    learner = PolicyLearner(policy, settings, SamplingSection(max_tokens=case["completion_tokens"]), steps=1)
    batch, tokens = groups(case), rollouts(case).tokens

    def update() -> None:
        if not finished(learner, batch).applied:
            raise RuntimeError("nothing was learned")

    return lambda: measured(update, tokens)


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
