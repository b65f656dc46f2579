"""Records as demonstrations, which come in the place of completions: their tokens, and which of them are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attachments.sft.sections import SftSection
from clotho.data.problems import ASSISTANT, COMPLETION, conversation
from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import ProfileError, RequestError, visible
from protocols.prompt import Problem
from training_run.groups.demonstrations import Demonstration, Message, answers_of, messages_of
from training_run.profile.data import DataSection


class Demonstrator:
    """Makes the demonstrations of problems. Thread-safe."""

    def __init__(self, settings: SftSection, data: DataSection, tokenizer: ChatTokenizer) -> None:
        self._settings, self._data, self._tokenizer = settings, data, tokenizer

    def messages(self, problem: Problem) -> list[Message]:
        """Return the whole conversation of a problem: its messages, and the answer behind them if there is one.

        The answer is the column `completion` (text, or messages), else the messages of the assistant at the end of the
        conversation, else the text that contains the answer (`data.answer_pattern`).
        """
        written = problem.extra.get(self._data.prompt_key, problem.extra.get(self._data.messages_key))
        answers: Any = written[len(problem.messages) :] if isinstance(written, list) else ()
        if isinstance(given := problem.extra.get(COMPLETION), list):
            answers = given
        elif problem.completion and (isinstance(given, str) or not answers):
            answers = problem.completion
        return [*conversation(problem, self._data.system), *messages_of(answers)]

    def require(self, problems: Sequence[Problem]) -> None:
        """Raise ProfileError if a problem has no answer to learn, or the first one cannot be rendered."""
        lacking = [one for one in problems if not self._has_answer(one)]
        if lacking:
            raise ProfileError(
                f"data.train: {len(lacking)} of {len(problems)} records have no answer to learn, the first is "
                f"{visible(lacking[0].prompt, 60)!r}: records need a column `completion`, or messages that end with "
                'one of the assistant; for texts without turns set sft.train_on = "text"'
            )
        try:
            self.demonstrations(problems[0])
        except RequestError as error:
            raise ProfileError(f"data.train cannot be learned: {error}") from None

    def demonstrations(self, problem: Problem) -> list[Demonstration]:
        """Return the sequences of a problem; see `answers_of`, whose errors it raises.

        Longer sequences than `sft.max_tokens` are cut, and left out if nothing is learned then.
        """
        cut = [one.cut(self._settings.max_tokens) for one in self._whole(problem)]
        return [one for one in cut if any(one.learned)]

    def _has_answer(self, problem: Problem) -> bool:
        return self._settings.train_on == "text" or self.messages(problem)[-1].get("role") == ASSISTANT

    def _whole(self, problem: Problem) -> list[Demonstration]:
        if self._settings.train_on == "text":
            return [_all(self._text(problem.prompt))]
        messages = self.messages(problem)
        if self._settings.train_on == "all":
            return [_all(self._tokenizer.render_chat(messages, add_generation_prompt=False, tools=problem.tools))]
        turns = [index for index, one in enumerate(messages) if index and one.get("role") == ASSISTANT]
        chosen = turns[-1:] if self._settings.train_on == "last" else turns
        return answers_of(messages, chosen, problem.tools, self._tokenizer)

    def _text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text with an end token, as mlx-lm trains on its format `text`."""
        tokens, end = self._tokenizer.encode(text), self._tokenizer.hugging_face.eos_token_id
        return tokens if end is None or tokens[-1:] == (end,) else (*tokens, end)


def _all(tokens: tuple[int, ...]) -> Demonstration:
    return Demonstration(tokens, (False, *[True] * (len(tokens) - 1)))
