"""Tinker's API belongs to the command `serve`."""

from __future__ import annotations

from training_run.profile.rules import Rule

CONTRADICTIONS = (
    Rule(
        "server.tinker.type",
        lambda v, x: x != "off",
        '= "{}" belongs to the command serve: a training run trains its own policy',
    ),
)
