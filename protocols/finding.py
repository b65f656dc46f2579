"""Findings: the results of checks at the start of a run and during the run."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Finding(Struct, frozen=True, kw_only=True):
    """A problem that a check found.

    name: identifier of the kind of problem, in snake_case. severity: an error lets the run fail or learn nothing; a
    warning costs time or quality. fact: what was observed. consequence: what it leads to. advice: what to do, with the
    command or the profile key. example: a completion or an exception, if one shows the problem.
    """

    name: str
    severity: Literal["error", "warning"]
    fact: str
    consequence: str
    advice: str
    example: str = ""

    @property
    def text(self) -> str:
        """Fact, consequence and advice on one line."""
        return f"{self.fact}; {self.consequence}; {self.advice}"
