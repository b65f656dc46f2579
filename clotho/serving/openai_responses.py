"""What clients get: answers of the OpenAI API, whole or in chunks, each naming the weights that serve."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import chain

from msgspec import UNSET, Struct, UnsetType

from clotho.serving.openai_choices import Choice, Piece, Style, TokenIds, whole_piece
from clotho.serving.sample_requests import Ask
from clotho.serving.services import GatewayServices, Tokens
from protocols.sampling import Completion
from protocols.step import WeightsReady


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of a request; each prompt counts once, however many completions it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Reply(Struct, frozen=True, kw_only=True):
    """The body of an answer, or of a chunk of one.

    weights_version, system_fingerprint: of the weights that served when the request came in; the ones that drew each
    choice stand in its `weights_versions`.
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    system_fingerprint: str
    weights_version: int
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: TokenIds = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """The policy, as /v1/models tells of it."""

    id: str
    created: int
    max_model_len: int
    root: str
    weights_version: int
    object: str = "model"
    owned_by: str = "clotho"
    parent: None = None


class ModelList(Struct, frozen=True, kw_only=True):
    """The body of /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Answer:
    """One answer in the making: what all its chunks have in common."""

    def __init__(self, style: Style, ask: Ask, services: GatewayServices, weights: WeightsReady) -> None:
        self.ask = ask
        self.tokenizer: Tokens = services.tokenizer
        self._style, self._weights = style, weights
        self._model = services.settings.model_name
        self._id = f"{style.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, results: Sequence[Sequence[Completion]]) -> Reply:
        """Return the whole answer; choice `i * n + j` is completion j of prompt i."""
        pieces = [whole_piece(completion, index) for index, completion in enumerate(chain.from_iterable(results))]
        choices = [self._style.choice(piece, self.ask, self.tokenizer, whole=True) for piece in pieces]
        tokens = sum(len(piece.tokens) for piece in pieces)
        return self._reply(self._style.whole, choices, self._style.prompt_token_ids(self.ask), self._usage(tokens))

    def chunk(self, piece: Piece, *, opening: bool) -> Reply:
        """Return a chunk with one piece; the `opening` one of the stream tells the prompt's tokens if asked for."""
        choice = self._style.choice(piece, self.ask, self.tokenizer, whole=False)
        prompt = self._style.prompt_token_ids(self.ask) if opening else UNSET
        return self._reply(self._style.chunk, [choice], prompt, None if self.ask.include_usage else UNSET)

    def usage_chunk(self, completion_tokens: int) -> Reply:
        """Return the last chunk of a stream that counts tokens."""
        return self._reply(self._style.chunk, [], UNSET, self._usage(completion_tokens))

    def _reply(self, name: str, choices: Sequence[Choice], prompt: TokenIds, usage: Usage | UnsetType | None) -> Reply:
        return Reply(
            id=self._id,
            object=name,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._weights.fingerprint,
            weights_version=self._weights.version,
            usage=usage,
            prompt_token_ids=prompt,
        )

    def _usage(self, completion_tokens: int) -> Usage:
        prompt = self.ask.prompt_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=completion_tokens, total_tokens=prompt + completion_tokens)
