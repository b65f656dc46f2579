"""Answers of a dataset as tokens, and as groups in the place of those that the policy samples.

The chat template decides where an answer begins and ends, not a search for its text. The tokens of an answer are those
by which the rendered conversation with the answer is longer than the prompt before it, up to the end token. So the
policy learns what it has to sample behind a prompt of a run or of the HTTP API, token by token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anyio.to_thread import run_sync
from msgspec.structs import replace

from clotho.data.problems import ASSISTANT, conversation
from clotho.lanes.sampling_client import GroupSampler
from clotho.models.tokenizer import Chat, ChatTokenizer
from protocols.errors import RequestError
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, SampleRequest, Sampling, turns_of
from protocols.step import TrainedGroup
from training_run.episodes.tokens import common_prefix
from training_run.groups.rollout_source import Complete
from training_run.supervision.hooks import UpdateHook

Message = Mapping[str, Any]


class Demonstration(NamedTuple):
    """One sequence to learn from. learned: whether each token is learned; never the first, which nothing predicts.

    advantage: of every learned token; -1 for the worse one of a pair.
    """

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]
    advantage: float = 1.0

    def cut(self, limit: int) -> Demonstration:
        """Return its first tokens."""
        return self._replace(tokens=self.tokens[:limit], learned=self.learned[:limit])


def messages_of(answer: Any) -> list[Message]:
    """Return the messages of an answer in a record: text, or a list of messages, whose empty parts are left out."""
    if isinstance(answer, str):
        return [{"role": ASSISTANT, "content": answer}]
    found = answer if isinstance(answer, list) else []
    return [{key: value for key, value in one.items() if value is not None} for one in found if isinstance(one, dict)]


def answers_of(
    messages: Sequence[Message], turns: Sequence[int], tools: Sequence[Message], tokenizer: ChatTokenizer
) -> list[Demonstration]:
    """Return the sequences in which the messages `turns` of the assistant are learned, and all others are context.

    One sequence, or several if the template does not only append to a conversation. Such a template writes an answer
    otherwise when more messages follow, for example without its reasoning; each answer is then learned behind the
    prompt that it had. Raises RequestError if the chat template cannot render the messages, or does not write an answer
    behind its generation prompt.
    """
    found: list[Demonstration] = []
    for index in turns:
        tokens, start = _answer(messages[: index + 1], tools, tokenizer)
        before = found[-1] if found else Demonstration((), ())
        if start < len(before.tokens) or tokens[: len(before.tokens)] != before.tokens:
            before = Demonstration((), ())
        context, answer = start - len(before.tokens), len(tokens) - start
        joined = Demonstration(tokens, (*before.learned, *[False] * context, *[True] * answer))
        found = [*(found[:-1] if before.tokens else found), joined]
    return found


def _answer(
    messages: Sequence[Message], tools: Sequence[Message], tokenizer: ChatTokenizer
) -> tuple[tuple[int, ...], int]:
    """Return a conversation up to the end token of its last message, and the index of the first token of it."""
    prompt = tokenizer.render_chat(messages[:-1], tools=tools)
    tokens = tokenizer.render_chat(messages, add_generation_prompt=False, tools=tools)
    start = len(prompt)
    if tokens[:start] != prompt or len(tokens) == start:
        raise RequestError("the chat template does not write an answer behind its generation prompt", param="messages")
    ends = (at + 1 for at in range(start, len(tokens)) if tokens[at] in tokenizer.eos_ids)
    return tokens[: next(ends, len(tokens))], start


def shared_tokens(found: Sequence[Demonstration]) -> int:
    """Return the number of first tokens that all sequences share, and of which none is learned."""
    return common_prefix([one.tokens[: one.learned.index(True)] for one in found])


class DatasetGroups:
    """Makes a group of the answers of each prompt's problem. Held-out problems get completions of the policy."""

    def __init__(
        self,
        read: Callable[[Problem], Sequence[Demonstration]],
        tokenizer: ChatTokenizer,
        *,
        system: str,
        version: Callable[[], int],
    ) -> None:
        """read: returns what is learned of a problem, in a worker thread; raises RequestError.

        system: system message of prompts. version: returns the policy version that is served now.
        """
        self._read, self._tokenizer, self._system, self._version = read, tokenizer, system, version

    def group(self, prompt: Prompt, version: int) -> RolloutGroup | Discarded:
        """Return the group of a prompt."""
        try:
            found = self._read(prompt.problem)
        except RequestError as error:
            return Discarded(prompt=prompt, reason="invalid", detail=str(error))
        if not found:
            return Discarded(prompt=prompt, reason="invalid", detail="nothing is learned of the first max_tokens")
        shared = shared_tokens(found)
        return RolloutGroup(
            prompt=replace(prompt, tokens=found[0].tokens[:shared]),
            completions=tuple(self._completion(one, shared, version) for one in found),
        )

    def source(self, sampler: GroupSampler, group_size: int) -> DatasetGroups:
        """Return what makes groups. Nothing is sampled for them."""
        return self

    async def groups(self, prompts: Sequence[Prompt]) -> AsyncGenerator[RolloutGroup | Discarded, None]:
        """Yield the group of each prompt, in their order."""
        for prompt in prompts:
            yield await run_sync(self.group, prompt, self._version())

    async def held_out(
        self, problems: Sequence[Problem], sampling: Sampling, seeds: Sequence[tuple[int, ...]], complete: Complete
    ) -> list[list[Completion]]:
        """Return completions of the policy, those of a run that samples its groups."""
        chats = [Chat(conversation(one, self._system), one.tools) for one in problems]
        prompts = await run_sync(self._tokenizer.render_chats, chats)
        requests = [
            SampleRequest(prompt=prompt, sampling=sampling, seeds=own)
            for prompt, own in zip(prompts, seeds, strict=True)
        ]
        found = []
        for outcome in await complete(requests):
            if isinstance(outcome, Exception):
                raise outcome
            found.append(outcome)
        return found

    def _completion(self, one: Demonstration, shared: int, version: int) -> Completion:
        """Return what follows the first `shared` tokens. Its log-probabilities are unknown, and 0 therefore."""
        tokens, learned, decode = one.tokens[shared:], one.learned[shared:], self._tokenizer.decode
        text = decode(tokens)
        return Completion(
            tokens=tokens,
            logprobs=(0.0,) * len(tokens),
            versions=(version,) * len(tokens),
            sampled=() if all(learned) else learned,
            turns=turns_of(tokens, learned, text, decode),
            text=text,
            finish_reason="stop" if tokens[-1] in self._tokenizer.eos_ids else "length",
            advantages=tuple(one.advantage if yes else 0.0 for yes in learned),
        )


class DatasetCounts(UpdateHook):
    """Counts the groups of a dataset that a batch has learned."""

    def __init__(self, name: str, problems: int) -> None:
        """name: of the attachment, whose metrics these are. problems: number of records."""
        self._name, self._problems, self._last, self._ended, self._cut = name, problems, 0, 0, 0

    def ended(self, trained: Sequence[TrainedGroup], discarded: Sequence[Discarded], *, version: int) -> None:
        """Take the groups of a batch into account."""
        for group in trained:
            prompt, completions = group.scored.prompt, group.scored.completions
            self._last = max(self._last, prompt.group_id + 1)
            self._ended += 1
            self._cut += any(one.finish_reason == "length" for one in completions)

    def metrics(self) -> Mapping[str, Any]:
        """Return the passes over the dataset so far, and the share of groups of the batch with a cut completion."""
        ended, cut, self._ended, self._cut = self._ended, self._cut, 0, 0
        return {
            f"{self._name}/epochs": self._last / self._problems,
            f"{self._name}/cut": cut / ended if ended else None,
        }
