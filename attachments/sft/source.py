"""Demonstrations as the groups of a run: they come in the place of completions that the policy samples."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from anyio.to_thread import run_sync
from msgspec.structs import replace

from attachments.sft.demonstrations import Demonstration, Demonstrator
from clotho.data.problems import conversation
from clotho.lanes.sampling_client import GroupSampler
from clotho.models.tokenizer import Chat, ChatTokenizer
from protocols.errors import RequestError
from protocols.prompt import Problem, Prompt
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, SampleRequest, Sampling, turns_of
from protocols.step import TrainedGroup
from training_run.groups.rollout_source import Complete
from training_run.supervision.hooks import UpdateHook


class DemonstrationSource:
    """Makes a group of the demonstrations of each prompt's problem. Held-out problems get completions of the policy."""

    def __init__(
        self, demonstrator: Demonstrator, tokenizer: ChatTokenizer, *, system: str, version: Callable[[], int]
    ) -> None:
        """system: system message of prompts. version: returns the policy version that is served now."""
        self._demonstrator, self._tokenizer = demonstrator, tokenizer
        self._system, self._version = system, version

    def source(self, sampler: GroupSampler, group_size: int) -> DemonstrationSource:
        """Return what makes groups. Nothing is sampled for them."""
        return self

    async def groups(self, prompts: Sequence[Prompt]) -> AsyncGenerator[RolloutGroup | Discarded, None]:
        """Yield the group of each prompt, in their order."""
        for prompt in prompts:
            yield await run_sync(self._group, prompt, self._version())

    async def held_out(
        self, problems: Sequence[Problem], sampling: Sampling, seeds: Sequence[tuple[int, ...]], complete: Complete
    ) -> list[list[Completion]]:
        """Return completions of the policy, those of a run without demonstrations."""
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

    def _group(self, prompt: Prompt, version: int) -> RolloutGroup | Discarded:
        try:
            found = self._demonstrator.demonstrations(prompt.problem)
        except RequestError as error:
            return Discarded(prompt=prompt, reason="invalid", detail=str(error))
        if not found:
            return Discarded(prompt=prompt, reason="invalid", detail="nothing is learned of the first sft.max_tokens")
        shared = _shared(found)
        return RolloutGroup(
            prompt=replace(prompt, tokens=found[0].tokens[:shared]),
            completions=tuple(self._completion(one, shared, version) for one in found),
        )

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
            advantages=tuple(map(float, learned)),
        )


def _shared(found: Sequence[Demonstration]) -> int:
    """Return the number of first tokens that all sequences share, and of which none is learned."""
    end = min(one.learned.index(True) for one in found)
    differ = (at for at in range(end) if len({one.tokens[at] for one in found}) > 1)
    return next(differ, end)


class DemonstrationCounts(UpdateHook):
    """Counts the demonstrations of each batch."""

    def __init__(self, problems: int) -> None:
        """problems: number of records."""
        self._problems, self._last, self._ended, self._cut = problems, 0, 0, 0

    def ended(self, trained: Sequence[TrainedGroup], discarded: Sequence[Discarded], *, version: int) -> None:
        """Take the groups of a batch into account."""
        for group in trained:
            prompt, completions = group.scored.group.prompt, group.scored.group.completions
            self._last = max(self._last, prompt.group_id + 1)
            self._ended += 1
            self._cut += any(one.finish_reason == "length" for one in completions)

    def metrics(self) -> Mapping[str, Any]:
        """Return the passes over the dataset so far, and the share of cut demonstrations of the batch."""
        ended, cut, self._ended, self._cut = self._ended, self._cut, 0, 0
        return {"sft/epochs": self._last / self._problems, "sft/cut": cut / ended if ended else None}
