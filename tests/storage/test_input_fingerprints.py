"""Inputs are recognised by what they hold."""

from __future__ import annotations

from pathlib import Path

from clotho.storage.fingerprints import (
    SAMPLE_BYTES,
    dataset_fingerprint,
    model_fingerprint,
    tokenizer_fingerprint,
)


def test_a_model_is_its_configuration_and_weights(tmp_path: Path) -> None:
    """A change of either shows; a change of the tokenizer, or of a readme, does not."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 * SAMPLE_BYTES))
    before = model_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("")
    assert model_fingerprint(tmp_path) == before
    for position in (0, 3 * SAMPLE_BYTES - 1):
        contents = bytearray(3 * SAMPLE_BYTES)
        contents[position] = 1
        weights.write_bytes(contents)
        assert model_fingerprint(tmp_path) != before
    weights.write_bytes(bytes(3 * SAMPLE_BYTES))
    (tmp_path / "config.json").write_text("{ }")
    assert model_fingerprint(tmp_path) != before


def test_a_tokenizer_is_its_vocabulary_and_template(tmp_path: Path) -> None:
    """The chat template decides what the policy is asked."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("a")
    before = tokenizer_fingerprint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("b")
    assert tokenizer_fingerprint(tmp_path) != before


def test_a_dataset_is_every_byte_of_its_files(tmp_path: Path) -> None:
    """Wherever it lies; one changed byte in the middle of a large file shows."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(bytes(5 * SAMPLE_BYTES))
    two.write_bytes(bytes(5 * SAMPLE_BYTES))
    assert dataset_fingerprint(one) == dataset_fingerprint(two) != dataset_fingerprint(one, two)
    contents = bytearray(5 * SAMPLE_BYTES)
    contents[len(contents) // 2] = 1
    two.write_bytes(contents)
    assert dataset_fingerprint(one) != dataset_fingerprint(two)
