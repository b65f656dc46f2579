"""A parity check of a decoder with a model of its own, as `ParityChecker` makes it."""

from __future__ import annotations

from clotho.inference.engine import DecodeEngine
from clotho.models.parameters import Parameters
from clotho.models.policy import TrainablePolicy
from clotho.models.turns import UNDIVIDED, TurnBudget
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.engine import EngineSection
from training_run.forced_decoder import ForcedDecoder
from training_run.parity_check import ParityModels, ParityReport, ParitySample, TeacherForcedDecoder


def checked(
    policy: TrainablePolicy,
    served: TeacherForcedDecoder | DecodeEngine,
    sample: ParitySample,
    temperature: float = 1.0,
    *,
    rows: int,
    layout: str,
    parameters: Parameters | None = None,
    turns: TurnBudget = UNDIVIDED,
) -> ParityReport:
    """Compare `served` with a copy of the policy's model. parameters: of the learner; None: the served ones."""
    model = policy.copy_model()
    decoder = ForcedDecoder.of_model(model.model, EngineSection())
    forcing = TeacherForcing(model.model, model.vocab_size, layout=layout)
    served = ForcedDecoder.of_engine(served) if isinstance(served, DecodeEngine) else served
    parameters = policy.trainable() if parameters is None else parameters
    compared = ParityModels(served, model, decoder, forcing, turns)
    return compared.check(sample, parameters, temperature=temperature, rows=rows)
