"""What the graders add to the library: reward functions that compare an answer with its reference, and a judge."""

from __future__ import annotations

from clotho.rewards.registry import BuiltIn

REWARDS = {
    "math_eval": BuiltIn(expects="the value of the answer {place}", place="attachments.graders.math_eval:reward"),
    "jaccard": BuiltIn(expects="words of the answer {place}", place="attachments.graders.jaccard:reward"),
    "choice_correctness": BuiltIn(
        expects="the letter or text of the correct option {place}",
        place="attachments.graders.choice_correctness:reward",
    ),
    "judge": BuiltIn(
        expects="what the judge model scores highly", load="attachments.graders.judge:load", has_settings=True
    ),
    "math_verify": BuiltIn(
        expects="an expression that equals the answer {place}", load="attachments.graders.math_verify:load"
    ),
}
