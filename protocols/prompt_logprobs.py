"""What a policy thinks of a prompt: the contract of the compute thread with who asks for log-probabilities of text."""

from __future__ import annotations

from msgspec import Struct


class PromptLogprobs(Struct, frozen=True, kw_only=True):
    """Natural logs, under the policy's own distribution (temperature 1, nothing cut off), of given tokens.

    version: the weights that all of it was computed with.
    logprobs: of every token but the first, given those before it.
    top_logprobs: in the same places, the most probable (token, log-probability) pairs, best first.
    """

    version: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]

    def __post_init__(self) -> None:
        """Refuse parallel fields that differ in length."""
        if len(self.logprobs) != len(self.top_logprobs):
            raise ValueError(f"{len(self.top_logprobs)} top_logprobs for {len(self.logprobs)} logprobs of a prompt")
