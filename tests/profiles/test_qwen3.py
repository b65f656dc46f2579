"""Prompts of shipped profiles let Qwen3 earn their rewards, and the profiles for an M3 fit into it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from attachments.doctor.template import opened_tags
from attachments.doctor.tests import templates
from clotho.models.machine import memory_limit
from clotho.models.tokenizer import ChatTokenizer
from clotho.rewards.registry import load_reward
from protocols.prompt import Problem
from tests.docs.memory_reference import LONG_SEQUENCE, MACS, MacRecipe
from tests.models.real_templates import TEMPLATES
from tests.models.simulated_devices import MAC_16_GB, simulate_gpu
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import PROFILES, load_profile
from training_run.profile.schema import Profile

PROBLEM = Problem(prompt="What is 40 + 2?", answer="42", type="math")
SWITCHES = ("/think", "/no_think")
NO_THOUGHT = "<think>\n\n</think>\n\n"
"""What Qwen3 writes in place of a thought after `/no_think`, and what its template writes without `enable_thinking`."""

MARGIN_FOR_OTHERS = 0.75
"""Share of Metal's limit that a profile may use, so that other programs and freed buffers have room."""

FOR_16_GB = sorted(["gsm8k", "long-qwen3", *(path.stem for path in PROFILES.glob("*-m3.toml"))])
"""The profiles for Macs with 16 GB; those that are named for an M3 are."""


def tokenizer(profile: Profile) -> ChatTokenizer:
    """Return a tokenizer with the template of Qwen3 and the variables of a profile."""
    return templates.tokenizer(TEMPLATES["Qwen3"], variables=profile.model.chat_template_kwargs)


def completion_of_qwen3(profile: Profile) -> str:
    """Return what Qwen3 writes for the prompt of a profile if it follows the system message and the last switch."""
    found = tokenizer(profile)
    system = [{"role": "system", "content": profile.data.system}] if profile.data.system else []
    prompt = found.decode(
        found.render_chat([*system, {"role": "user", "content": PROBLEM.prompt}]), skip_special_tokens=False
    )
    last = max(SWITCHES, key=prompt.rfind)
    thought = NO_THOUGHT if last == "/no_think" and last in prompt else "<think>\nforty and two\n</think>\n\n"
    return ("" if prompt.endswith(NO_THOUGHT) else thought) + f"<answer>{PROBLEM.answer}</answer>"


@pytest.mark.parametrize("name", sorted(path.stem for path in PROFILES.glob("*.toml")))
def test_the_prompt_of_a_profile_can_earn_its_format_reward(name: str) -> None:
    """Also with a model that obeys the switch in a system message; its template opens no tag that a reward expects."""
    profile = load_profile(name)
    if "format" in {section.name for section in profile.rewards}:
        assert load_reward("format")(PROBLEM, completion_of_qwen3(profile)) == 1.0
        assert opened_tags(tokenizer(profile)) == ()


def test_a_prompt_that_switches_thinking_off_cannot_earn_the_format_reward() -> None:
    """The empty thought of Qwen3 is blank, and `format` demands a thought."""
    profile = load_profile("qwen3-m3")
    switched = replace(profile, data=replace(profile.data, system=f"{profile.data.system} /no_think"))
    assert load_reward("format")(PROBLEM, completion_of_qwen3(switched)) == 0.0


@pytest.mark.parametrize("name", FOR_16_GB)
def test_a_profile_for_an_m3_leaves_a_quarter_of_the_limit_of_16_gb(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With full caches, during an evaluation. Shapes of models that are not here ship with the project."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    simulate_gpu(monkeypatch, MAC_16_GB)
    profile = load_profile(name)
    assert estimate_memory(profile.model, profile).total <= MARGIN_FOR_OTHERS * memory_limit().bytes


@pytest.mark.parametrize("recipe", MACS, ids=lambda recipe: f"{recipe.memory} GB {recipe.command}")
def test_a_recipe_leaves_a_quarter_of_the_limit_of_its_mac(
    recipe: MacRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the flags of its command. The limit is two thirds; long caches hold 8,192 tokens of every row."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    simulate_gpu(monkeypatch, MAC_16_GB)
    profile = recipe.profile()
    assert estimate_memory(profile.model, profile).total <= MARGIN_FOR_OTHERS * recipe.memory * 2**30 * 2 / 3
    if profile.sampling.max_tokens == 8192:
        assert profile.engine.kv_cache_tokens == profile.engine.max_num_seqs * LONG_SEQUENCE


def test_a_mixture_of_experts_leaves_a_quarter_of_the_limit_of_64_gb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With full caches, during an evaluation and while a checkpoint is written, whose experts have the largest rank."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    simulate_gpu(monkeypatch, MAC_16_GB)
    profile = load_profile("qwen3-30b-a3b")
    estimate = estimate_memory(profile.model, profile)
    assert estimate.total <= MARGIN_FOR_OTHERS * 64 * 2**30 * 2 / 3
    experts = 8 * 128 * (3 * (2048 + 768))  # numbers of rank 1, in all layers with an adapter
    assert estimate.padded == 4 * 16 * experts
    assert estimate.routes == profile.sampling.group_size * 8 * 3 * (256 + 2048) * 48 * 8
