"""The installed command `clotho`, which is also `python -m clotho` and `python pipeline.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clotho.run.cli import PreparedRun, prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit status."""
    prepared = prepare(sys.argv[1:] if argv is None else argv)
    if not isinstance(prepared, PreparedRun):
        return prepared
    from pipeline import train

    return prepared.start(train)


if __name__ == "__main__":
    sys.exit(main())
