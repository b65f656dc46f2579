"""Text to tokens and back, and conversations to prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from clotho.extension import Door, needs, provided
from clotho.models.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate
from clotho.models.control_tokens import ControlTokens
from clotho.models.loading import file_format
from clotho.models.model_files import one_line, require_tokenizer_files
from clotho.settings.model import ModelSection
from protocols.constraints import Constraint, Grammar
from protocols.errors import ModelError, RequestError, visible

SAMPLE_CONVERSATION = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
)

ANSWER_MARK, NEXT_MARK = "\U0010fffe", "\U0010ffff"
"""Characters that stand for an answer and that begin what follows it: the last two, which encode no text."""

GRAMMAR_COMPILER: Door[[Any, Collection[int], int], Callable[[Grammar], Constraint] | None] = Door(
    "library.grammar_compiler"
)
"""Returns what compiles grammars for a tokenizer of transformers, its end tokens, and logits of this width.

None: nothing does. Raises ValueError if the tokenizer permits no constrained decoding. Compilation raises RequestError.
"""

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class Chat(NamedTuple):
    """A conversation, with the definitions of functions in the format of the OpenAI API."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


class Written(NamedTuple):
    """A rendered conversation. originals: as in `Disarmed`. last: its last message."""

    text: str
    originals: Mapping[str, str]
    last: Mapping[str, Any]


