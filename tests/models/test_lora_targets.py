"""Names and ranks of a profile, resolved against the model's linear layers."""

from __future__ import annotations

from typing import Any

import pytest

from clotho.models.lora import linear_modules, module_ranks
from protocols.errors import ModelError
from tests.learner_settings import adapter_settings
from tests.saved_models import CONFIG, MIXTURE, build


def ranks(**section: Any) -> dict[str, int]:
    """Ranks by module for the tiny dense model."""
    return module_ranks(build(CONFIG).layers, adapter_settings(**section))


def test_linear_modules_are_named_relative_to_their_block() -> None:
    """Routers and experts among them."""
    assert {"mlp.switch_mlp.down_proj", "mlp.gate"} <= linear_modules(build(MIXTURE).layers).keys()


def test_a_short_name_stands_for_the_modules_that_end_in_it() -> None:
    """PEFT's `q_proj` is mlx-lm's `self_attn.q_proj`; in `ranks` as in `target_modules`."""
    targets = ("q_proj", "mlp.up_proj")
    assert ranks(target_modules=targets) == {"mlp.up_proj": 8, "self_attn.q_proj": 8}
    assert ranks(target_modules=targets, ranks=("up_proj=3",)) == {"mlp.up_proj": 3, "self_attn.q_proj": 8}


@pytest.mark.parametrize("misspelt", ["self_atn.q_proj", "qproj"])
def test_an_unknown_name_names_the_nearest(misspelt: str) -> None:
    """A misspelt module is an error, never an adapter that trains less than asked."""
    with pytest.raises(ModelError, match=r"policy\.method\.target_modules: .*did you mean self_attn\.q_proj"):
        ranks(target_modules=(misspelt,))
    with pytest.raises(ModelError, match=r"policy\.method\.ranks: .*did you mean self_attn\.q_proj"):
        ranks(ranks=(f"{misspelt}=4",))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (("k_proj=33",), r"k_proj=33 exceeds the smaller side of self_attn\.k_proj, which is 32"),
        (
            ("q_proj=4", "self_attn.q_proj=6"),
            r"self_attn\.q_proj=6 sets the rank of self_attn\.q_proj twice, first to 4",
        ),
        (("up_proj=4",), r"up_proj=4 has no effect: policy\.method\.target_modules does not include up_proj"),
    ],
    ids=["too large", "twice", "left out"],
)
def test_a_rank_that_cannot_be_meant_is_refused(entries: tuple[str, ...], reason: str) -> None:
    """In one line that names policy.method.ranks."""
    with pytest.raises(ModelError, match=rf"^policy\.method\.ranks: {reason}$"):
        ranks(target_modules=("q_proj", "k_proj"), ranks=entries)


def test_the_largest_rank_is_the_smaller_side() -> None:
    """64 in, 32 out."""
    assert ranks(ranks=("k_proj=32",))["self_attn.k_proj"] == 32
