"""The program: the installed command `clotho`, which is also `python -m clotho` and `python pipeline.py`."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

from clotho.run.process_signals import process_signals

EXIT_SECONDS = 5.0
"""How long the end of a run waits for a terminal or a pipe that does not accept the last lines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and return the exit status.

    argv: the arguments. None is for the process of the program: its arguments are used, and its signals and its
    standard output and standard error are taken over.
    """
    if argv is not None:
        return _run(argv)[0]
    process_signals.install()
    from clotho.monitoring.output import Output

    output = Output()
    process_signals.before_exit(lambda: output.drain(EXIT_SECONDS))
    status, is_training = _run(sys.argv[1:])
    output.drain(EXIT_SECONDS if is_training else None)  # a pager reads help texts when its user wants to
    if not is_training and status == 0 and (problem := output.stdout.problem) and problem.errno != errno.EPIPE:
        sys.stderr.write(f"clotho: standard output cannot be written: {problem.strerror}\n")
        output.stderr.drain(EXIT_SECONDS)
        return 1
    return status


def _run(argv: Sequence[str]) -> tuple[int, bool]:
    """Return the exit status, and whether a run was started."""
    is_training = False
    try:
        from clotho.run.cli import PreparedRun, prepare

        prepared = prepare(argv)
        if not isinstance(prepared, PreparedRun):
            return prepared, False
        is_training = True
        from pipeline import train

        return prepared.start(train), True
    except KeyboardInterrupt:
        return 130, is_training
    except BaseException as error:
        from clotho.monitoring.failure_report import report

        return report(error), is_training


if __name__ == "__main__":
    sys.exit(main())