class ChatTokenizer:
    """The tokenizer and chat template of a model. Thread-safe; holds no arrays. Only slow tokenizers need a lock.

    eos_ids: tokens that end a completion. vocab_size: number of tokens; the model's logits may be wider.
    """

    def __init__(self, tokenizer: Any, *, template: str = "", variables: Mapping[str, Any] = NO_VARIABLES) -> None:
        """Wrap mlx-lm's TokenizerWrapper, or a tokenizer of Hugging Face transformers.

        template: source of a chat template that replaces the model's. variables: of the template, in every prompt.
        """
        wrapper: Any = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
        self._wrapper = wrapper
        self._library = _library(wrapper._tokenizer)
        self._replacement, self._variables = template, dict(variables)
        self._control: ControlTokens | None = None
        self._lock = nullcontext() if getattr(wrapper._tokenizer, "is_fast", False) else threading.Lock()
        self._compilers: dict[int, Callable[[Grammar], Constraint]] = {}
        self._grammar_lock = threading.Lock()
        self.eos_ids: frozenset[int] = frozenset(int(t) for t in wrapper.eos_token_ids)
        self.vocab_size: int = len(wrapper)

    @classmethod
    def from_files(
        cls,
        path: str | Path,
        *,
        trust_remote_code: bool = False,
        chat_template: str = "",
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> ChatTokenizer:
        """Load from the directory or GGUF file of a model, without network.

        Code of the model runs only if `trust_remote_code`. chat_template: file of a template that replaces the model's;
        empty: none. variables: of the template, in every prompt.

        Raises ModelError if the tokenizer or the chat template of the profile cannot be loaded.
        """
        directory = Path(path)
        template = _read_template(chat_template)
        if directory.is_file():
            tokenizer = provided(file_format(directory)[1])(directory)
            return cls(tokenizer, template=template, variables=variables)
        if not directory.is_dir():
            raise ModelError(f"{directory} is not a directory with a tokenizer")
        require_tokenizer_files(directory)
        extra = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        try:
            return cls(load_tokenizer(directory, extra), template=template, variables=variables)
        except BaseException as error:  # a panic of the library tokenizers is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ModelError(f"the tokenizer in {directory} cannot be loaded: {one_line(error)}") from error

    @classmethod
    def of_model(cls, files: Path, section: ModelSection) -> ChatTokenizer:
        """Load from the directory or GGUF file of the model of a profile, as `from_files`."""
        return cls.from_files(
            files,
            trust_remote_code=section.trust_remote_code,
            chat_template=section.chat_template,
            variables=section.chat_template_kwargs,
        )

    @property
    def hugging_face(self) -> PreTrainedTokenizerBase:
        """The tokenizer of Hugging Face transformers."""
        found: PreTrainedTokenizerBase = self._wrapper._tokenizer
        return found

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of special tokens by name, such as `eos_token`, without those that the tokenizer lacks."""
        found = self.hugging_face.special_tokens_map
        return {name: text for name, text in found.items() if isinstance(text, str)}

    @cached_property
    def longest_token_bytes(self) -> int:
        """Length in UTF-8 of the longest token of the vocabulary: no token stands for more bytes of text."""
        return max((len(token.encode(errors="replace")) for token in self._wrapper.get_vocab()), default=1)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._replacement or self._wrapper.has_chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of text, with those that the tokenizer adds. Text of a control token becomes it."""
        with self._lock:
            found = self._wrapper.encode(text, add_special_tokens=add_special_tokens, verbose=False)
            return tuple(int(token) for token in found)

    @property
    def chat_template(self) -> str:
        """The source of the chat template; empty if there is none, or Python code renders conversations."""
        if not self.has_chat_template or self._renders_itself:
            return ""
        return self._replacement or str(self._wrapper._tokenizer.get_chat_template())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation in the chat template of the model.

        tools: definitions of functions in the format of the OpenAI API. variables: further names that the template may
        use. continue_final_message: end with the content of the last message. The text of a control token in a message,
        a tool or a variable is encoded as ordinary text (`clotho.models.control_tokens`).

        Raises RequestError (param `messages`) if there is no template, or the template raises or does too much work for
        these messages.
        """
        with self._lock, _template_errors():
            written = self._written(messages, tools, variables or {}, add_generation_prompt=add_generation_prompt)
            if continue_final_message:
                written = written._replace(text=_until_content(written.text, str(written.last["content"])))
            return self._encoded([written])[0]

    def render_chats(self, chats: Sequence[Chat]) -> list[tuple[int, ...]]:
        """Return the tokens of chats with a generation prompt, encoded in threads. Raises as `render_chat`."""
        with self._lock, _template_errors():
            return self._encoded([self._written(*chat) for chat in chats])

    def continue_chat(
        self,
        answer: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Return the tokens that follow the end token of an answer: further messages and the next generation prompt.

        A conversation can thus be extended without tokenizing what has been sampled. What the template writes about
        earlier messages has no influence: it is rendered behind a short question. answer: the message that the model
        sampled, with its calls. messages: of users and tools, at least one.

        Raises RequestError as `render_chat`, and if no end token separates an answer from what follows it.
        """
        first, *others = messages
        marked = [
            {"role": "user", "content": "a"},
            {"content": ANSWER_MARK, **answer},
            {**first, "content": f"{NEXT_MARK}{first['content']}"},
            *others,
        ]
        with self._lock, _template_errors():
            written = self._written(marked, tools)
            before, mark, after = written.text.partition(NEXT_MARK)
            ends = [
                before.rfind(text) + len(text) for token in self.eos_ids if (text := self.token_text(token)) in before
            ]
            suffix = before[max(ends, default=0) :]
            if not mark or not ends or ANSWER_MARK in suffix:
                raise RequestError(
                    "the chat template of this model ends no answer with an end token, so that a conversation cannot "
                    "be continued after one",
                    param="messages",
                )
            return self._encoded([written._replace(text=suffix + after)])[0]

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
        *,
        add_generation_prompt: bool = True,
    ) -> Written:
        if not messages:
            raise RequestError("a conversation needs at least one message", param="messages")
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; request a plain completion", param="messages")
        found = self._control_tokens().disarm([*messages, *tools, variables])
        plain, plain_tools = found.messages[: len(messages)], found.messages[len(messages) : -1]
        text = self._render(plain, add_generation_prompt, plain_tools, found.messages[-1])
        return Written(text, found.originals, plain[-1])

    def _encoded(self, written: Sequence[Written]) -> list[tuple[int, ...]]:
        control, plain = self._control_tokens(), [text for text, originals, _ in written if not originals]
        tokenizer: Any = self._wrapper._tokenizer
        if len(plain) > 1 and self._encodes_batches:
            tokens = tokenizer(plain, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        else:
            tokens = [self._wrapper.encode(text, add_special_tokens=False, verbose=False) for text in plain]
        remaining = iter(tokens)
        return [
            control.encode(text, originals) if originals else tuple(map(int, next(remaining)))
            for text, originals, _ in written
        ]

    @cached_property
    def _encodes_batches(self) -> bool:
        """Whether the library encodes many texts as it encodes each of them."""
        tokenizer, base = self._wrapper._tokenizer, PreTrainedTokenizerBase
        own_code = type(tokenizer).encode is not base.encode or type(tokenizer).__call__ is not base.__call__
        return tokenizer.is_fast and not own_code and not tokenizer.split_special_tokens

    @property
    def _renders_itself(self) -> bool:
        """Whether Python code of mlx-lm or of a trusted model renders conversations."""
        if self._replacement:
            return False
        own_code = type(self._wrapper._tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        return self._wrapper._chat_template is not None or own_code

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.chat_template)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        tokenizer = self._wrapper._tokenizer
        if self._renders_itself:
            return str(
                self._wrapper.apply_chat_template(
                    [dict(m) for m in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **({"tools": [dict(tool) for tool in tools]} if tools else {}),
                    **(self._variables | dict(variables)),
                )
            )
        names = tokenizer.special_tokens_map | {"enable_thinking": self._wrapper.has_thinking}
        names |= self._variables | dict(variables)
        if tools:
            names["tools"] = [dict(tool) for tool in tools]
        return self._template.render(messages, names, add_generation_prompt=add_generation_prompt)

    def _control_tokens(self) -> ControlTokens:
        """Special tokens, tokens that end a completion, and added tokens that the template writes between turns."""
        if self._control is None:
            tokenizer = self._wrapper._tokenizer
            try:
                text = self._render(SAMPLE_CONVERSATION, False)
                between = set(tokenizer.encode(text, add_special_tokens=False, verbose=False))
            except Exception:  # a template can refuse this conversation
                source = self._replacement or str(tokenizer.chat_template)
                between = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.content in source}
            self._control = ControlTokens(tokenizer, self.eos_ids | between)
        return self._control

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`, without special tokens unless they are requested."""
        if self._library is not None:
            return str(self._library.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        return str(
            self._wrapper.decode(
                list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def compile_grammar(self, grammar: Grammar, vocabulary: int) -> Constraint:
        """Compile a grammar for logits of the width `vocabulary`. Raises RequestError, which names the field."""
        with self._grammar_lock:
            if vocabulary not in self._compilers:
                try:
                    self._compilers[vocabulary] = self._compiler(vocabulary)
                except ValueError as error:
                    raise RequestError(f"{grammar.param}: {error}", param=grammar.param) from error
        return self._compilers[vocabulary](grammar)

    def _compiler(self, vocabulary: int) -> Callable[[Grammar], Constraint]:
        found = GRAMMAR_COMPILER.first(self._wrapper._tokenizer, self.eos_ids, vocabulary)
        if found is None:
            raise ValueError(needs("tools"))
        return found

    def token_text(self, token: int) -> str:
        """Return one token as text, special tokens by name; an incomplete character becomes U+FFFD."""
        return self.decode([token], skip_special_tokens=False)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Raise RequestError for any exception of a chat template or its tokenizer."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        message = f"the chat template raised for these messages: {type(error).__name__}: {one_line(error)}"
        raise RequestError(message, param="messages") from error


def _library(tokenizer: Any) -> Any:
    """Return the tokenizer of the library `tokenizers` that decodes for a tokenizer of transformers; None without one.

    It takes a fifth of the time for the few tokens of a streamed event. A tokenizer with own code decodes itself.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kind, methods = type(tokenizer), (PreTrainedTokenizerBase.decode, PreTrainedTokenizerFast._decode)
    return tokenizer.backend_tokenizer if (kind.decode, kind._decode) == methods else None


def _read_template(name: str) -> str:
    """Return the text of the file of a chat template; empty for no name. Raises ModelError."""
    if not name:
        return ""
    try:
        with Path(name).expanduser().open(encoding="utf-8") as file:
            source = file.read(MAX_TEMPLATE_CHARACTERS + 1)
        ChatTemplate(source)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
        raise ModelError(f"model.chat_template {visible(name, 200)} cannot be read: {reason}") from error
    except (ValueError, TemplateError, RecursionError, SyntaxError) as error:
        raise ModelError(f"model.chat_template {visible(name, 200)} cannot be used: {one_line(error)}") from error
    if not source.strip():
        raise ModelError(f"model.chat_template {visible(name, 200)} is empty")
    return source


def _until_content(text: str, content: str) -> str:
    """Return a rendered conversation up to the end of its last content. Raises RequestError if that was changed."""
    for shown in (content.lstrip(), content.strip()):
        if (at := text.rfind(shown)) >= 0:
            return text[: at + len(shown)]
    raise RequestError("the chat template changes the last message, so it cannot be continued", param="messages")
