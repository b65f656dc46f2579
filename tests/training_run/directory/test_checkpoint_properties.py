"""A checkpoint with any manifest and any state is either intact or damaged: no other exception, and no endless read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.checkpoint import RunState
from protocols.errors import CheckpointError
from tests.training_run.directory.made_checkpoints import snapshot, state
from training_run.directory.checkpoints import (
    MANIFEST,
    STATE,
    find_damage,
    latest_checkpoint,
    read_state,
    write_checkpoint,
)

names = st.sampled_from(
    ["state.json", "adapters.safetensors", "a\0b", "/etc/passwd", "../../etc/passwd", "..", ".", "", "x" * 300, "a/b"]
)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False), st.just(10**40))
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), names)
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries({"name": names | st.text(max_size=8), "size": numbers, "sha256": st.text(max_size=4)})
manifests = st.fixed_dictionaries({"format": st.just(1) | numbers, "files": st.lists(entries, max_size=4) | documents})


@st.composite
def changed(draw: Callable[..., Any], original: dict[str, Any]) -> dict[str, Any]:
    """Replace values of a document, at any depth one level below the top."""
    result = dict(original)
    for key in draw(st.lists(st.sampled_from(sorted(original)), max_size=3)):
        value = result[key]
        if isinstance(value, dict) and value and draw(st.booleans()):
            result[key] = {**value, draw(st.sampled_from(sorted(value))): draw(documents)}
        else:
            result[key] = draw(documents)
    return result


@st.composite
def torn(draw: Callable[..., Any], original: bytes) -> bytes:
    """Cut, overwrite or repeat a part of a file."""
    start = draw(st.integers(0, len(original)))
    end = draw(st.integers(start, len(original)))
    inserted = draw(st.binary(max_size=20) | st.just(bytes(4096)) | st.just(b"[" * 5000) | st.just(original[start:end]))
    contents: bytes = original[:start] + inserted + original[end:]
    return contents


class Examples:
    """Two checkpoints. That of step 1 stays intact; each example overwrites a file of that of step 2."""

    def __init__(self, path: Path) -> None:
        for step in (1, 2):
            write_checkpoint(path / "checkpoints", snapshot(step), keep_last=2)
        self.checkpoint = path / "checkpoints" / "step-000002"
        self.manifest = (self.checkpoint / MANIFEST).read_bytes()
        self.state = (self.checkpoint / STATE).read_bytes()

    def check_manifest(self, contents: bytes) -> None:
        """Only the original manifest makes the checkpoint intact."""
        (self.checkpoint / MANIFEST).write_bytes(contents)
        damage = find_damage(self.checkpoint)
        if damage is None:
            assert msgspec.json.decode(contents) == msgspec.json.decode(self.manifest)
        self.check_resume(damage)

    def check_state(self, contents: bytes) -> None:
        """The manifest agrees with the state, as after a deliberate change. A state that is used has a valid form."""
        (self.checkpoint / STATE).write_bytes(contents)
        manifest = msgspec.json.decode(self.manifest)
        for file in manifest["files"]:
            if file["name"] == STATE:
                file.update(size=len(contents), sha256=hashlib.sha256(contents).hexdigest())
        (self.checkpoint / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        damage = find_damage(self.checkpoint)
        try:
            found = read_state(self.checkpoint)
        except CheckpointError:
            assert damage is not None
        else:
            assert msgspec.json.decode(msgspec.json.encode(found), type=RunState) == found
            assert (damage is None) == (found.step == 2)
        self.check_resume(damage)

    def check_resume(self, damage: str | None) -> None:
        """The run resumes from the newest intact checkpoint, with one line about a damaged one."""
        expected = "step-000002" if damage is None else "step-000001"
        found = latest_checkpoint(self.checkpoint.parent)
        assert found.path is not None
        assert found.path.name == expected
        assert len(found.warnings) == (damage is not None)
        assert all("\n" not in warning and "\0" not in warning for warning in found.warnings)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    """Return the run directory of all examples."""
    return Examples(tmp_path_factory.mktemp("run"))


PROFILES = pytest.mark.parametrize("profile", ["repeatable", pytest.param("many", marks=pytest.mark.slow)])
STATE_DOCUMENT = msgspec.to_builtins(state(2))
STATE_BYTES = msgspec.json.encode(state(2))


LINE_BREAK = b'{"\\n": null}'
"""An unknown key whose name would break a message into two lines."""


def run_examples(profile: str, strategy: st.SearchStrategy[bytes], check: Callable[[bytes], None]) -> None:
    """Check the examples of a profile and `LINE_BREAK`."""

    @settings.get_profile(profile)
    @given(strategy)
    @example(LINE_BREAK)
    def examine(contents: bytes) -> None:
        check(contents)

    examine()


@PROFILES
def test_any_manifest_is_valid_or_damaged(examples: Examples, profile: str) -> None:
    """Documents of the right form with foreign names, numbers and types, and torn files."""
    strategy = (manifests | documents).map(encoded) | torn(examples.manifest)
    run_examples(profile, strategy, examples.check_manifest)


@PROFILES
def test_any_state_is_valid_or_damaged(examples: Examples, profile: str) -> None:
    """States with foreign values, and torn files, whose manifest agrees."""
    strategy = changed(STATE_DOCUMENT).map(encoded) | torn(STATE_BYTES)
    run_examples(profile, strategy, examples.check_state)


def encoded(document: Any) -> bytes:
    """Encode a document as JSON. Integers can have any size."""
    return json.dumps(document).encode()
