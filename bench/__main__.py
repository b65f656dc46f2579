"""`python -m bench QUESTION [options]`; without a question, the list of them."""

from __future__ import annotations

import sys
from importlib import import_module

QUESTIONS = {
    "learning": "Does the default run learn, how fast, and for every seed? Synchronous against asynchronous.",
    "objectives": "What does each objective, with its recommended settings, make of the default task?",
    "head": "What does the head cost where the vocabulary is large: in pieces, or straightforward?",
    "collapse": "Do the alarms notice a destructive learning rate in time, and does going back save the run?",
    "environments": "Do real Atropos environments train the policy: one turn, several, and two of different weight?",
    "figures": "Draw the figures of the documentation, and write its numbers, from the results.",
    "screenshot": "Capture what a user sees while the default run trains.",
}

OPTIONAL = ("matplotlib", "pyte")
"""What only the drawings need."""


def main() -> int:
    """Run one question's program; 2 if there is no such question."""
    if len(sys.argv) < 2 or sys.argv[1] not in QUESTIONS:
        for name, question in QUESTIONS.items():
            sys.stdout.write(f"{name:13}{question}\n")
        return 2 if len(sys.argv) > 1 and sys.argv[1] not in ("-h", "--help") else 0
    try:
        status: int = import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            raise
        sys.stderr.write(f"bench: {missing.name} is not installed: pip install -e '.[bench]'\n")
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
