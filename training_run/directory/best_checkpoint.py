"""The best checkpoint: that of the step with the highest held-out accuracy. It is never pruned, and a file names it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from clotho.storage.atomic_files import replace_file
from protocols.checkpoint import BestCheckpoint
from protocols.errors import RunDirectoryError, disk_errors_as
from protocols.evaluation import EvalReport
from training_run.directory.checkpoints import checkpoint_steps, prune

INITIAL = 0
"""Step of the checkpoint with the initial weights, which is never pruned."""


class BestCheckpointKeeper:
    """Finds the best checkpoint of a run among the steps that have an evaluation and a checkpoint.

    Of several evaluations of a step the last counts; of equal accuracies the earliest step wins. A checkpoint whose
    evaluation is not finished stays until then: an evaluation runs beside the training, and can end after the
    checkpoint would have been pruned.
    """

    def __init__(
        self,
        *,
        checkpoints: Path,
        marker: Path,
        reports: Callable[[], Sequence[EvalReport]],
        is_evaluated: Callable[[int], bool],
        named: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """marker: the file that names the best checkpoint. reports: the evaluations of the run, oldest first.

        is_evaluated: whether an evaluation of a step is planned. named: steps of checkpoints that a command on the
        user's screen starts from, which stay.
        """
        self._checkpoints, self._marker = checkpoints, marker
        self._reports, self._is_evaluated, self._named = reports, is_evaluated, named

    def update(self) -> BestCheckpoint | None:
        """Return the best checkpoint, None if there is none, and write the marker if it changed; from any thread.

        Raises RunDirectoryError if the disk refuses.
        """
        best = self._best()
        text = b"" if best is None else msgspec.json.format(msgspec.json.encode(best), indent=2) + b"\n"
        with disk_errors_as(RunDirectoryError, f"{self._marker} cannot be written"):
            if best is None:
                self._marker.unlink(missing_ok=True)
            elif not self._marker.is_file() or self._marker.read_bytes() != text:
                replace_file(self._marker, [text])
        return best

    def kept(self) -> frozenset[int]:
        """Return the steps of checkpoints that must not be pruned, after an update of the marker."""
        best = self.update()
        evaluated = max((report.step for report in self._reports()), default=-1)
        pending = [
            step for step in checkpoint_steps(self._checkpoints) if step > evaluated and self._is_evaluated(step)
        ]
        return frozenset([INITIAL, *pending, *self._named(), *([best.step] if best else [])])

    def finish(self, keep_last: int) -> BestCheckpoint | None:
        """Update the marker after the last evaluation, and prune the checkpoints that had waited for theirs.

        Raises RunDirectoryError if the disk refuses.
        """
        best = self.update()
        kept = self.kept()
        if len([step for step in checkpoint_steps(self._checkpoints) if step not in kept]) > keep_last:
            with disk_errors_as(RunDirectoryError, f"{self._checkpoints} cannot be pruned"):
                prune(self._checkpoints, keep_last, kept=kept)
        return best

    def _best(self) -> BestCheckpoint | None:
        existing = set(checkpoint_steps(self._checkpoints))
        by_step = {
            report.step: BestCheckpoint(step=report.step, accuracy=report.accuracy, problems=report.problems)
            for report in self._reports()
            if report.accuracy is not None and report.step in existing
        }
        return max(by_step.values(), key=lambda best: (best.accuracy, -best.step), default=None)


def read_best(marker: Path) -> BestCheckpoint | None:
    """Read the marker of a run directory; None if there is none, or if it is not valid."""
    try:
        return msgspec.json.decode(marker.read_bytes(), type=BestCheckpoint)
    except (OSError, ValueError, RecursionError):
        return None
