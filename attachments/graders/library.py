"""What the graders add to the library: reward functions."""

from __future__ import annotations

from clotho.rewards.registry import BuiltIn

REWARDS = {
    "judge": BuiltIn(
        expects="what the judge model scores highly", load="attachments.graders.judge:load", has_settings=True
    ),
    "math_verify": BuiltIn(
        expects="an expression that equals the answer {place}", load="attachments.graders.math_verify:load"
    ),
}
