"""docs/atropos.md shows profiles that load, and names what exists."""

from __future__ import annotations

import re
from pathlib import Path

from clotho.config.layers import PROFILES
from clotho.config.load import load_profile

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "atropos.md").read_text(encoding="utf-8")


def test_the_profile_of_an_environment_of_ones_own_loads(tmp_path: Path) -> None:
    """As it is written."""
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.toml").write_text(block, encoding="utf-8")
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    (environment,) = load_profile(str(tmp_path / "mine.toml")).environments
    assert environment.name == "mine"
    assert environment.script == str(tmp_path / "mine.py")


def test_every_profile_and_script_of_the_page_ships() -> None:
    """By the first table."""
    named = set(re.findall(r"`(atropos[a-z-]*)`", PAGE))
    assert {name for name in named if not (PROFILES / f"{name}.toml").is_file()} == set()
    scripts = set(re.findall(r"`(?:profiles/environments/)?(\w+\.py)`", PAGE)) & {"arithmetic.py", "guessing_game.py"}
    assert len(scripts) == 2
    assert all((PROFILES / "environments" / name).is_file() for name in scripts)
