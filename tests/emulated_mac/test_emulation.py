"""What the emulated Mac is; outside of it, these tests are skipped."""

from __future__ import annotations

import os
import platform
import resource
import select
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from attachments.machine.macos import read_mac
from attachments.machine.pressure import kernel_level
from clotho.models.machine import memory_limit
from clotho.models.policy import load_policy
from clotho.process import load_blas
from clotho.settings.model import ModelSection, PolicySection
from tests.model_lanes import EMBEDDED
from training_run.machine import describe_machine

pytestmark = pytest.mark.skipif("sitecustomize" not in sys.modules, reason="python -m tests.emulated_mac")

GIB = 2**30


def test_the_system_is_darwin_in_every_process() -> None:
    """Of this process, and of those that it starts."""
    script = "import sys, platform; print(sys.platform, platform.system(), platform.machine())"
    started = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert started.stdout.split() == ["darwin", "Darwin", "arm64"]
    assert (sys.platform, platform.system()) == ("darwin", "Darwin")


def test_names_and_files_of_linux_are_missing() -> None:
    """As they are on macOS; limits of memory are refused."""
    assert not hasattr(os, "sched_getaffinity")
    assert not hasattr(select, "epoll")
    assert not Path("/proc/cpuinfo").exists()
    with pytest.raises(FileNotFoundError):
        Path("/proc/self/oom_score_adj").read_text()
    with pytest.raises(ValueError, match="limit"):
        resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))


def test_the_device_is_metal() -> None:
    """Its facts are those of an M3 with 16 GB; Accelerate is in the place of a BLAS."""
    here = describe_machine(blas=load_blas())
    assert (here.backend, here.processor, here.blas) == ("Metal", "Apple M3", "Accelerate")
    assert memory_limit().source == "metal"
    assert float(mx.sum(mx.ones((3,)))) == 3.0


def test_the_policy_decodes_with_the_layers_for_metal() -> None:
    """They are compared with MLX's operations, as on a Mac, where a stand-in computes the kernel."""
    policy = load_policy(ModelSection(path=str(EMBEDDED)), PolicySection(), seed=0, keep_reference=False)
    assert {type(block.self_attn).__name__ for block in policy.model.layers} == {"FusedAttention"}
    assert {type(block).__name__ for block in policy.model.layers} == {"FusedBlock"}


def test_programs_of_macos_tell_the_state_of_the_mac() -> None:
    """Mains power, a sleeping display, and normal memory pressure."""
    state = read_mac()
    assert (state.version, state.chip, state.power, state.wired_limit_mb) == ("26.1", "Apple M3", "mains", 0)
    assert state.display_awake is False
    assert kernel_level() == "normal"
