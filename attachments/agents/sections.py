"""The settings of agents in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from clotho.settings.bounds import Off, Positive, PositiveFloat, Variant, about
from clotho.settings.mounted import Setting

Credit = Literal["episode", "turn"]


class PythonAgent(Variant, frozen=True, kw_only=True, tag="python"):
    """An episode is a conversation of the policy with an environment, which is Python code in worker processes."""

    environment: Annotated[str, about("MODULE:NAME or FILE.py:NAME of the environment.", pattern=r"^.+:\w+$")]
    max_turns: Annotated[Positive, about("Messages of the policy in an episode; then it ends, and is rewarded.")] = 16
    max_tokens: Annotated[Positive, about("Tokens of an episode, of its prompt and its environment too.")] = 2048
    credit: Annotated[Credit, about("Advantages from the reward of the episode, or from rewards per turn.")] = "episode"
    step_seconds: Annotated[PositiveFloat, about("Time limit of the environment between two messages.")] = 30.0
    max_workers: Annotated[Positive, about("Worker processes of the environment.")] = 4
    memory_limit_mb: Annotated[Positive, about("Memory limit of a worker process.")] = 4096


AgentSection = Annotated[Off | PythonAgent, about("What the policy converses with in an episode; off: one completion.")]

AGENT = Setting[Off | PythonAgent](
    path="agent",
    kind=AgentSection,
    default=Off(),
    attachment="agents",
    after="atropos",
    used_by=("eval",),
    paths={"agent.environment": "code"},
)

SETTINGS = (AGENT,)
