"""What verifiers adds to the library: its tasks as problems."""

from __future__ import annotations

from collections.abc import Mapping

from attachments.verifiers.sections import VERIFIERS
from clotho.extension import Extension, Generator


class VerifiersTasks(Extension):
    """The tasks of a taskset."""

    def generators(self) -> Mapping[str, Generator]:
        """Return what lists the tasks of a taskset."""
        found = Generator(
            open="attachments.verifiers.tasks:opened",
            weights="attachments.verifiers.tasks:epoch_weights",
            rewards=({"name": "environment", "correct": True},),
        )
        return {VERIFIERS: found}


EXTENSION = VerifiersTasks()
"""The tasks of a taskset."""
