"""Where the directory of a reward model is looked for, and which settings are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocols.errors import ProfileError
from training_run.profile.load import load_profile
from training_run.profile.rules import CHECK

PROFILE = """
extends = "local-m3"
eval = "off"

[[rewards]]
name = "reward_model"

[rewards.settings]
model = "./judge"
"""


def test_a_directory_is_relative_to_the_profile_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like other paths of a profile; a repository of the hub is a name."""
    (tmp_path / "profiles").mkdir()
    profile = tmp_path / "profiles" / "mine.toml"
    monkeypatch.chdir(tmp_path)
    for written, expected in (("./judge", str(profile.parent / "judge")), ("owner/name", "owner/name")):
        profile.write_text(PROFILE.replace("./judge", written), encoding="utf-8")
        assert load_profile(str(profile)).rewards[0].settings == {"model": expected}


def test_settings_of_a_reward_model_are_checked_before_a_run(tmp_path: Path) -> None:
    """And those of other rewards beside it are not."""
    profile = tmp_path / "mine.toml"
    profile.write_text(f'{PROFILE}\n[[rewards]]\nname = "math_eval"\n', encoding="utf-8")
    CHECK(load_profile(str(profile)))
    profile.write_text(PROFILE.replace("model =", "modle ="), encoding="utf-8")
    with pytest.raises(ProfileError, match="modle"):
        CHECK(load_profile(str(profile)))
