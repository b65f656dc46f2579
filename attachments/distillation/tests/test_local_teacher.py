"""A teacher in the process: what it says about completions, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from attachments.distillation.local_teacher import LocalTeacher, encoder, load_teacher
from attachments.distillation.teacher import TeacherError, require_equal_tokens
from attachments.distillation.tests.teachers import EMBEDDED, other_model
from clotho.lanes.compute_thread import Compute
from clotho.models.tokenizer import ChatTokenizer
from protocols.errors import ModelError, ProfileError
from protocols.prompt import Problem

pytestmark = pytest.mark.needs_float32
PROMPT, COMPLETIONS = (5, 9, 33), [(40, 41, 42, 43), (44,), (45, 46)]


@pytest.fixture
def compute() -> Iterator[Compute]:
    """Compute threads."""
    made = Compute(decode_share=0.5, slots=2)
    made.start()
    yield made
    made.stop()


async def load(path: Path, compute: Compute, *, top: int = 0, micro_batch_tokens: int = 64) -> LocalTeacher:
    """Load a teacher."""
    return await load_teacher(str(path), compute, top=top, micro_batch_tokens=micro_batch_tokens, turn_seconds=0.25)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("micro_batch_tokens", [4, 64])
async def test_the_scores_are_those_of_mlx_lm(
    top: int, micro_batch_tokens: int, compute: Compute, tmp_path: Path
) -> None:
    """Of each token, and of the best tokens of each position, for completions of any length in one group."""
    path = other_model(tmp_path / "teacher")
    found = await (await load(path, compute, top=top, micro_batch_tokens=micro_batch_tokens)).score(PROMPT, COMPLETIONS)
    model, _ = mlx_lm.load(str(path))  # type: ignore[misc]
    for tokens, scores in zip(COMPLETIONS, found, strict=True):
        z_T_V = np.array(model(mx.array([[*PROMPT, *tokens]]))[0], dtype=np.float64)[len(PROMPT) - 1 : -1]
        logp_T_V = z_T_V - np.log(np.exp(z_T_V).sum(axis=-1, keepdims=True))
        assert scores.logprobs == pytest.approx(logp_T_V[np.arange(len(tokens)), list(tokens)], abs=1e-5)
        best = np.argsort(-logp_T_V, axis=-1)[:, :top].tolist() if top else []
        assert [[token for token, _ in position] for position in scores.best] == best


async def test_what_a_teacher_cannot_score_is_an_error(compute: Compute) -> None:
    """Sequences beyond its context, and tokens that it does not have."""
    teacher = await load(EMBEDDED, compute)
    with pytest.raises(TeacherError, match="context"):
        await teacher.score((1,) * 2000, [(1,)])
    with pytest.raises(TeacherError, match="vocabulary"):
        await teacher.score((1,), [(10_000,)])


def test_another_tokenizer_is_refused() -> None:
    """By the first text that it encodes otherwise; a model without files is refused by its path."""
    own = ChatTokenizer.from_files(EMBEDDED)
    problems = [Problem(prompt="What is 2 + 3?")]
    require_equal_tokens(own, problems, encoder(str(EMBEDDED)), "teacher")
    with pytest.raises(ProfileError, match="another tokenizer"):
        require_equal_tokens(own, problems, lambda texts: [own.encode(text.lower())[1:] for text in texts], "teacher")
    with pytest.raises(ModelError):
        encoder(str(EMBEDDED / "nowhere"))
