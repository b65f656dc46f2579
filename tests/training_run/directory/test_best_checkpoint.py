"""The best checkpoint by held-out accuracy is named by a file and never pruned."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocols.checkpoint import BestCheckpoint
from protocols.evaluation import EvalReport
from tests.training_run.directory.made_checkpoints import snapshot
from training_run.directory.best_checkpoint import BestCheckpointKeeper, read_best
from training_run.directory.checkpoints import checkpoint_steps, write_checkpoint


def report(step: int, accuracy: float, *, problems: int = 10) -> EvalReport:
    """Return an evaluation."""
    return EvalReport(
        step=step, version=step, problems=problems, accuracy=accuracy if problems else None,
        interval=(0.0, 1.0) if problems else None, by_type={}, completion_tokens=1, seconds=0.1, final=False,
    )  # fmt: skip


class Writer:
    """Writes checkpoints as the checkpointer does, with evaluations every two steps."""

    def __init__(self, directory: Path) -> None:
        self.reports: list[EvalReport] = []
        self.named_steps: set[int] = set()
        self.directory, self.marker = directory / "checkpoints", directory / "best.json"
        self.keeper = BestCheckpointKeeper(
            checkpoints=self.directory,
            marker=self.marker,
            reports=lambda: self.reports,
            is_evaluated=lambda step: step % 2 == 0,
            named=lambda: self.named_steps,
        )

    def write(self, step: int, *, keep_last: int = 1) -> list[int]:
        """Write a checkpoint, and return the steps of the checkpoints that are left."""
        write_checkpoint(self.directory, snapshot(step), keep_last=keep_last, kept=self.keeper.kept)
        return checkpoint_steps(self.directory)

    def named(self) -> int | None:
        """Return the step that the marker names."""
        best = read_best(self.marker)
        return best.step if best else None


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    """Return a writer for an empty run directory."""
    return Writer(tmp_path)


def test_the_best_checkpoint_is_never_pruned(writer: Writer) -> None:
    """It does not count towards `keep_last`. A better one takes its place; of equal ones the first stays."""
    for step, accuracy in ((2, 0.5), (4, 0.4), (6, 0.5), (8, 0.1)):
        writer.write(step)
        writer.reports.append(report(step, accuracy))
    assert writer.write(10) == [10, 2]
    assert read_best(writer.marker) == BestCheckpoint(step=2, accuracy=0.5, problems=10)
    writer.reports.append(report(10, 0.9))
    assert writer.write(11) == [11, 10]
    assert writer.named() == 10


def test_a_checkpoint_that_a_command_names_is_not_pruned(writer: Writer) -> None:
    """As long as the command applies."""
    for step in (1, 3):
        writer.write(step)
        writer.named_steps = {1}
    assert writer.write(5) == [5, 1]
    writer.named_steps = set()
    assert writer.write(7) == [7]


def test_the_initial_checkpoint_is_never_pruned(writer: Writer) -> None:
    """A run can start again from its initial weights, whatever their evaluation was."""
    writer.write(0)
    writer.reports += [report(0, 0.1), report(1, 0.2)]
    for step in (1, 3):
        writer.write(step)
    assert checkpoint_steps(writer.directory) == [3, 1, 0]


def test_a_checkpoint_waits_for_its_evaluation(writer: Writer) -> None:
    """Evaluations run beside the training. A later report shows that an evaluation was skipped."""
    writer.write(2)
    writer.write(4)
    assert writer.write(5) == [5, 4, 2]
    writer.reports.append(report(4, 0.25))
    assert writer.write(7) == [7, 4]


def test_the_last_evaluation_decides_at_the_end_of_the_run(writer: Writer) -> None:
    """Checkpoints that had waited are then pruned. A step without a checkpoint is not considered."""
    writer.write(2)
    writer.write(4)
    writer.write(6)
    writer.reports += [report(2, 0.1), report(3, 1.0), report(4, 0.3), report(6, 0.2)]
    best = writer.keeper.finish(1)
    assert best is not None
    assert (best.step, writer.named(), checkpoint_steps(writer.directory)) == (4, 4, [6, 4])


def test_the_marker_disappears_with_its_checkpoint(writer: Writer) -> None:
    """For example, after evaluations without a graded problem."""
    writer.write(2)
    writer.reports.append(report(2, 0.1))
    assert writer.keeper.update() is not None
    writer.reports[:] = [report(2, 0.0, problems=0)]
    assert writer.keeper.update() is None
    assert not writer.marker.exists()
    writer.marker.write_bytes(b"{]")
    assert read_best(writer.marker) is None
