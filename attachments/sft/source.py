"""Demonstrations as the groups of a run: they come in the place of completions that the policy samples."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from attachments.sft.demonstrations import Demonstrator
from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import RequestError
from protocols.prompt import Prompt
from protocols.rollout import Discarded, RolloutGroup
from training_run.groups.demonstrations import DatasetGroups, shared_tokens


class DemonstrationSource(DatasetGroups):
    """Makes a group of the demonstrations of each prompt's problem."""

    def __init__(
        self, demonstrator: Demonstrator, tokenizer: ChatTokenizer, *, system: str, version: Callable[[], int]
    ) -> None:
        super().__init__(tokenizer, system=system, version=version)
        self._demonstrator = demonstrator

    def group(self, prompt: Prompt, version: int) -> RolloutGroup | Discarded:
        """Return a group with the sequences of a record."""
        try:
            found = self._demonstrator.demonstrations(prompt.problem)
        except RequestError as error:
            return Discarded(prompt=prompt, reason="invalid", detail=str(error))
        if not found:
            return Discarded(prompt=prompt, reason="invalid", detail="nothing is learned of the first sft.max_tokens")
        shared = shared_tokens(found)
        return RolloutGroup(
            prompt=replace(prompt, tokens=found[0].tokens[:shared]),
            completions=tuple(self.completion(one, shared, version) for one in found),
        )
