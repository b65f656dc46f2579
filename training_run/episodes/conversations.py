"""The conversations of an episode: what an environment says becomes tokens, and what the policy samples is read.

A conversation begins with the prompt of its problem, or with messages of the environment. What is said later is
rendered by the chat template behind the tokens that were sampled (`ChatTokenizer.continue_chat`), and is context that
is not trained on. A template may write earlier turns otherwise, for example without their reasoning, which is kept
here. An environment that changes earlier messages begins the conversation anew, as a further row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from clotho.data.problems import conversation
from clotho.extension import Door, needs
from clotho.models.tokenizer import ANSWER_MARK, ChatTokenizer
from clotho.serving.chat_extension import MessageDelta
from protocols.errors import ProfileError, RequestError
from protocols.prompt import Problem
from protocols.sampling import Completion
from training_run.episodes.messages import Ask, PolicyTurn, SampledCall
from training_run.episodes.tokens import EpisodeRow

PROMPT_TAIL = 16
"""Number of last tokens of a prompt in which a chat template may open or close the reasoning."""

ADDED_ROLES = ("user", "tool")
"""Roles of the messages that an environment adds to a conversation."""

ROLES = ("system", "user", "assistant", "tool")
"""Roles of the messages of a whole conversation."""

MAX_READERS = 64
"""Sets of tools whose messages can be read, of which the newest are kept: tasks may have tools of their own."""

Tools = Sequence[Mapping[str, Any]]

ReadMessage = Callable[[str, str], MessageDelta]
"""Reads the end of a prompt and the text of a completion, special tokens included, as a whole message."""

MESSAGE_READER: Door[[str, Tools], ReadMessage | None] = Door("library.message_reader")
"""Returns what reads the messages of a model whose calls of tools are in the form of its chat template.

