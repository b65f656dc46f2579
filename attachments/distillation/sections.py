"""The settings of distillation in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from clotho.settings.bounds import PositiveFloat, about
from clotho.settings.mounted import Setting
from protocols.sampling import MAX_TOP_LOGPROBS, POLICY

HINT = "A correct solution is:\n\n{solution}\n\nNow solve the problem yourself."
"""Default of `hint`: the form of SDPO (arXiv:2601.20802), without feedback."""


class DistillationSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a teacher says about the completions of the policy; `learner.distillation_weight` is its weight."""

    teacher: Annotated[
        str,
        about(
            "Teacher: model directory, GGUF file or hub repository, or the URL of a server whose `/v1/completions` has "
            "`prompt_logprobs`; `@policy`: the policy itself with a hint; empty: none."
        ),
    ] = ""
    loss: Annotated[
        Literal["reverse_kl", "forward_kl"],
        about("KL(policy || teacher) on the sampled tokens, or KL(teacher || policy) on the teacher's best tokens."),
    ] = "reverse_kl"
    top_k: Annotated[int, about("Number of the teacher's best tokens at each position.", ge=1, le=MAX_TOP_LOGPROBS)] = (
        MAX_TOP_LOGPROBS
    )
    beside_rewards: Annotated[bool, about("Learn from rewards too; false: rewards are only reported.")] = False
    hint: Annotated[
        str,
        about(
            "What the policy reads as its own teacher behind the last message; {solution}: a correct completion of the "
            "group, {feedback}: the last message of the environment, {answer}: that of the problem.",
            min_length=1,
        ),
    ] = HINT
    entropy_sensitivity: Annotated[
        float,
        about(
            "Weight exp(-entropy_sensitivity H) of tokens that the policy teaches itself, relative to the mean of the "
            "batch; H: entropy of the teacher in nats; 0: equal weights.",
            ge=0,
            le=10,
        ),
    ] = 1.0
    model: Annotated[str, about("Name of the teacher at its server; empty: the server's only model.")] = ""
    api_key_env: Annotated[str, about("Environment variable with the API key of the server; empty: no key.")] = ""
    timeout_seconds: Annotated[PositiveFloat, about("Time for a group at the server, repeated requests included.")] = (
        60.0
    )

    @property
    def alternatives(self) -> int:
        """Number of the teacher's best tokens that the loss needs at each position."""
        return self.top_k if self.loss == "forward_kl" else 0

    @property
    def is_own(self) -> bool:
        """Whether the policy itself is the teacher."""
        return self.teacher == POLICY

    @property
    def is_model(self) -> bool:
        """Whether the teacher is a further model in the process."""
        return bool(self.teacher) and not self.is_own and not self.is_served

    @property
    def is_served(self) -> bool:
        """Whether a server has the teacher."""
        return self.teacher.startswith(("http://", "https://"))


DISTILLATION = Setting[DistillationSection](
    path="distillation",
    kind=DistillationSection,
    default=DistillationSection(),
    attachment="distillation",
    after="learner",
    paths={"distillation.teacher": "model"},
)

SETTINGS = (DISTILLATION,)
