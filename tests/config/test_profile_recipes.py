"""Recipes: what the choice of an objective or a correction brings along, and what has the last word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clotho.config.keys import settable
from clotho.config.layers import PROFILES
from clotho.config.load import load_profile, resolved_toml
from clotho.config.presets import CORRECTIONS, OBJECTIVES, USES
from clotho.config.schema import LearnerSection
from protocols.errors import ProfileError
from tests.config.test_profile_file import MINIMAL, written

PROXIMAL = '[learner]\nratio_reference = "batch_start"\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learner(here: Path, text: str = "", **flags: Any) -> LearnerSection:
    """The section that comes of a profile file and of flags."""
    overrides = {f"learner.{name}": value for name, value in flags.items()}
    return load_profile(written(here, MINIMAL + text), overrides).learner


def test_the_default_objective_has_its_recipe_as_defaults() -> None:
    """Who chooses nothing gets what choosing grpo would give."""
    section = LearnerSection()
    assert section.objective == "grpo"
    assert {name: getattr(section, name) for name in OBJECTIVES["grpo"]} == OBJECTIVES["grpo"]


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_choosing_an_objective_brings_its_recipe(objective: str, here: Path) -> None:
    """Whatever of it has an effect; the rest falls back to defaults without a word."""
    section, default = learner(here, objective=objective), LearnerSection()
    for name, value in OBJECTIVES[objective].items():
        at_ratio_one = section.ratio_reference == "batch_start" and name in USES[objective]
        assert getattr(section, name) == (getattr(default, name) if at_ratio_one else value), name


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_choosing_a_correction_brings_its_bounds(correction: str, here: Path) -> None:
    """Above what a lower layer says of them, below what the same layer says."""
    text = PROXIMAL + 'correction = "truncate"\ncorrection_high = 7.0\n'
    expected = CORRECTIONS[correction].get("correction_high", LearnerSection().correction_high)
    assert learner(here, text, correction=correction).correction_high == expected
    if correction != "none":
        assert learner(here, text, correction=correction, correction_high=3.0).correction_high == 3.0


def test_a_recipe_ranks_right_below_the_layer_that_chooses(here: Path) -> None:
    """Over lower layers, under its own."""
    text = "[learner]\nclip_low = 0.1\nclip_high = 0.1\n"
    section = learner(here, text, objective="gspo", clip_high=0.3)
    assert (section.clip_low, section.clip_high) == (3e-4, 0.3)
    same = learner(here, text + 'objective = "gspo"\n')
    assert (same.clip_low, same.clip_high, same.loss_aggregation) == (0.1, 0.1, "sequence_mean")
    assert learner(here, '[learner]\nobjective = "gspo"\n', clip_low=0.3).clip_low == 0.3


def test_a_choice_that_is_replaced_takes_its_recipe_along(here: Path) -> None:
    """An objective over another: nothing of the first one's is left."""
    lower = '[learner]\nobjective = "ppo_decoupled"\n'
    assert learner(here, lower).correction == "mask"
    replaced = learner(here, lower, objective="grpo")
    assert replaced == LearnerSection(objective="grpo")
    assert learner(here, lower, correction="none").correction_high == LearnerSection().correction_high


def test_an_objective_has_the_last_word_on_the_correction_that_it_implies(here: Path) -> None:
    """Another correction has bounds of its own."""
    implied = learner(here, '[learner]\nobjective = "ppo_decoupled"\n')
    assert (implied.correction, implied.correction_low, implied.correction_high) == ("mask", 0.0, 5.0)
    text = '[learner]\nobjective = "ppo_decoupled"\ncorrection = '
    assert learner(here, text + '"mask"\n') == implied
    assert learner(here, text + '"reject_geometric"\n').correction_low == 0.99
    over = learner(here, PROXIMAL + 'correction = "truncate"\n', objective="ppo_decoupled")
    assert (over.correction, over.correction_high) == ("mask", 5.0)


def test_the_bounds_of_an_implied_correction_come_along(here: Path) -> None:
    """A recipe's correction brings that correction's recipe."""
    section = learner(here, objective="reinforce")
    assert (section.ratio_reference, section.correction, section.correction_high) == ("batch_start", "truncate", 2.0)


def test_what_a_recipe_gives_in_vain_is_given_up_without_a_word(here: Path) -> None:
    """What a person gives in vain is an error, and names who gave it."""
    assert learner(here, '[learner]\nobjective = "reinforce"\nratio_reference = "sampler"\n').correction == "none"
    with pytest.raises(ProfileError, match=r"^x.toml: learner.clip_low has no effect: it belongs to grpo, "):
        learner(here, '[learner]\nobjective = "reinforce"\nclip_low = 0.1\n')
    with pytest.raises(ProfileError, match=r"^command line: learner.correction would count"):
        learner(here, '[learner]\nobjective = "grpo"\n', correction="mask")


def test_what_depends_on_a_setting_that_falls_back_falls_back_with_it(here: Path) -> None:
    """One flag may take the effect of a whole chain: objective, anchor, correction, bounds."""
    text = PROXIMAL + 'correction = "mask"\ncorrection_high = 4.0\nupdate_epochs = 2\nproximal = "interpolate"\n'
    section = learner(here, text, objective="dppo_tv")
    assert (section.ratio_reference, section.correction, section.proximal) == ("sampler", "none", "recompute")
    assert section.correction_high == LearnerSection().correction_high
    evaluated = load_profile("local-m3", {"steps": 6}).eval
    assert (evaluated.interval, evaluated.problems_between) == (0, 0)
    with pytest.raises(ProfileError, match=r"^command line: eval.interval is too large"):
        load_profile("local-m3", {"steps": 6, "eval.interval": 6})
    with pytest.raises(ProfileError, match=r"^x.toml: eval.interval is too large"):
        load_profile(written(here, "steps = 6\n" + MINIMAL + "[eval]\ninterval = 6\nproblems_between = 3\n"))


@pytest.mark.parametrize("objective", [*sorted(OBJECTIVES), "my.module:objective"])
@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_objective_works_on_top_of_every_shipped_profile(path: Path, objective: str, here: Path) -> None:
    """And what comes of it states every key and returns from TOML unchanged: recipes do not apply twice."""
    profile = load_profile(path.stem, {"learner.objective": objective})
    text = resolved_toml(profile)
    assert load_profile(written(here, text)) == profile
    stated = {line.partition(" = ")[0] for line in text.splitlines() if " = " in line}
    optional = {key.name for key in settable().values() if key.optional}
    assert {key.name for key in settable().values() if key.item != "tables"} - optional <= stated


def test_an_unusable_choice_is_an_ordinary_mistake(here: Path) -> None:
    """No traceback from looking for a recipe."""
    with pytest.raises(ProfileError, match=r"learner.objective must be text of the form name or module:function, not"):
        learner(here, "[learner]\nobjective = [3]\n")
    with pytest.raises(ProfileError, match=r"learner.correction must be one of none, truncate, "):
        learner(here, '[learner]\ncorrection = "tis"\n')
