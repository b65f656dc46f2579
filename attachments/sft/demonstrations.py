"""Records as demonstrations: their tokens, and which of them are learned.

The chat template decides where an answer begins and ends, not a search for its text. The tokens of an answer are those
by which the rendered conversation with the answer is longer than the prompt before it, up to the end token. So the
policy learns what it has to sample behind a prompt of a run or of the HTTP API, token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attachments.sft.sections import SftSection
from clotho.data.problems import ASSISTANT, COMPLETION, conversation
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.data import DataSection
from protocols.errors import ProfileError, RequestError, visible
from protocols.prompt import Problem

Message = Mapping[str, Any]


class Demonstration(NamedTuple):
    """One sequence to learn from. learned: whether each token is learned; never the first, which nothing predicts."""

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


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
        answers: Sequence[Message] = written[len(problem.messages) :] if isinstance(written, list) else ()
        if isinstance(given := problem.extra.get(COMPLETION), list):
            answers = given
        elif problem.completion and (isinstance(given, str) or not answers):
            answers = [{"role": ASSISTANT, "content": problem.completion}]
        found = [{key: value for key, value in one.items() if value is not None} for one in answers]
        return [*conversation(problem, self._data.system), *found]

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
        """Return the sequences of a problem: one, or several if the template does not only append to a conversation.

        Such a template writes an answer otherwise when more messages follow, for example without its reasoning; each
        answer is then learned behind the prompt that it had. Longer sequences than `sft.max_tokens` are cut, and left
        out if nothing is learned then. Raises RequestError if the chat template cannot render the messages, or does not
        write an answer behind its generation prompt.
        """
        limit = self._settings.max_tokens
        cut = [Demonstration(one.tokens[:limit], one.learned[:limit]) for one in self._whole(problem)]
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
        found: list[Demonstration] = []
        for index in turns[-1:] if self._settings.train_on == "last" else turns:
            tokens, start = self._answer(messages[: index + 1], problem.tools)
            before = found[-1] if found else Demonstration((), ())
            if start < len(before.tokens) or tokens[: len(before.tokens)] != before.tokens:
                before = Demonstration((), ())
            context, answer = start - len(before.tokens), len(tokens) - start
            joined = Demonstration(tokens, (*before.learned, *[False] * context, *[True] * answer))
            found = [*(found[:-1] if before.tokens else found), joined]
        return found

    def _answer(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[tuple[int, ...], int]:
        """Return a conversation up to the end token of its last message, and the index of the first token of it."""
        prompt = self._tokenizer.render_chat(messages[:-1], tools=tools)
        tokens = self._tokenizer.render_chat(messages, add_generation_prompt=False, tools=tools)
        start = len(prompt)
        if tokens[:start] != prompt or len(tokens) == start:
            raise RequestError(
                "the chat template does not write an answer behind its generation prompt", param="messages"
            )
        ends = (at + 1 for at in range(start, len(tokens)) if tokens[at] in self._tokenizer.eos_ids)
        return tokens[: next(ends, len(tokens))], start

    def _text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text with an end token, as mlx-lm trains on its format `text`."""
        tokens, end = self._tokenizer.encode(text), self._tokenizer.hugging_face.eos_token_id
        return tokens if end is None or tokens[-1:] == (end,) else (*tokens, end)


def _all(tokens: tuple[int, ...]) -> Demonstration:
    return Demonstration(tokens, (False, *[True] * (len(tokens) - 1)))
