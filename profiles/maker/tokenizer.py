"""The tokenizer: byte-level BPE with single digits, in Hugging Face form, with a chat template in Qwen's style.

No normaliser and all 256 bytes in the vocabulary, so any UTF-8 text survives encode and decode unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 384
"""Number of token ids; the merges fill what bytes, special and tag tokens leave."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
"""Removed by `decode(skip_special_tokens=True)`; ids 0, 1 and 2."""

TAG_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
"""Single tokens that stay in the text."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenisation: words with their space, single digits, runs of punctuation."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def chat_prompt(text: str) -> str:
    """Render one user message as the chat template does when an answer is asked for."""
    return f"{START}user\n{text}{END}\n{START}assistant\n"


ROLES = ("system", "user", "assistant", "tool")
"""Words of the template that become single tokens."""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`, at most `VOCABULARY` ids in all; deterministic for the same texts in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAG_TOKENS),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *ROLES * 9], trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, context: int, template: str = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json; `context` is in tokens."""
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": END, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        **names,
    }
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "special_tokens_map.json", names)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Look up the id of a token that must be in the vocabulary."""
    return tokenizer.get_vocab()[token]


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
