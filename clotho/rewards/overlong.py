"""A growing penalty for completions that come near the limit of their length."""

from __future__ import annotations

from msgspec import Struct

from protocols.errors import ProfileError
from protocols.sampling import Completion

OVERLONG = "overlong"
"""Name of the penalty among the parts of a reward."""


class Overlong(Struct, frozen=True, kw_only=True):
    """Soft overlong punishment (DAPO, arXiv:2503.14476, equation 13).

    With n completion tokens of at most L = `max_tokens`, and c = `buffer`: 0 for n <= L - c; (L - c - n) / c between;
    -1 at the limit, and for every completion that was cut off. Times `penalty`.
    """

    max_tokens: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        """Refuse, with ProfileError, a buffer that is empty or does not fit below the limit."""
        if not 1 <= self.buffer <= self.max_tokens:
            raise ProfileError(
                f"learner.overlong_buffer = {self.buffer}: a penalty needs a buffer of 1 to sampling.max_tokens = "
                f"{self.max_tokens} tokens"
            )

    def __call__(self, completion: Completion) -> float:
        """What is added to the completion's reward: between -penalty and 0."""
        if completion.finish_reason == "length":
            return -self.penalty
        beyond = len(completion.tokens) - (self.max_tokens - self.buffer)
        return -self.penalty * min(1.0, beyond / self.buffer) if beyond > 0 else 0.0
