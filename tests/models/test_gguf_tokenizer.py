"""The tokenizer of a GGUF file equals the tokenizer that it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from clotho.models.gguf import GgufFile
from clotho.models.gguf_tokenizer import LLAMA3_WORDS, gguf_tokenizer
from protocols.errors import ModelError
from tests.models.gguf_files import build, write

CONTROL = ["<|start|>", "<|end|>"]
CORPUS = ["the policy that learns is the policy that serves", "23 + 456 = 479, isn't it?", "Größe, 東京 and naïve"] * 4
TEXTS = [
    "",
    " ",
    "the policy serves  1234 requests",
    "isn't 東京 naïve?\n\n\tGröße 👩‍🚀",
    "<|start|>user\n12+34<|end|>",
    "<|star|> <|END|>",
    "a\x00b\u2028c",
]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
WORDS: dict[str, list[Any]] = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def byte_level(words: str) -> Tokenizer:
    """A byte-level BPE tokenizer of 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(WORDS[words])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def written(path: Path, tokenizer: Tokenizer, **metadata: Any) -> Any:
    """The tokenizer of a file with a tokenizer and metadata. Underscores in names stand for dots in the file."""
    named = {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return gguf_tokenizer(GgufFile(write(path / "m.gguf", build(), tokenizer=tokenizer, metadata=named)))


@pytest.mark.parametrize("words", sorted(WORDS))
def test_a_byte_level_tokenizer_encodes_and_decodes_as_its_original(tmp_path: Path, words: str) -> None:
    """Digits, words, bytes and control tokens are split as the file's pre-tokenizer says."""
    original = byte_level(words)
    loaded = written(tmp_path, original, ggml__pre=words)
    for text in TEXTS:
        assert loaded.encode(text) == original.encode(text).ids
        assert loaded.decode(loaded.encode(text)) == text


def test_the_end_token_and_the_chat_template_come_from_the_file(tmp_path: Path) -> None:
    """A conversation renders with the file's template, and control tokens are single tokens."""
    original = byte_level("smollm")
    loaded = written(tmp_path, original, ggml__pre="smollm", chat_template=TEMPLATE)
    rendered = loaded.apply_chat_template([{"role": "user", "content": "the policy"}], tokenize=False)
    assert rendered == "<|start|>user\nthe policy<|end|>"
    assert loaded.eos_token_ids == {original.token_to_id("<|end|>")}
    assert loaded.encode(rendered)[0] == original.token_to_id("<|start|>")
    assert loaded.decode(loaded.encode(rendered), skip_special_tokens=True) == "user\nthe policy"


def test_a_file_without_a_template_has_none(tmp_path: Path) -> None:
    """The API then refuses chat requests, as for other models."""
    assert not written(tmp_path, byte_level("smollm"), ggml__pre="smollm").has_chat_template


@pytest.mark.parametrize(
    ("metadata", "named"),
    [({"ggml__pre": "tekken"}, "tekken"), ({"ggml__eos_token_id": 4_000_000}, "eos_token_id")],
    ids=["pre-tokenizer", "end token"],
)
def test_a_tokenizer_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    """The message is one line."""
    with pytest.raises(ModelError, match=named) as caught:
        written(tmp_path, byte_level("smollm"), **metadata)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The message names the missing list."""
    with pytest.raises(ModelError, match="tokens"):
        gguf_tokenizer(GgufFile(write(tmp_path / "m.gguf", build())))
