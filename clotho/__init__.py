"""Load a language model, sample from it, train it, publish what it learned, and serve it, all with the same arrays.

    policy = clotho.load("mlx-community/Qwen3-0.6B-bf16")
    learner = clotho.Learner(policy)
    with clotho.Sampler(policy) as sampler:
        (completions,) = sampler.sample([policy.chat("What is 2 + 3?")], n=8)
        learner.forward_backward([...])
        learner.optim_step()
        sampler.publish(learner)

`docs/library.md` is the manual. The names below are the whole library; what is not among them may change at any time.
A name imports its module when it is first used, so that `import clotho` takes milliseconds and loads no MLX.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from clotho.imports import prepare_imports

if TYPE_CHECKING:
    from clotho.data.problems import problems
    from clotho.learner import Datum, Learner
    from clotho.library import load
    from clotho.models.policy import Policy
    from clotho.rewards.weighted_sum import Rewards
    from clotho.sampler import Sampler
    from clotho.server import Server, serve
    from clotho.settings.learner import AdamW
    from clotho.settings.model import Dora as DoRA
    from clotho.settings.model import FullMethod as Full
    from clotho.settings.model import Lora as LoRA
    from clotho.settings.objectives import Grpo as GRPO  # noqa: N814
    from clotho.training.stepwise import Gradient, LossInputs
    from clotho.training.update import Update
    from protocols.errors import ClothoError
    from protocols.prompt import Problem
    from protocols.sampling import Completion, CompletionDone, Sampling, TokenSampled

__version__ = "0.2.0"

__all__ = [
    "GRPO", "AdamW", "ClothoError", "Completion", "CompletionDone", "Datum", "DoRA", "Full", "Gradient", "Learner",
    "LoRA", "LossInputs", "Policy", "Problem", "Rewards", "Sampler", "Sampling", "Server", "TokenSampled", "Update",
    "__version__", "load", "problems", "serve",
]  # fmt: skip

_PLACES = {
    "AdamW": "clotho.settings.learner",
    "ClothoError": "protocols.errors",
    "Completion": "protocols.sampling",
    "CompletionDone": "protocols.sampling",
    "Datum": "clotho.learner",
    "DoRA": "clotho.settings.model:Dora",
    "Full": "clotho.settings.model:FullMethod",
    "GRPO": "clotho.settings.objectives:Grpo",
    "Gradient": "clotho.training.stepwise",
    "Learner": "clotho.learner",
    "LoRA": "clotho.settings.model:Lora",
    "LossInputs": "clotho.training.stepwise",
    "Policy": "clotho.models.policy",
    "Problem": "protocols.prompt",
    "Rewards": "clotho.rewards.weighted_sum",
    "Sampler": "clotho.sampler",
    "Sampling": "protocols.sampling",
    "Server": "clotho.server",
    "TokenSampled": "protocols.sampling",
    "Update": "clotho.training.update",
    "load": "clotho.library",
    "problems": "clotho.data.problems",
    "serve": "clotho.server",
}
"""Module of each public name; after the colon, its name there if it is another one."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, original = _PLACES[name].partition(":")
    value = globals()[name] = getattr(import_module(module), original or name)
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__


def _require_own_messages() -> None:
    """Raise ImportError if a module of the working directory, or of the path before this one, hides `protocols`."""
    spec = find_spec("protocols")
    found = str(spec.origin or spec.name) if spec else "none"
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.realpath(found) != os.path.realpath(os.path.join(here, "protocols", "__init__.py")):
        raise ImportError(
            f"clotho needs its own package `protocols` ({here}), but Python finds {found}: rename that one, "
            "or start Python in another directory"
        )


_require_own_messages()
prepare_imports()
