"""Small GGUF files, written with llama.cpp's own library from models of mlx-lm and tokenizers of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Quantization
from mlx_lm.models import llama
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from attachments.files.gguf import IN_BLOCK, TOP_LEVEL
from attachments.files.gguf_tokenizer import LLAMA3_WORDS, SPACE
from clotho.models.parameters import flat

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 300, "max_position_embeddings": 256,
    "rope_theta": 10_000.0, "tie_word_embeddings": True,
}  # fmt: skip
TOKENS_1_T = mx.array([[5, 90, 133, 2, 217, 60, 299]])
CONTROL = ["<|start|>", "<|end|>"]
CORPUS = ["the policy that learns is the policy that serves", "23 + 456 = 479, isn't it?", "Größe, 東京 and naïve"] * 4
WORDS: dict[str, list[Any]] = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
NAMES = {ours: theirs for theirs, ours in (TOP_LEVEL | IN_BLOCK).items()}


def build(config: dict[str, Any] = CONFIG) -> Any:
    """A Llama of `config` with random weights."""
    mx.random.seed(0)
    architecture: Any = llama
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def write(
    path: Path,
    model: Any,
    config: dict[str, Any] = CONFIG,
    *,
    quantization: Quantization = Quantization.F32,
    tokenizer: Tokenizer | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a model, and a byte-level tokenizer, as llama.cpp's converter does.

    quantization: of all matrices. metadata: further keys, strings or numbers. tensors: further tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in flat(model.parameters()).items():
        values = np.array(array.astype(mx.float32))
        stored = quantization if values.ndim == 2 else Quantization.F32
        gguf_name, heads = _gguf_name(name, config)
        if heads:
            values = _neighbouring_pairs(values, heads)
        data = gguf.quants.quantize(values, stored)
        writer.add_tensor(gguf_name, data, raw_dtype=stored)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def _gguf_name(name: str, config: dict[str, Any]) -> tuple[str, int]:
    """The name in llama.cpp, and the number of heads whose rows are reordered; 0 for other tensors."""
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}", 0
    _, _, layer, *part = module.split(".")
    own = NAMES[".".join(part)]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(own, 0)
    return f"blk.{layer}.{own}.{kind}", heads


def _neighbouring_pairs(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to queries and keys (`LlamaModel.permute`)."""
    rows = values.shape[0] // heads
    return values.reshape(heads, 2, rows // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def sentence_piece() -> Tokenizer:
    """A BPE tokenizer with byte fallback, as Hugging Face converts those of SentencePiece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", SPACE) for text in CORPUS], trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if not entry["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


def _add_tokenizer(writer: Any, tokenizer: Tokenizer) -> None:
    """Add a tokenizer; its tokens in angle brackets are control tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    writer.add_token_list(tokens)
    if "<unk>" in tokens:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_token_types([_piece_type(token) for token in tokens])
        writer.add_unk_token_id(tokens.index("<unk>"))
        bos, eos = "<s>", "</s>"
    else:
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        kinds = [gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in merges])
        bos, eos = CONTROL
    writer.add_bos_token_id(tokens.index(bos))
    writer.add_eos_token_id(tokens.index(eos))
    writer.add_add_bos_token(False)


def _piece_type(token: str) -> gguf.TokenType:
    special = {"<unk>": gguf.TokenType.UNKNOWN, "<s>": gguf.TokenType.CONTROL, "</s>": gguf.TokenType.CONTROL}
    return special.get(token, gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL)
