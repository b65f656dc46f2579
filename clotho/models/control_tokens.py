"""Control tokens: message contents that contain their text are encoded as ordinary text.

A control token ends a turn or begins another one, for example `<|im_end|>`. Tokenizers match the text of control
tokens anywhere in a rendered conversation. A content that contains `<|im_end|>` and `<|im_start|>assistant` could
therefore close the turn of a user and forge a turn of the assistant. Only the chat template may write control tokens:

1. In every content, the first character of each occurrence is replaced by a stand-in, a private-use character that the
   conversation does not contain. The template is rendered with these contents.
2. The rendered text is encoded with the stand-ins. The positions of the control tokens of the template are now known.
3. These tokens are replaced by aliases, and the stand-ins by the original characters. A copy of the tokenizer knows
   the control tokens only by their aliases, so that everything else is ordinary text, encoded by the same steps.

Conversations without such text are encoded as one text without these steps.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from protocols.errors import RequestError

FIRST_STAND_IN = 0xF0000
LAST_STAND_IN = 0x10FFFD
MAX_ROUNDS = 16
"""Limit on the searches for occurrences that overlap."""


class Hit(Struct, frozen=True, kw_only=True):
    """A control token in a text: characters `start` to `end`."""

    start: int
    end: int
    token: int


class Disarmed(Struct, frozen=True, kw_only=True):
    """Messages whose contents hold no control tokens. originals: stand-in -> the character that it replaces."""

    messages: list[dict[str, Any]]
    originals: dict[str, str]


class ControlTokens:
    """The control tokens of a tokenizer of Hugging Face transformers. Thread-safe if the tokenizer is."""

    def __init__(self, tokenizer: Any, tokens: Iterable[int]) -> None:
        """tokens: added tokens that are control tokens besides the special tokens of the tokenizer."""
        wanted = frozenset(tokens)
        added: dict[int, Any] = dict(tokenizer.added_tokens_decoder)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        changes_text = type(tokenizer).encode is not PreTrainedTokenizerBase.encode
        self._tokenizer = tokenizer
        self._backend = backend if isinstance(backend, Tokenizer) and not changes_text else None
        unknown = _unknown_token(self._backend) if self._backend else tokenizer.unk_token_id
        self._text = {
            token: str(entry.content)
            for token, entry in added.items()
            if (entry.special or token in wanted) and not entry.content.isspace() and token != unknown
        }
        self._first = frozenset(text[0] for text in self._text.values())
        self._prefixes = frozenset(text[:end] for text in self._text.values() for end in range(1, len(text)))
        self._longest = max((len(text) for text in self._text.values()), default=0)
        self._normalized = any(added[token].normalized for token in self._text)
        self._copy: tuple[Tokenizer, dict[int, str]] | None = None

    @property
    def ids(self) -> frozenset[int]:
        """IDs of the control tokens, without the token for unknown characters."""
        return frozenset(self._text)

    def disarm(self, messages: Sequence[Mapping[str, Any]]) -> Disarmed:
        """Return the messages with a stand-in in each occurrence of the text of a control token.

        A content can also end with the beginning of such a text, which the template or the next content would complete.
        Raises RequestError if the tokenizer cannot encode such contents as ordinary text.
        """
        texts: list[str] = []

        def recorded(text: str) -> str:
            texts.append(str.__str__(text))
            return texts[-1]

        plain = [_mapped(message, recorded) for message in messages]
        found = {text: positions for text in dict.fromkeys(texts) if (positions := self._positions(text))}
        if not found:
            return Disarmed(messages=plain, originals={})
        used = set().union(*texts)
        replaced = sorted({text[position] for text, positions in found.items() for position in positions})
        free = (chr(code) for code in range(FIRST_STAND_IN, LAST_STAND_IN + 1) if chr(code) not in used)
        stand_ins = {character: next(free, "") for character in replaced}
        if "" in stand_ins.values():
            raise RequestError("the messages use every private-use character", param="messages")
        disarmed = {text: _replaced(text, positions, stand_ins) for text, positions in found.items()}
        return Disarmed(
            messages=[_mapped(message, lambda text: disarmed.get(text, text)) for message in plain],
            originals={stand_in: character for character, stand_in in stand_ins.items()},
        )

    def encode(self, text: str, originals: Mapping[str, str]) -> tuple[int, ...]:
        """Encode a rendered conversation whose contents hold stand-ins. Raises RequestError."""
        restored = text.translate({ord(stand_in): character for stand_in, character in originals.items()})
        forged = {position for position, character in enumerate(text) if character in originals}
        tokens, hits = self._hits(restored)
        if not any(position in forged for hit in hits for position in range(hit.start, hit.end)):
            return tokens
        _, hits = self._hits(text)
        copy, aliases = self._without_control_text()
        pieces, end = [], 0
        for hit in hits:
            pieces += [restored[end : hit.start], aliases[hit.token]]
            end = hit.end
        result = tuple(copy.encode("".join([*pieces, restored[end:]]), add_special_tokens=False).ids)
        if [token for token in result if token in self._text] != [hit.token for hit in hits]:
            raise _not_as_text()
        return result

    def _positions(self, text: str) -> set[int]:
        """Positions of the first characters of all control tokens that `text` contains or begins at its end."""
        found: set[int] = set()
        if not self._normalized and self._first.isdisjoint(text):
            return found
        shown = text
        for _ in range(MAX_ROUNDS):
            _, hits = self._hits(shown)
            starts = {hit.start + max(0, text[hit.start : hit.end].find(self._text[hit.token])) for hit in hits}
            if not starts:
                break
            found |= starts
            shown = _replaced(text, found, {text[position]: "\x00" for position in found})
        else:
            raise _not_as_text()
        for end in {len(text), len(text.rstrip())}:
            found |= {start for start in range(max(0, end - self._longest), end) if text[start:end] in self._prefixes}
        return found

    def _hits(self, text: str) -> tuple[tuple[int, ...], list[Hit]]:
        """Encode `text` with the tokenizer as it is; return the tokens and the control tokens among them."""
        if self._backend is None:
            tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
            if self.ids.isdisjoint(tokens):
                return tokens, []
            raise _not_as_text()
        result = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = tuple(result["input_ids"])
        spans = zip(tokens, result["offset_mapping"], strict=True)
        return tokens, [Hit(start=start, end=end, token=token) for token, (start, end) in spans if token in self._text]

    def _without_control_text(self) -> tuple[Tokenizer, dict[int, str]]:
        """Return the copy of the tokenizer that knows control tokens by alias only, and the aliases."""
        if self._copy is None:
            assert self._backend is not None
            mark = secrets.token_hex(16)
            aliases = {token: f"\U0010fffe{mark}{token:x}\U0010ffff" for token in self._text}
            try:
                self._copy = _renamed(self._backend, self._text, aliases), aliases
            except Exception as error:  # the library raises Exception itself
                raise _not_as_text() from error
        return self._copy


def _renamed(tokenizer: Tokenizer, names: Mapping[int, str], aliases: Mapping[int, str]) -> Tokenizer:
    """Return a copy of `tokenizer` in which the added tokens `names` are called `aliases`."""
    data = json.loads(tokenizer.to_str())
    data["truncation"] = data["padding"] = data["post_processor"] = None
    for entry in data["added_tokens"]:
        if entry["id"] in aliases:
            entry |= {"content": aliases[entry["id"]], "normalized": False}
    new_names = {names[token]: alias for token, alias in aliases.items()}
    vocabulary = data["model"]["vocab"]
    if isinstance(vocabulary, dict):
        data["model"]["vocab"] = {new_names.get(text, text): token for text, token in vocabulary.items()}
    else:
        data["model"]["vocab"] = [[new_names.get(text, text), score] for text, score in vocabulary]
    copy = Tokenizer.from_str(json.dumps(data))
    if any(copy.token_to_id(alias) != token for token, alias in aliases.items()):
        raise ValueError("the copy numbers its tokens differently")
    return copy


def _unknown_token(tokenizer: Tokenizer) -> int | None:
    """The token that the model of a tokenizer uses for characters outside its vocabulary."""
    name = getattr(tokenizer.model, "unk_token", None)
    if isinstance(name, str):
        return tokenizer.token_to_id(name)
    number = getattr(tokenizer.model, "unk_id", None)
    return number if isinstance(number, int) else None


def _not_as_text() -> RequestError:
    return RequestError(
        "the messages contain the text of a control token, which this tokenizer cannot encode as ordinary text",
        param="messages",
    )


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Rebuild a value from plain JSON types, with other texts; other objects become the name of their type."""
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return f"<{type(value).__name__}>"


def _replaced(text: str, positions: Iterable[int], replacement: Mapping[str, str]) -> str:
    characters = list(text)
    for position in positions:
        characters[position] = replacement[characters[position]]
    return "".join(characters)
