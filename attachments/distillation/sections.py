"""The settings of distillation in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from clotho.settings.bounds import PositiveFloat, about
from clotho.settings.mounted import Setting
from protocols.sampling import MAX_TOP_LOGPROBS


class DistillationSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a teacher says about the completions of the policy; `learner.distillation_weight` is its weight."""

    teacher: Annotated[
        str,
        about(
            "Teacher: model directory, GGUF file or hub repository, or the URL of a server whose `/v1/completions` has "
            "`prompt_logprobs`; empty: none."
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
    model: Annotated[str, about("Name of the teacher at its server; empty: the server's only model.")] = ""
    api_key_env: Annotated[str, about("Environment variable with the API key of the server; empty: no key.")] = ""
    timeout_seconds: Annotated[PositiveFloat, about("Time for a group at the server, repeated requests included.")] = (
        60.0
    )

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
