"""docs/numerics.md shows an objective that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from clotho.models.parameters import flat
from tests.training.policies_and_groups import BigramPolicy, learner, random_groups

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def test_the_objective_of_the_page_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would write and name it."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_objectives.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    name: Any = "my_objectives:squared"
    policy = BigramPolicy()
    update = learner(policy, objective=name).update(random_groups(5))
    assert update.applied
    before, after = flat(policy.trainable()), flat(update.parameters)
    assert not any(mx.array_equal(before[n], after[n]).item() for n in before)
