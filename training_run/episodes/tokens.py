"""The tokens of episodes: rows that only grow, of which nothing is tokenized twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from protocols.sampling import Completion, ExpertRoutes, FinishReason, grown_routes, turns_of


class EpisodeRow:
    """One growing list of tokens of an episode.

    conversation: that it belongs to. called: names of the tools that each message of the policy calls.
    """

    def __init__(self, conversation: str, prompt: tuple[int, ...]) -> None:
        self.conversation, self.prompt = conversation, prompt
        self.finish: FinishReason = "stop"
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sampled: list[bool] = []
        self._supports: list[bytes] = []
        self._routes: ExpertRoutes | None = None
        self._turn: list[int] = []
        self.called: list[tuple[str, ...]] = []

    @property
    def sequence(self) -> tuple[int, ...]:
        """The prompt and all tokens behind it."""
        return (*self.prompt, *self._tokens)

    def add(self, turn: int, context: Sequence[int], completion: Completion) -> None:
        """Add tokens of the environment, and what the policy has sampled behind them as a turn of the episode."""
        version = self._versions[-1] if self._versions else completion.versions[0]
        added, sampled = len(context), len(completion.tokens)
        self._tokens += [*context, *completion.tokens]
        self._logprobs += [*[0.0] * added, *completion.logprobs]
        self._versions += [*[version] * added, *completion.versions]
        self._sampled += [*[False] * added, *[True] * sampled]
        self._supports += [*[b""] * added, *(completion.supports or [b""] * sampled)]
        self._routes = grown_routes(self._routes, completion.routes)
        self._turn += [turn] * (added + sampled)
        self.finish = completion.finish_reason

    def completion(
        self,
        shared: int,
        *,
        decode: Callable[[Sequence[int]], str],
        reward: float | None,
        advantages: Sequence[float] = (),
    ) -> Completion:
        """Return the row behind the first `shared` tokens of its prompt, which all rows of its group have.

        advantages: of the turns of the episode; empty if they follow from the reward.
        """
        before = self.prompt[shared:]
        tokens, added = (*before, *self._tokens), len(before)
        sampled, text, called = (*[False] * added, *self._sampled), decode(tokens), iter(self.called)
        turns = turns_of(tokens, sampled, text, decode)
        return Completion(
            tokens=tokens,
            logprobs=(*[0.0] * added, *self._logprobs),
            versions=(*self._versions[:1] * added, *self._versions),
            sampled=sampled,
            turns=tuple(structs.replace(turn, tools=next(called)) if turn.sampled else turn for turn in turns),
            supports=(*[b""] * added, *self._supports) if any(self._supports) else (),
            routes=self._routes,
            text=text,
            finish_reason=self.finish,
            reward=reward,
            advantages=(*[0.0] * added, *(advantages[turn] for turn in self._turn)) if advantages else (),
        )


class Ran(Struct, frozen=True, kw_only=True):
    """An episode that has ended. rows: that are trained on; at least one. rewards: of the rows.

    reward: of the episode. turn_rewards: empty, or one per turn.
    """

    rows: tuple[EpisodeRow, ...]
    rewards: tuple[float | None, ...]
    reward: float | None
    turn_rewards: tuple[float, ...] = ()


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    """Return the number of first tokens that all sequences share."""
    shortest = min(map(len, sequences))
    differ = (at for at in range(shortest) if len({sequence[at] for sequence in sequences}) > 1)
    return next(differ, shortest)
