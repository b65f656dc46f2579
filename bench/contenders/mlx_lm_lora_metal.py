"""mlx-lm-lora's policy update on the models of `metal`, with checkpointed blocks."""

from __future__ import annotations

import os

from bench.contenders.metal_model import metal_configuration, packed_model
from bench.contenders.mlx_lm_lora_update import CHECKPOINTED, trainable, updates
from bench.contenders.semantics import SEMANTICS
from bench.contenders.worker import Case, MeasureOnce, Metrics, serve


def prepare(case: Case) -> MeasureOnce:
    """Two updates of the same rollouts; the second one is measured, as Clotho's."""
    os.environ[CHECKPOINTED] = "1"
    config = metal_configuration(case["model"])
    update = updates(trainable(packed_model(config)), case | {"vocabulary": config["vocab_size"]})

    def once() -> Metrics:
        update()
        return {"seconds": update()["seconds"]}

    return once


if __name__ == "__main__":
    serve(prepare, semantics=SEMANTICS["mlx_lm_lora_metal"], packages=["mlx", "mlx-lm", "mlx-lm-lora"])
