"""The tokenizer of a model directory as metadata of a GGUF file. Every tokenizer that llama.cpp lacks is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.convert_slow_tokenizer import generate_merges

from attachments.files.gguf_tokenizer import SPACE, WHOLE_WORDS, splitters
from clotho.models.tokenizer import SAMPLE_CONVERSATION, ChatTokenizer
from protocols.errors import ArtifactError, visible

COMPARED = (
    "Hello, world! It's 12345.67 + 89?\n\n\tdef f(x):  return x ",
    "Größe, 東京, naïve, Ελλάδα, עברית, 🙂👩‍🚀",
    "  two  spaces",
)
"""Texts whose tokens must be equal in the directory and in the file."""

PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
NFC = {"type": "NFC"}


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: ChatTokenizer, rows: int) -> None:
    """Add vocabulary, merges, special tokens and chat template to a file. Raises ArtifactError.

    rows: number of rows of the embeddings. llama.cpp needs a token for each, so rows without a token get unused ones.
    """
    fast: Any = tokenizer.hugging_face
    if not fast.is_fast:
        raise _inexpressible("it has no tokenizer.json")
    described = json.loads(fast.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise _inexpressible(f"its type is {visible(str(model['type']), 40)}, not BPE")
    tokens, kinds = _vocabulary(described, rows)
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    writer.add_token_list(tokens)
    if model["byte_fallback"]:
        _add_sentence_piece(writer, described, tokens, merges)
    else:
        _add_byte_level(writer, described)
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_types(kinds)
    for token, add in (
        (fast.bos_token_id, writer.add_bos_token_id),
        (fast.eos_token_id, writer.add_eos_token_id),
        (fast.unk_token_id, writer.add_unk_token_id),
        (fast.pad_token_id, writer.add_pad_token_id),
    ):
        if token is not None:
            add(token)
    plain, encoded = fast.encode("a", add_special_tokens=False), fast.encode("a")
    if encoded not in (plain, [fast.bos_token_id, *plain]):
        raise _inexpressible("it adds other tokens than a first one to texts")
    writer.add_add_bos_token(encoded != plain)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def require_same_tokens(file: Path, tokenizer: ChatTokenizer) -> None:
    """Compare the tokenizer of a new file with its source on a few texts. Raises ArtifactError if tokens differ."""
    found = ChatTokenizer.from_files(file)
    for text in COMPARED:
        if found.encode(text) != tokenizer.encode(text):
            raise _inexpressible(f"the tokens of {text[:20]!r} would differ")
    if found.eos_ids != tokenizer.eos_ids:
        raise _inexpressible("other tokens would end a completion")
    if tokenizer.chat_template and found.render_chat(SAMPLE_CONVERSATION) != tokenizer.render_chat(SAMPLE_CONVERSATION):
        raise _inexpressible("the chat template would render other tokens")


def _vocabulary(described: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return all tokens by id, and their types."""
    model, kind = described["model"], gguf.TokenType
    token_of = {number: token for token, number in model["vocab"].items()}
    kind_of = {
        number: kind.BYTE if model["byte_fallback"] and _is_byte(token) else kind.NORMAL
        for number, token in token_of.items()
    }
    for added in described["added_tokens"]:
        name = visible(repr(added["content"]), 60)
        if added["single_word"] or added["lstrip"] or added["rstrip"]:
            raise _inexpressible(f"the token {name} takes the blanks around it, or matches whole words")
        token_of[added["id"]] = added["content"]
        kind_of[added["id"]] = kind.CONTROL if added["special"] else kind.USER_DEFINED
        if model["byte_fallback"] and added["content"] == model["unk_token"]:
            kind_of[added["id"]] = kind.UNKNOWN
    if max(token_of, default=0) >= rows:
        raise _inexpressible(f"it has tokens up to number {max(token_of)}, and the embeddings have {rows} rows")
    tokens = [token_of.get(number, f"[PAD{number}]") for number in range(rows)]
    return tokens, [int(kind_of.get(number, kind.UNUSED)) for number in range(rows)]


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _add_byte_level(writer: gguf.GGUFWriter, described: Mapping[str, Any]) -> None:
    """Add the kind of a BPE over bytes: how it splits text, by the name of llama.cpp."""
    words = _steps(described["pre_tokenizer"])
    names = [name for name, known in splitters().items() if _steps(_described(known)) == words]
    if not names:
        raise _inexpressible(f"it splits text in another way than {', '.join(splitters())}")
    model, normalizer = described["model"], described["normalizer"]
    if normalizer and (normalizer, names[0]) != (NFC, "qwen2"):  # llama.cpp does not normalize texts for Qwen either
        raise _inexpressible(f"it normalizes texts with {visible(str(normalizer['type']), 40)}")
    if model["ignore_merges"] != (names[0] in WHOLE_WORDS):
        raise _inexpressible(f"ignore_merges is {model['ignore_merges']}")
    if model["dropout"] or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise _inexpressible("it has dropout, or marks parts of words")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(names[0])


def _add_sentence_piece(
    writer: gguf.GGUFWriter, described: Mapping[str, Any], tokens: Sequence[str], merges: Sequence[tuple[str, ...]]
) -> None:
    """Add the kind of a BPE over characters with byte fallback. llama.cpp derives its merges from scores of tokens.

    Tokens are in the order of their merges, so the negative number of a token is its score.
    """
    scores = [-float(number) for number in range(len(tokens))]
    vocabulary: dict[str, int] = dict(described["model"]["vocab"])
    derived = generate_merges(vocabulary, {token: scores[number] for token, number in vocabulary.items()})
    results = [vocabulary["".join(merge)] for merge in merges]
    if set(derived) != set(merges) or results != sorted(results):
        raise _inexpressible("its merges are not in the order of its tokens")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(_has_prefix(described))


def _has_prefix(described: Mapping[str, Any]) -> bool:
    """Return whether a blank precedes every text. Raises ArtifactError for other rules."""
    normalizer, splitter = _steps(described["normalizer"]), _steps(described["pre_tokenizer"])
    if not splitter and normalizer in ([PREPEND, REPLACE], [REPLACE]):
        return PREPEND in normalizer
    scheme = splitter[0].get("prepend_scheme") if len(splitter) == 1 else None
    known = [{"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}]
    if not normalizer and splitter == known and scheme in ("always", "never"):
        return bool(scheme == "always")
    raise _inexpressible("it places blanks in another way than SentencePiece")


def _steps(described: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, without what does not change tokens."""
    if described is None:
        return []
    if described["type"] == "Sequence":
        parts = described.get("pretokenizers", described.get("normalizers", ()))
        return [step for part in parts for step in _steps(part)]
    return [{key: value for key, value in described.items() if key != "trim_offsets"}]


def _described(words: list[Any]) -> dict[str, Any]:
    """Return a pre-tokenizer as in tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    found: dict[str, Any] = json.loads(tokenizer.to_str())["pre_tokenizer"]
    return found


def _inexpressible(why: str) -> ArtifactError:
    return ArtifactError(
        f"gguf: the tokenizer of the base model cannot be expressed: {why}; write --format hf, and convert the result "
        "with llama.cpp's convert_hf_to_gguf.py",
        reason="inexpressible",
    )
