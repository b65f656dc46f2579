"""The estimate's lines, and the refusal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from clotho.models.machine import memory_limit
from protocols.compute import MemoryLimit
from protocols.errors import ProfileError
from protocols.summary import MemoryEstimate
from tests.models.simulated_devices import MAC_16_GB, simulate_gpu
from training_run.memory.estimate import estimate_memory
from training_run.memory.report import PARTS, beside_macos, describe, require_wired_limit, too_large
from training_run.profile.flags import parse_arguments
from training_run.profile.keys import PROFILE_KEYS
from training_run.profile.load import load_profile
from training_run.profile.schema import Profile

ESTIMATE = MemoryEstimate(
    base=4 * 2**30,
    trained=10,
    optimizer=30,
    reference=0,
    rollback=15,
    midway=5,
    caches=2**30,
    prefixes=40,
    gradients=20,
    activations=3 * 2**30,
    logits=5 * 2**30,
    update=9 * 2**30 // 2,
    decode=7 * 2**30,
    margin=2 * 2**30,
    freed=2**29,
    one_sequence=2**20,
)


def installed(size: int) -> MemoryLimit:
    """Return the limit of a machine with `size` bytes on the CPU."""
    return MemoryLimit(bytes=size, source="installed", installed=size)


def test_the_total_takes_the_largest_of_what_takes_turns() -> None:
    """Backward pass, optimizer step and decoding step never happen at once. Freed buffers are beside the total."""
    assert ESTIMATE.total == 15 * 2**30 + 120
    assert msgspec.structs.replace(ESTIMATE, decode=9 * 2**30).total == 16 * 2**30 + 100


def test_every_part_has_a_line_with_something_to_change() -> None:
    """Empty parts are left out; none of the fields is forgotten."""
    lines = describe(ESTIMATE)
    sizes = msgspec.structs.asdict(ESTIMATE)
    assert not sizes.pop("shipped_shape")
    assert not sizes.pop("quantized")
    del sizes["one_sequence"]
    assert [line.bytes for line in lines] == [value for value in sizes.values() if value]
    assert [name for name, _, _ in PARTS] == list(sizes)
    assert all(line.change for line in lines)


def test_the_settings_that_are_named_exist() -> None:
    """Each `section.key` of a suggestion is a key of the profile."""
    for _, _, change in PARTS:
        named = [word.strip("(,;)") for word in change.split() if "." in word]
        assert named
        assert [key for key in named if PROFILE_KEYS.named(key) is None] == []


def test_a_run_that_fits_is_not_refused() -> None:
    """The cache of one sequence must fit: the lengths of completions decide how full the caches get."""
    assert too_large(ESTIMATE, installed(ESTIMATE.minimum)) is None
    assert too_large(ESTIMATE, installed(ESTIMATE.minimum - 1)) is not None


def refusal(estimate: MemoryEstimate, limit: MemoryLimit) -> str:
    """Return the message of a refusal, which is one line."""
    error = too_large(estimate, limit)
    assert error is not None
    assert "\n" not in str(error)
    return str(error)


def test_a_refusal_names_the_largest_counted_parts_and_their_settings() -> None:
    """The decode step is larger than the logits, but it is not held during the backward pass."""
    message = refusal(ESTIMATE, installed(8 * 2**30))
    assert all(words in message for words in ("at least 14.0 GiB", "has 8.0 GiB", "logits", "base weights"))
    assert all(key in message for key in ("learner.micro_batch_tokens", "model.path"))
    assert "decode step" not in message


def test_a_long_sequence_is_named_by_the_keys_of_its_length() -> None:
    """The minimum has the KV cache of one sequence, whatever `engine.kv_cache_tokens` is."""
    long = msgspec.structs.replace(ESTIMATE, caches=20 * 2**30, one_sequence=20 * 2**30)
    assert "sampling.max_tokens" in refusal(long, installed(8 * 2**30))


def test_only_metal_has_a_limit_that_can_be_raised() -> None:
    """The command has a value in MiB above the need of the run. A machine that is too small gets no such advice."""
    metal = MemoryLimit(bytes=10 * 2**30, source="metal", installed=24 * 2**30)
    command, _, value = refusal(ESTIMATE, metal).rpartition("iogpu.wired_limit_mb=")
    assert command.endswith("sudo sysctl ")
    assert ESTIMATE.minimum < int(value) * 2**20 < metal.installed - 4 * 2**30
    small = msgspec.structs.replace(metal, installed=16 * 2**30)
    for limit in (small, *(msgspec.structs.replace(metal, source=other) for other in ("gpu", "cgroup", "installed"))):
        assert "iogpu" not in refusal(ESTIMATE, limit)


def test_on_a_mac_a_run_must_fit_beside_macos_with_full_caches() -> None:
    """Metal ends a process that gets no memory. A raised limit changes nothing about what macOS needs itself."""
    assert [beside_macos(gib * 2**30) // 2**20 for gib in (8, 16, 64)] == [5461, 12288, 56 * 1024]
    full = msgspec.structs.replace(ESTIMATE, caches=20 * 2**30)
    metal = MemoryLimit(bytes=21 * 2**30, source="metal", installed=32 * 2**30)
    assert full.minimum < metal.bytes
    message = refusal(full, metal)
    assert "engine.kv_cache_tokens" in message
    assert "28.0 of 32.0 GiB" in message
    assert too_large(full, installed(full.total - 1)) is None
    assert too_large(ESTIMATE, metal) is None
    raised = MemoryLimit(bytes=15 * 2**30, source="metal", installed=16 * 2**30)
    assert ESTIMATE.minimum < raised.bytes
    assert "macOS needs 4.0 GiB" in refusal(ESTIMATE, raised)


def test_a_wired_limit_needs_metal_and_stays_below_its_limit() -> None:
    """A key without an effect is refused; 0, the default, is accepted everywhere."""
    metal = MemoryLimit(bytes=10 * 2**30, source="metal", installed=16 * 2**30)
    for limit in (metal, installed(2**34)):
        require_wired_limit(0, limit)
    require_wired_limit(10 * 1024, metal)
    for megabytes, limit in ((10 * 1024 + 1, metal), (1, installed(2**34))):
        with pytest.raises(ProfileError, match=r"memory\.wired_limit_mib"):
            require_wired_limit(megabytes, limit)


def qwen3_14b(*flags: str) -> Profile:
    """The profile of Qwen3-14B in 4 bits, with flags."""
    return load_profile("qwen3-14b", parse_arguments(["--profile", "qwen3-14b", *flags]).overrides)


@pytest.mark.parametrize("flags", [(), ("--learner.micro-batch-tokens", "4096")])
def test_the_recommended_working_set_of_a_mac_with_16_gb_decides_about_qwen3_14b(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """In 4 bits, from its configuration alone. The profile fits; a micro-batch of 4,096 tokens does not.

    It would fit into the installed memory. The refusal names the micro-batch.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    simulate_gpu(monkeypatch, MAC_16_GB)
    profile = qwen3_14b(*flags)
    estimate, limit = estimate_memory(profile.model, profile), memory_limit()
    assert estimate.minimum < limit.installed
    assert (estimate.minimum > limit.bytes) == bool(flags)
    assert (too_large(estimate, limit) is None) != bool(flags)
    if flags:
        message = refusal(estimate, limit)
        assert "learner.micro_batch_tokens" in message
        assert "model.path" in message
