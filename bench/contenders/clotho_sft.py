"""Clotho's supervised fine-tuning: an update on a batch of demonstrations."""

from __future__ import annotations

from bench.contenders.clotho_update import learner_of
from bench.contenders.demonstrations import Demonstrations, demonstrations
from bench.contenders.rollouts import measured
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, serve
from clotho.settings.objectives import Sft
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion


def groups(batch: Demonstrations) -> list[ScoredGroup]:
    """A group of one completion per demonstration, whose tokens are all learned."""
    found = []
    for number, (prompt, answer) in enumerate(zip(*batch, strict=True)):
        nothing = (0,) * len(answer)
        completion = Completion(
            tokens=tuple(answer), logprobs=(0.0,) * len(answer), versions=nothing, text="", finish_reason="stop"
        )
        asked = Prompt(group_id=number, problem=Problem(prompt=""), tokens=tuple(prompt), seed=0)
        group = RolloutGroup(prompt=asked, completions=(completion,))
        ones = ((1.0,) * len(answer),)
        found.append(ScoredGroup(group=group, rewards=(1.0,), parts={}, token_advantages=ones))
    return found


def prepare(case: Case) -> MeasureOnce:
    """A learner and one batch that every run trains on."""
    learner, batch = learner_of(case, Sft()), demonstrations(case)
    made = groups(batch)

    def update() -> None:
        if not learner.update(made).applied:
            raise RuntimeError("the update was not applied")

    return lambda: measured(update, batch.tokens)


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["clotho_sft"], packages=["mlx", "mlx-lm"])
