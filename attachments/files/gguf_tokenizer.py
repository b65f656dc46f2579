"""The tokenizer of a GGUF file: vocabulary, merges, special tokens and chat template from the file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from attachments.files.gguf import GgufFile
from clotho.models.model_files import one_line
from protocols.errors import ModelError, visible

PREFIX = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens (llama.cpp, `llama_token_type`)."""

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text into words (llama.cpp, `LLAMA_VOCAB_PRE_TYPE_LLAMA3`)."""

QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
"""How Qwen2 splits text into words: every digit is a word (llama.cpp, `LLAMA_VOCAB_PRE_TYPE_QWEN2`)."""

ENDINGS = ("eos", "eot", "eom")
"""Tokens that end a completion: end of the text, of a turn and of a message (llama.cpp, `llama_vocab_is_eog`)."""

WHOLE_WORDS = ("llama-bpe",)
"""Ways to split text with which a word of the vocabulary is one token, whatever the merges."""

SPACE = "\u2581"
"""The character that stands for a space in the vocabulary of SentencePiece."""


def gguf_tokenizer(path: Path) -> TokenizerWrapper:
    """Build the tokenizer of a GGUF file; no weight is read.

    Raises ModelError if the kind of tokenizer is not supported, or a part is missing.
    """
    file = GgufFile(path)
    try:
        return _tokenizer(file)
    except ModelError:
        raise
    except Exception as error:  # the libraries raise many kinds of exceptions for lists that do not fit each other
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {one_line(error)}") from error


def _tokenizer(file: GgufFile) -> TokenizerWrapper:
    tokens = _texts(file, "tokens")
    kind = file.metadata.get(f"{PREFIX}.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentence_piece(file, tokens)
    else:
        raise ModelError(f"{file.path}: the tokenizer {str(kind)[:40]!r} is not supported, only 'gpt2' and 'llama'")
    _add_special_tokens(tokenizer, file, tokens)
    bos, eos, unknown, padding = (_token(file, tokens, name) for name in ("bos", "eos", "unknown", "padding"))
    endings = {tokens.index(token) for name in ENDINGS if (token := _token(file, tokens, name)) is not None}
    if eos is None:
        raise ModelError(f"{file.path}: {PREFIX}.eos_token_id is missing: nothing would end a completion")
    if _flag(file, "add_bos_token", default=kind == "llama") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    template = file.metadata.get("tokenizer.chat_template")
    fast: Any = PreTrainedTokenizerFast  # unannotated
    return TokenizerWrapper(
        fast(
            tokenizer_object=tokenizer,
            bos_token=bos,
            eos_token=eos,
            unk_token=unknown,
            pad_token=padding or eos,
            chat_template=template if isinstance(template, str) else None,
            clean_up_tokenization_spaces=False,
        ),
        eos_token_ids=sorted(endings),
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """BPE over bytes, as in GPT-2, SmolLM, Llama 3 and Qwen2."""
    written = [merge.split(" ") for merge in _texts(file, "merges")]
    if any(len(merge) != 2 for merge in written):
        raise ModelError(f"{file.path}: {PREFIX}.merges must be pairs of tokens")
    merges = [(first, second) for first, second in written]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    splitter = str(file.metadata.get(f"{PREFIX}.pre", "default"))
    if (words := splitters().get("gpt-2" if splitter == "default" else splitter)) is None:
        raise ModelError(
            f"{file.path}: the pre-tokenizer {visible(repr(splitter), 40)} is not supported, only "
            f"{', '.join(splitters())}"
        )
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitter in WHOLE_WORDS))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{file.path}: {PREFIX}.merges do not fit the tokens: {str(error)[:200]}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def splitters() -> dict[str, list[Any]]:
    """Return how byte-level tokenizers split text into words, by the names of llama.cpp."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt-2": [byte_level],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), byte_level_only],
        "qwen2": [pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"), byte_level_only],
    }


def _sentence_piece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """BPE over characters with byte fallback, as in Llama 2: merges follow from the scores of the tokens."""
    scores = _numbers(file, "scores", tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, map(float, scores), strict=True)))
    unknown = _token(file, tokens, "unknown")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = _flag(file, "add_space_prefix", default=True)
    steps = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    """Declare the control tokens, and the tokens that are matched as a whole before text is split."""
    kinds = list(zip(tokens, _numbers(file, "token_type", tokens), strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind in (CONTROL, UNKNOWN)]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == USER_DEFINED])


def _texts(file: GgufFile, name: str) -> list[str]:
    value = file.metadata.get(f"{PREFIX}.{name}")
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ModelError(f"{file.path}: {PREFIX}.{name} must be a list of texts")
    return value


def _numbers(file: GgufFile, name: str, tokens: list[str]) -> list[Any]:
    """Return one number for each token."""
    value = file.metadata.get(f"{PREFIX}.{name}")
    if not isinstance(value, np.ndarray) or value.shape != (len(tokens),):
        raise ModelError(f"{file.path}: {PREFIX}.{name} must hold one number for each of the {len(tokens)} tokens")
    return list(value.tolist())


def _token(file: GgufFile, tokens: list[str], name: str) -> str | None:
    """Return the special token of this name; None if the file has none."""
    value = file.metadata.get(f"{PREFIX}.{name}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        shown = visible(str(value), 40)
        raise ModelError(f"{file.path}: {PREFIX}.{name}_token_id = {shown} is not one of {len(tokens)} tokens")
    return tokens[value]


def _flag(file: GgufFile, name: str, *, default: bool) -> bool:
    value = file.metadata.get(f"{PREFIX}.{name}")
    return value if isinstance(value, bool) else default
