"""`python -m bench QUESTION [options]`; without a question, the list of them."""

from __future__ import annotations

import sys
from importlib import import_module

QUESTIONS = {
    "learning": "Does the default run learn, how fast, and for every seed? Synchronous against asynchronous.",
    "figures": "Draw the figures of the documentation, and write its numbers, from the results.",
    "screenshot": "Capture what a user sees while the default run trains.",
}


def main() -> int:
    """Run one question's program; 2 if there is no such question."""
    if len(sys.argv) < 2 or sys.argv[1] not in QUESTIONS:
        for name, question in QUESTIONS.items():
            sys.stdout.write(f"{name:12} {question}\n")
        return 2 if len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help") else 0
    status: int = import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])
    return status


if __name__ == "__main__":
    sys.exit(main())