None: messages are texts. Raises ValueError if the form is unknown.
"""


class ChatWriter:
    """Writes and reads the messages of episodes with the chat template of the policy."""

    def __init__(self, tokenizer: ChatTokenizer, *, tools: Tools, system: str) -> None:
        """tools: of the environment. system: system message of prompts.

        Raises ProfileError if the chat template cannot continue a conversation, or its calls cannot be read.
        """
        self.tokenizer, self._tools, self._system = tokenizer, tools, system
        self._readers: dict[bytes, ReadMessage] = {}
        self.reader(tools)
        try:
            self.suffix(PolicyTurn(content="a"), [{"role": "user", "content": "b"}], tools)
        except RequestError as error:
            raise ProfileError(f"the environment cannot talk to this model: {error}") from None

    def tools(self, ask: Ask) -> Tools:
        """Return the tools of a conversation that this begins."""
        return ask.tools if ask.whole else self._tools

    def reader(self, tools: Tools) -> ReadMessage:
        """Return what reads the messages of the policy. Raises ProfileError if its calls of tools cannot be read."""
        key = msgspec.json.encode(tools)
        found = self._readers.get(key)
        if found is None:
            while len(self._readers) >= MAX_READERS:
                del self._readers[next(iter(self._readers))]
            found = self._readers[key] = message_reader(self.tokenizer, tools)
        return found

    def first(self, problem: Problem, ask: Ask) -> tuple[int, ...]:
        """Return the tokens of the prompt that begins a conversation. Raises RequestError."""
        if ask.whole:
            return self.tokenizer.render_chat([written(message) for message in ask.messages], tools=ask.tools)
        *before, last = conversation(problem, self._system)
        content = "\n\n".join([str(last["content"]), *(str(message["content"]) for message in ask.messages)])
        return self.tokenizer.render_chat([*before, {**last, "content": content}], tools=[*problem.tools, *self._tools])

    def suffix(self, answer: PolicyTurn, messages: Tools, tools: Tools) -> tuple[int, ...]:
        """Return the tokens between an answer and the next one. They do not depend on the arguments of calls."""
        message: dict[str, Any] = {"role": "assistant"}
        if answer.calls:
            calls = [{"name": call.name, "arguments": {ANSWER_MARK: ""}} for call in answer.calls]
            message["content"], message["tool_calls"] = (
                "",
                [
                    {"id": call.id, "type": "function", "function": function}
                    for call, function in zip(answer.calls, calls, strict=True)
                ],
            )
        return self.tokenizer.continue_chat(message, messages, tools=tools)


class Conversations:
    """The conversations of one episode. rows: in the order in which they began. turns: messages of the policy."""

    def __init__(self, writer: ChatWriter, problem: Problem) -> None:
        self._writer, self._problem = writer, problem
        self.rows: list[EpisodeRow] = []
        self.turns = 0
        self._open: dict[str, tuple[EpisodeRow, PolicyTurn, Tools]] = {}

    @property
    def forked(self) -> int:
        """Number of rows beyond the first of their conversation."""
        return len(self.rows) - len({row.conversation for row in self.rows})

    def unusable(self, ask: Ask) -> str:
        """Return why messages of an environment cannot be written; empty if they can."""
        begun = self._open.get(ask.conversation)
        if not ask.messages and (begun or ask.whole):
            return "it asks for another message without a message of its own"
        roles = ROLES if ask.whole else ADDED_ROLES
        if any(one.get("role") not in roles or not _has_content(one) for one in ask.messages):
            return f"its message needs one of the roles {', '.join(roles)}, and a text as its content"
        if begun is not None and not ask.whole and begun[1].finish == "length":
            return "it continues a message that the limit on tokens has cut"
        return ""

    def prompt(self, ask: Ask) -> tuple[EpisodeRow, tuple[int, ...]]:
        """Return the row of the next message of the policy, and what is added to it before. Raises RequestError."""
        begun = self._open.get(ask.conversation)
        if begun is not None and not ask.whole:
            row, answer, tools = begun
            return row, self._writer.suffix(answer, ask.messages, tools)
        return EpisodeRow(ask.conversation, self._writer.first(self._problem, ask)), ()

    def add(self, ask: Ask, row: EpisodeRow, context: tuple[int, ...], completion: Completion) -> PolicyTurn:
        """Add what was sampled, and return it as a message. Raises ProfileError if its calls cannot be read."""
        begun = self._open.get(ask.conversation)
        tools = self._writer.tools(ask) if begun is None or ask.whole else begun[2]
        tail = "".join(self._writer.tokenizer.token_text(token) for token in (*row.sequence, *context)[-PROMPT_TAIL:])
        message = self._writer.reader(tools)(tail, completion.text)
        if not self.rows or row not in self.rows:
            self.rows.append(row)
        row.add(self.turns, context, completion)
        calls = tuple(
            SampledCall(id=call.id or "", name=call.name or "", arguments=call.arguments) for call in message.calls
        )
        row.called.append(tuple(call.name for call in calls))
        self.turns += 1
        turn = PolicyTurn(
            content=message.content,
            reasoning=message.reasoning,
            calls=calls,
            finish="stop" if completion.finish_reason == "stop" else "length",
        )
        self._open[ask.conversation] = row, turn, tools
        return turn


def message_reader(tokenizer: ChatTokenizer, tools: Tools) -> ReadMessage:
    """Return what reads the messages of the policy. Raises ProfileError if its calls of tools cannot be read."""
    try:
        found = MESSAGE_READER.first(tokenizer.chat_template, tools)
    except ValueError as error:
        raise ProfileError(f"tools of an environment: {error}") from None
    if found is None and tools:
        raise ProfileError(f"tools of an environment: {needs('tools')}")
    return found or (lambda _, text: MessageDelta(content=text))


def written(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: arguments of calls are objects. Raises RequestError."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    try:
        functions = [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"] or "{}")}
            for call in calls
        ]
    except (ValueError, TypeError, KeyError):
        raise RequestError("a message has a call whose arguments are not a JSON object", param="messages") from None
    named = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return {**message, "content": message.get("content") or "", "tool_calls": named}


def _has_content(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), str) or bool(message.get("tool_calls"))
