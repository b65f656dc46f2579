"""What the engine knows of a request and of each of its completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clotho.inference.cache_layout import PromptState
from clotho.inference.stop_strings import TextTracker
from protocols.sampling import SampleEvent, SampleRequest

Listener = Callable[[SampleEvent], None]


@dataclass(eq=False, slots=True)
class Asked:
    """A request that was accepted. limit: tokens per completion, clamped to the context; open: completions to come."""

    request_id: int
    request: SampleRequest
    listener: Listener
    limit: int
    open: int

    @property
    def reserved(self) -> int:
        """The most tokens that a completion and its prompt can come to."""
        return len(self.request.prompt) + self.limit


@dataclass(eq=False, slots=True)
class Row:
    """One completion. `tokens`, `logprobs` and `versions` are filled when it leaves the batch.

    top_logprobs, supports: of each token drawn so far, where the request asks for them.
    """

    asked: Asked
    index: int
    serial: int
    text: TextTracker | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)

    @property
    def attentive(self) -> bool:
        """Whether the host must look at every token of this row as it is drawn."""
        request = self.asked.request
        return self.text is not None or bool(request.sampling.stop_token_ids or request.sampling.top_logprobs)


@dataclass(eq=False, slots=True)
class Job:
    """Rows that wait for the same tokens to be computed: a group's prompt, or one interrupted row's whole past.

    tokens: all tokens but the last are computed into `state`; the last is the first input of every row.
    state_tokens: how many tokens `state` covers until then. admitted: how many of `rows` may join the batch now.
    """

    asked: Asked
    tokens: tuple[int, ...]
    rows: list[Row]
    admitted: int = 0
    computed: bool = False
    state: PromptState | None = None
    state_tokens: int = 0
