"""`python -m bench QUESTION [options]`; without a question, the list of them."""

from __future__ import annotations

import sys
from importlib import import_module

from bench.contenders.process import MissingContendersError

QUESTIONS = {
    "learning": "Does the default run learn, how fast, and for every seed? Synchronous against asynchronous.",
    "objectives": "What does each objective, with its recommended settings, make of the default task?",
    "head": "What does the head cost where the vocabulary is large: in pieces, or straightforward?",
    "collapse": "Do the alarms notice a destructive learning rate in time, and does going back save the run?",
    "environments": "Do real Atropos environments train the policy: one turn, several, and two of different weight?",
    "decode": "How fast are rollouts: tokens/s against batch, group and prompt length, beside mlx-lm and mlx-lm-lora?",
    "first_token": "How long until the first token of a rollout, against the length of its prompt?",
    "update": "What does one policy update cost: tokens/s and peak memory against length and vocabulary, "
    "beside mlx-lm-lora and TRL?",
    "http": "How many tokens/s over HTTP, and how soon the first, under 1 to 64 clients, beside mlx_lm.server?",
    "swap": "How long does a weight swap hold up decoding?",
    "overlap": "How fast does decoding go on while the learner works?",
    "actors_overhead": "What does one message cost: mailbox and actor?",
    "startup": "How long from the command to the first answer?",
    "wall_clock": "How long to 0.9 held-out accuracy, synchronous and asynchronous, beside mlx-lm-lora and TRL?",
    "search": "With which settings is the default task learned soonest, by mlx-lm-lora's GRPO or by us?",
    "scaling": "What happens as model and batch grow?",
    "quick": "Has anything slipped by an order of magnitude? Ours only, in seconds; status 1 if so.",
    "compare": "Is anything worse in one set of results than in another? Also: --compare BEFORE AFTER.",
    "figures": "Draw the figures of the documentation, and write its numbers, from the results.",
    "screenshot": "Capture what a user sees while the default run trains.",
}

OPTIONAL = ("matplotlib", "pyte")
"""What only the drawings need."""


def main() -> int:
    """Run one question's program; 2 if there is no such question, or if something is not installed."""
    asked = sys.argv[1] if len(sys.argv) > 1 else "--help"
    chosen = "compare" if asked == "--compare" else asked
    if chosen not in QUESTIONS:
        for name, question in QUESTIONS.items():
            sys.stdout.write(f"{name:17}{question}\n")
        return 0 if asked in ("-h", "--help") else 2
    try:
        status: int = import_module(f"bench.{chosen}").main(sys.argv[2:])
    except ModuleNotFoundError as missing:
        if missing.name not in OPTIONAL:
            raise
        sys.stderr.write(f"bench: {missing.name} is not installed: pip install -e '.[bench]'\n")
        return 2
    except MissingContendersError as missing_contenders:
        sys.stderr.write(f"bench: {missing_contenders}\n")
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
