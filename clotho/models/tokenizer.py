"""Text to tokens and back, and conversations to prompts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from protocols.errors import ModelError, RequestError


class ChatTokenizer:
    """The tokenizer and chat template of a model. Thread-safe; holds no arrays. Only slow tokenizers need a lock.

    eos_ids: tokens that end a completion. vocab_size: number of tokens; the model's logits may be wider.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Wrap mlx-lm's TokenizerWrapper, or a tokenizer of Hugging Face transformers."""
        wrapper: Any = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._wrapper = wrapper
        self._lock = nullcontext() if getattr(wrapper._tokenizer, "is_fast", False) else threading.Lock()
        self.eos_ids: frozenset[int] = frozenset(int(t) for t in wrapper.eos_token_ids)
        self.vocab_size: int = len(wrapper)

    @classmethod
    def from_directory(cls, path: str | Path, *, trust_remote_code: bool = False) -> ChatTokenizer:
        """Load from the directory of a model, without network. Code of the model runs only if `trust_remote_code`.

        Raises ModelError if the tokenizer cannot be loaded.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a directory with a tokenizer")
        extra = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        try:
            return cls(load_tokenizer(directory, extra))
        except Exception as error:
            raise ModelError(f"the tokenizer in {directory} cannot be loaded: {error}") from error

    @cached_property
    def longest_token_bytes(self) -> int:
        """Length in UTF-8 of the longest token of the vocabulary: no token stands for more bytes of text."""
        return max((len(token.encode(errors="replace")) for token in self._wrapper.get_vocab()), default=1)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._wrapper.has_chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of plain text, including special tokens that the tokenizer adds, such as a first one."""
        with self._lock:
            return tuple(int(t) for t in self._wrapper.encode(text, verbose=False))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation in the chat template of the model.

        Raises RequestError (param `messages`) if there is no template, or the template raises for these messages.
        """
        if not messages:
            raise RequestError("a conversation needs at least one message", param="messages")
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; request a plain completion", param="messages")
        try:
            with self._lock:
                text = self._wrapper.apply_chat_template(
                    [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt
                )
                return tuple(int(t) for t in self._wrapper.encode(text, add_special_tokens=False, verbose=False))
        except Exception as error:
            message = f"the chat template raised for these messages: {type(error).__name__}: {error}"
            raise RequestError(message, param="messages") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens."""
        return str(self._wrapper.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_text(self, token: int) -> str:
        """Return one token as text, special tokens by name; an incomplete character becomes U+FFFD."""
        return str(self._wrapper.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
