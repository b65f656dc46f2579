"""Small tokenizers of the families in use, each with control tokens and a chat template; trained in milliseconds."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from clotho.models.tokenizer import ChatTokenizer

EMBEDDED = Path(__file__).parents[2] / "profiles" / "embedded"

CORPUS = ["the user says hello to the assistant and the model answers", "a b c <im_start> [INST] 0123 |end| s >"] * 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{% endfor %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{{ ('<|User|>' if m.role == 'user' else '<|Bot|>') + m.content }}{{ '<eos>' }}{% endfor %}"
)

SPLIT = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def _byte_level(*, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(tokenizer_models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(SPLIT, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    return tokenizer


def _sentencepiece(special: list[str], *, metaspace: bool) -> Tokenizer:
    """BPE with byte fallback, whose vocabulary contains the special tokens."""
    tokenizer = Tokenizer(tokenizer_models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    corpus = [text.replace(" ", "▁") for text in CORPUS]
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=420, special_tokens=pieces))
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if not entry["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


def _unigram(special: list[str]) -> Tokenizer:
    letters = [*sorted(set("".join(CORPUS)) - {" "}), "▁"]
    pieces = [
        ("<unk>", 0.0),
        *((name, 0.0) for name in special),
        *((letter, -3.0) for letter in letters),
        ("▁the", -1.0),
    ]
    tokenizer = Tokenizer(tokenizer_models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer


def _wrapped(
    tokenizer: Tokenizer, special: list[str], template: str, *, bos: str, eos: str, strip: bool = False
) -> ChatTokenizer:
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, lstrip=strip, rstrip=strip) for name in special]
    )
    wrap: Any = PreTrainedTokenizerFast
    return ChatTokenizer(wrap(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template))


@lru_cache
def family(name: str) -> ChatTokenizer:
    """One tokenizer of each family; see `FAMILIES`."""
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    gemma = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    match name:
        case "embedded":
            return ChatTokenizer.from_files(EMBEDDED)
        case "qwen":
            return _wrapped(_byte_level(), chatml, CHATML, bos="<|endoftext|>", eos="<|im_end|>")
        case "qwen with strip":
            return _wrapped(_byte_level(), chatml, CHATML, bos="<|endoftext|>", eos="<|im_end|>", strip=True)
        case "llama 3":
            names = ["<|begin|>", "<|eot|>", "<|start|>", "<|end|>"]
            return _wrapped(_byte_level(ignore_merges=True), names, LLAMA_3, bos="<|begin|>", eos="<|eot|>")
        case "llama 2":
            return _wrapped(
                _sentencepiece(["<s>", "</s>"], metaspace=False), ["<s>", "</s>"], LLAMA_2, bos="<s>", eos="</s>"
            )
        case "llama 2 with metaspace":
            return _wrapped(
                _sentencepiece(["<s>", "</s>"], metaspace=True), ["<s>", "</s>"], LLAMA_2, bos="<s>", eos="</s>"
            )
        case "gemma":
            return _wrapped(_sentencepiece(gemma, metaspace=False), gemma, GEMMA, bos="<bos>", eos="<eos>")
        case "unigram":
            return _wrapped(_unigram(gemma), gemma, GEMMA, bos="<bos>", eos="<eos>")
        case _:
            tokenizer = _byte_level()
            tokenizer.add_tokens(
                [AddedToken(name, special=False, normalized=False) for name in ("<|User|>", "<|Bot|>")]
            )
            return _wrapped(tokenizer, ["<eos>"], DEEPSEEK, bos="<eos>", eos="<eos>")


FAMILIES = (
    "embedded", "qwen", "qwen with strip", "llama 3", "llama 2", "llama 2 with metaspace", "gemma",
    "unigram", "deepseek",
)  # fmt: skip
