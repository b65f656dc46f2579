"""`sft`: equal demonstrations for all contenders, and an update that learns their answers."""

from __future__ import annotations

import pytest

from bench import sft
from bench.contenders import clotho_sft
from bench.contenders.clotho_update import learner_of
from bench.contenders.demonstrations import demonstrations
from clotho.settings.objectives import Sft


def test_contenders_learn_the_answers_of_the_same_demonstrations() -> None:
    """One sequence per demonstration. Prompts are context; every token of an answer is learned, and no other."""
    batch = demonstrations(sft.SMALL)
    made = clotho_sft.groups(batch)
    assert [list(one.group.prompt.tokens) for one in made] == batch.prompts
    assert [list(one.group.completions[0].tokens) for one in made] == batch.answers
    assert demonstrations(sft.SMALL) == batch
    update = learner_of(sft.SMALL, Sft()).update(made)
    assert (update.applied, update.metrics.trained_tokens) == (True, batch.tokens)


def test_a_step_can_be_measured_repeatedly() -> None:
    """Processor time counts every thread, and is another number than that of the clock."""
    once = clotho_sft.prepare(sft.SMALL)
    for found in (once(), once()):
        assert found["tokens_per_second"] * found["seconds"] == pytest.approx(demonstrations(sft.SMALL).tokens)
        assert found["peak_bytes"] > 0
        assert found["tokens_per_processor_second"] > 0


def test_lengths_vary_around_the_mean_of_the_case() -> None:
    """From half of it to one and a half."""
    batch = demonstrations({**sft.SMALL, "batch": 64})
    for found, mean in ((batch.prompts, 8), (batch.answers, 16)):
        lengths = {len(one) for one in found}
        assert mean // 2 <= min(lengths) < mean < max(lengths) <= mean + mean // 2
