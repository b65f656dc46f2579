"""Length penalty `overlong` for completions near the token limit."""

from __future__ import annotations

from msgspec import Struct

from protocols.errors import ProfileError
from protocols.sampling import Completion

OVERLONG = "overlong"
"""Name of the penalty among the reward components."""


class Overlong(Struct, frozen=True, kw_only=True):
    """Soft overlong punishment (DAPO, arXiv:2503.14476, equation 13), multiplied by `penalty`.

    For n completion tokens, limit L = `max_tokens` and buffer c = `buffer`: 0 if n <= L - c; (L - c - n) / c if
    L - c < n < L; -1 if n = L. A completion with finish reason `length` has -1.
    """

    max_tokens: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        """Check that the buffer is between 1 and `max_tokens`. Raises ProfileError."""
        if not 1 <= self.buffer <= self.max_tokens:
            raise ProfileError(
                f"learner.objective.overlong_penalty.buffer = {self.buffer} is out of range: "
                "use 1 to sampling.max_tokens = "
                f"{self.max_tokens}"
            )

    def __call__(self, completion: Completion) -> float:
        """Return the value that is added to the reward of the completion, in [-penalty, 0]."""
        if completion.finish_reason == "length":
            return -self.penalty
        excess = len(completion.tokens) - (self.max_tokens - self.buffer)
        return -self.penalty * min(1.0, excess / self.buffer) if excess > 0 else 0.0
