"""Records as pairs of completions, or as completions with a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attachments.preference.sections import PreferenceSection
from clotho.data.problems import ASSISTANT, CHOSEN, COMPLETION, LABEL, conversation
from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import ProfileError, RequestError, visible
from protocols.prompt import Problem
from training_run.groups.demonstrations import Demonstration, Message, answers_of, messages_of
from training_run.profile.data import DataSection

REJECTED = "rejected"
"""Column of the worse completion of a pair, as in TRL."""


class PairReader:
    """Reads the completions of problems. Thread-safe."""

    def __init__(
        self, settings: PreferenceSection, data: DataSection, tokenizer: ChatTokenizer, *, labelled: bool
    ) -> None:
        """labelled: single completions with a label are accepted (`kto`)."""
        self._settings, self._data, self._tokenizer, self._labelled = settings, data, tokenizer, labelled

    def require(self, problems: Sequence[Problem]) -> None:
        """Raise ProfileError if a problem has nothing to compare, or the first one cannot be rendered."""
        lacking = [one for one in problems if not self._answers(one)]
        if lacking:
            labelled = f", or `{COMPLETION}` and `{LABEL}`" if self._labelled else ""
            raise ProfileError(
                f"data.train: {len(lacking)} of {len(problems)} records have no pair to learn, the first is "
                f"{visible(lacking[0].prompt, 60)!r}: records need the columns `{CHOSEN}` and `{REJECTED}`{labelled}; "
                'to compare completions that the policy samples, set preference.pairs = "rewards"'
            )
        try:
            self.judged(problems[0])
        except RequestError as error:
            raise ProfileError(f"data.train cannot be learned: {error}") from None

    def judged(self, problem: Problem) -> list[Demonstration]:
        """Return the completions of a problem: one of each kind, or a single one with a label; worse ones have -1.

        All messages of the assistant behind the prompt are learned. Longer sequences than `preference.max_tokens` are
        cut. Raises RequestError if the chat template cannot render the messages as one sequence, or does not write an
        answer behind its generation prompt, if nothing is left of a completion, or both are equal.
        """
        found = [
            self._demonstration(problem, answer)._replace(advantage=1.0 if better else -1.0)
            for answer, better in self._answers(problem)
        ]
        if len(found) > 1 and found[0][:2] == found[1][:2]:
            raise RequestError(f"{CHOSEN} and {REJECTED} are equal, as far as they are learned", param=REJECTED)
        return found

    def _answers(self, problem: Problem) -> list[tuple[Any, bool]]:
        columns = problem.extra
        if self._labelled and isinstance(label := columns.get(LABEL), bool) and columns.get(COMPLETION):
            return [(columns[COMPLETION], label)]
        if columns.get(CHOSEN) and columns.get(REJECTED):
            return [(columns[CHOSEN], True), (columns[REJECTED], False)]
        return []

    def _demonstration(self, problem: Problem, answer: Any) -> Demonstration:
        before = conversation(problem, self._data.system)
        messages = [*before, *_behind(conversation(problem, ""), messages_of(answer))]
        turns = [at for at, one in enumerate(messages) if at >= len(before) and one.get("role") == ASSISTANT]
        if not turns or turns[-1] != len(messages) - 1:
            raise RequestError("a completion ends with a message of the assistant", param="messages")
        found = answers_of(messages, turns, problem.tools, self._tokenizer)
        if len(found) > 1:
            raise RequestError("the chat template rewrites an answer when more messages follow", param="messages")
        cut = found[0].cut(self._settings.max_tokens)
        if not any(cut.learned):
            raise RequestError("nothing is learned of the first preference.max_tokens", param="max_tokens")
        return cut


def _behind(prompt: Sequence[Message], answer: list[Message]) -> list[Message]:
    """Return an answer without the messages of its prompt, which may stand before it. Raises RequestError."""
    if not answer or answer[0].get("role") == ASSISTANT:
        return answer
    if [_said(one) for one in answer[: len(prompt)]] != [_said(one) for one in prompt]:
        raise RequestError("a completion begins with its prompt or with a message of the assistant", param="messages")
    return answer[len(prompt) :]


def _said(message: Message) -> tuple[Any, Any]:
    return message.get("role"), message.get("content")
