"""The names by which requests reach the model of `serve`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clotho.models.policy import BaseModel
from training_run.commands.serve import served_base
from training_run.profile.command_profiles import load_serving
from training_run.supervision.latest import Latest

EMBEDDED = Path(__file__).parents[3] / "profiles" / "embedded"


@pytest.mark.parametrize(
    ("flags", "is_policy"),
    [
        ([], True),
        (["--adapter", "mine=runs/local-m3/adapters"], True),
        (["--adapter", "policy=runs/local-m3/adapters"], False),
        (["--adapter", "policy=a", "--server.model-name", "policy"], True),
    ],
    ids=["no adapter", "another adapter", "an adapter", "the name of the model"],
)
def test_the_name_policy_belongs_to_an_adapter_that_has_it(flags: list[str], *, is_policy: bool) -> None:
    """The closing screen of a run prints such a command. A name that the model has by a flag is not given away."""
    arguments = load_serving(["--model", str(EMBEDDED), *flags])
    base = cast(BaseModel, SimpleNamespace(files=EMBEDDED))
    weights: Latest[Any] = Latest("weights")
    served = served_base(arguments, base, weights)
    assert ("policy" in {served.id, *served.aliases}) is is_policy
    assert served.id == ("policy" if "--server.model-name" in flags else served.root)
