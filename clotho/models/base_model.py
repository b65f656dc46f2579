"""A base model that is served without training."""

from __future__ import annotations

from functools import cached_property

import mlx.nn as nn

from clotho.backend import backend
from clotho.models.fingerprints import model_fingerprint
from clotho.models.folded_lora import FoldedAdapter
from clotho.models.loading import context_length, describe_model, load_base
from clotho.models.lora import AdaptedModule
from clotho.models.model_files import one_line
from clotho.models.parameters import Parameters
from clotho.models.policy_model import PolicyModel
from clotho.models.tokenizer import ChatTokenizer
from clotho.settings.model import ModelSection
from protocols.errors import ClothoError, ModelError


class BaseModel:
    """A base model as the decode engine samples from it: nothing is trained, so the version is always 0.

    files: directory or GGUF file of model and tokenizer.
    """

    version, step, keeps_base = 0, 0, True
    adapted: tuple[AdaptedModule, ...] = ()

    def __init__(self, section: ModelSection) -> None:
        """Load model and tokenizer, in a compute thread. Raises ModelError."""
        model, config, files = load_base(section)
        self.tokenizer = ChatTokenizer.of_model(files, section)
        try:
            model.freeze()
            model.eval()
            backend().install_layers(model)
            self.description = describe_model(model, config)
        except ClothoError:
            raise
        except Exception as error:  # shapes and settings of a foreign model can fail anywhere in its code
            raise ModelError(
                f"model {section.path} cannot be used: {type(error).__name__}: {one_line(error)}"
            ) from error
        self.model: nn.Module = model
        self._template = PolicyModel(
            model,
            vocab_size=self.description.vocab_size,
            adapted=(),
            initial={},
            in_full=(),
            grad_checkpoint=False,
            folded=FoldedAdapter(model),
        ).copy()
        self.files = files
        self.vocab_size = self.description.vocab_size
        self.context_length = context_length(config)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of its files."""
        return model_fingerprint(self.files)

    def served(self) -> tuple[Parameters, int]:
        """Return an empty tree, because nothing is trained, and the version."""
        return {}, self.version

    def copy_model(self) -> PolicyModel:
        """Return a model of its own over the same arrays. Any thread may call this."""
        return self._template.copy()
