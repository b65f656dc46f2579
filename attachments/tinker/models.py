"""The models of clients: adapters over the base model of the server, with a learner for each.

They share the arrays of the base model. Each has modules, parameters and an optimizer of its own, so that what one
computes is a function of its own requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from attachments.tinker.bodies import AdamFields, Answer, LoraFields
from attachments.tinker.losses import IMPORTANCE_SAMPLING, CheckedData, loss_of
from attachments.tinker.sections import TinkerApi
from attachments.tinker.store import ModelWeights, SavedCheckpoint, TinkerStore
from clotho.learner import groups_of
from clotho.models.experts import configuration_of, experts_per_token
from clotho.models.loading import DTYPES, computing_dtype
from clotho.models.lora import linear_modules, module_ranks
from clotho.models.machine import free_buffers
from clotho.models.parameters import flat
from clotho.models.policy import BaseModel, Policy
from clotho.sampler import BaseAccess
from clotho.serving.errors import ApiError, invalid_field
from clotho.settings.learner import AdamW, ConstantSchedule, LearnerSection
from clotho.settings.model import Lora, PolicySection
from clotho.storage.adapters import read_adapter
from clotho.storage.tensors import read_tensors
from clotho.training.stepwise import StepwiseLearner
from protocols.sampling import Sampling
from training_run.adapters.contents import adapter_targets
from training_run.adapters.reading import FLOAT32_BYTES
from training_run.memory.activations import SOFT_CAPPED, activation_bytes, attention_heads, block_bytes, logits_bytes
from training_run.memory.estimate import calls_attention
from training_run.memory.micro_batch import BlockPass, MicroBatchShape

FEED_FORWARD = ("mlp", "feed_forward", "ffn", "moe", "experts", "switch_mlp", "block_sparse_moe", "shared_expert")
"""Parts of the names of layers that are no mixers of tokens, in the models of mlx-lm."""

COPIES = 6
"""Arrays of the size of an adapter that training holds: weights, two moments, the gradient that is held, one that is
being computed, and the weights before a step."""


def lora_method(base: BaseModel, fields: LoraFields) -> Lora:
    """Return the adapter that a client asks for. Raises ApiError if no layer would have one."""
    names = linear_modules(base.model.layers)
    wanted = [
        name
        for name in module_ranks(base.model.layers, Lora(rank=fields.rank))
        if (fields.train_mlp if _is_feed_forward(name) else fields.train_attn)
    ]
    if not wanted:
        raise invalid_field("lora_config", "trains nothing: set train_attn or train_mlp")
    targets = () if len(wanted) == len(names) else tuple(wanted)
    return Lora(rank=fields.rank, target_modules=targets)


def _is_feed_forward(name: str) -> bool:
    return any(part in FEED_FORWARD for part in name.split("."))


def training_bytes(base: BaseModel, method: Lora) -> int:
    """Return the memory that an adapter in training holds."""
    ranks = module_ranks(base.model.layers, method, experts_per_token=experts_per_token(configuration_of(base.model)))
    size = 0
    for name, target in adapter_targets(base.model).items():
        rank = next((rank for module, rank in ranks.items() if name.endswith(f".{module}")), 0)
        size += rank * max(1, target.experts) * (target.inputs + target.outputs)
    return COPIES * FLOAT32_BYTES * size


def pass_bytes(base: BaseModel, tokens: int, longest: int) -> int:
    """Return the memory of a forward and backward pass of so many padded tokens, in rows of the longest length.

    Estimate of `training_run.memory.activations`, as if every layer were trained; without scans of recurrent layers.
    """
    model, rows = base.model, max(1, tokens // longest)
    shape = BlockPass(rows=rows, queries=longest, keys=longest)
    micro = MicroBatchShape(passes=(shape,), scored=rows * longest, several=False)
    itemsize = DTYPES.get(computing_dtype(model), mx.float32).size
    divides = calls_attention(model.layers)
    experts = experts_per_token(configuration_of(model))
    blocks = [block_bytes(block, full=True, itemsize=itemsize, experts=experts) for block in model.layers]
    logits = logits_bytes(micro, base.vocab_size)
    return logits + activation_bytes(
        blocks,
        [0] * len(blocks),
        micro,
        residual=0,
        scores=[attention_heads(base.config) * itemsize * (1 if divides else SOFT_CAPPED)] * len(blocks),
        logits=logits,
        checkpointed=False,
        divides=divides,
    )


class TrainedModel:
    """One adapter in training. All methods but the constructor belong to the learner's thread.

    bytes: estimate of the memory. steps: of the optimizer so far, as of the last finished request.
    """

    def __init__(self, model_id: str, lora: LoraFields, access: BaseAccess, settings: TinkerApi) -> None:
        """Raises ApiError if no layer would have an adapter."""
        self.model_id, self.lora = model_id, lora
        self._access, self._micro_batch_tokens = access, settings.micro_batch_tokens
        self._method = lora_method(access.base, lora)
        self.bytes, self.steps = training_bytes(access.base, self._method), 0
        self._trained: tuple[Policy, StepwiseLearner] | None = None

    def build(self) -> None:
        """Make the adapter and its learner. Raises ModelError."""
        base = self._access.base
        policy = Policy(
            base.copy_model().model,
            base.tokenizer,
            PolicySection(method=self._method),
            config=base.config,
            seed=self.lora.seed or 0,
            keep_reference=False,
            base_path=str(base.files or ""),
            files=base.files,
        )
        section = LearnerSection(
            objective=IMPORTANCE_SAMPLING,
            optimizer=AdamW(learning_rate=1e-4, beta2=0.95, epsilon=1e-12),
            schedule=ConstantSchedule(warmup_steps=0),
            micro_batch_tokens=self._micro_batch_tokens,
            max_grad_norm=0.0,
            layout="padded",
        )
        sampling, lane = Sampling(max_tokens=base.context_length), self._access.compute.learner.lane
        self._trained = policy, StepwiseLearner(policy, section, sampling, steps=0, seed=0, lane=lane)

    def _built(self) -> tuple[Policy, StepwiseLearner]:
        """Return the adapter and its learner. Raises ApiError if the model was released."""
        if self._trained is None:
            raise ApiError(410, f"The model {self.model_id} was unloaded.", code="unloaded")
        return self._trained

    def release(self) -> None:
        """Free the memory."""
        self._trained = None
        free_buffers()

    def forward(self, batch: CheckedData) -> Answer:
        """Return log-probabilities and the loss, without a gradient."""
        logprobs = self._built()[1].logprobs(groups_of(batch.data))
        return _result(batch, logprobs, {"loss:sum": loss_of(batch, logprobs)})

    def forward_backward(self, batch: CheckedData) -> Answer:
        """Add a gradient to the one that the next step takes."""
        found = self._built()[1].forward_backward(groups_of(batch.data), batch.loss)
        means = {f"{name}:mean": found.metrics[name] for name in ("clip_fraction", "ratio_mean") if found.metrics}
        return _result(batch, found.logprobs, {"loss:sum": found.loss, "tokens:sum": float(found.tokens), **means})

    def optim_step(self, adam: AdamFields) -> dict[str, float]:
        """Take a step of AdamW, also along a gradient of zeros, and return its metrics.

        Nothing changes without a gradient that is finite.
        """
        update = self._built()[1].optim_step(
            learning_rate=adam.learning_rate,
            optimizer=AdamW(
                learning_rate=max(adam.learning_rate, 1e-30),
                beta1=adam.beta1,
                beta2=adam.beta2,
                epsilon=adam.eps,
                weight_decay=adam.weight_decay,
            ),
            max_grad_norm=max(0.0, adam.grad_clip_norm),
            steps_at_zero=True,
        )
        self.steps = update.version
        return {
            "grad_norm:max": update.metrics.grad_norm,
            "update_applied:min": float(update.applied),
            "gradient_is_finite:min": float(update.finite),
            "version:max": float(update.version),
        }

    def weights(self) -> ModelWeights:
        """Return the newest weights."""
        policy, learner = self._built()
        parameters, config = policy.loadable(learner.parameters)
        return ModelWeights(
            parameters=parameters, config=config, fingerprint=learner.fingerprint, version=learner.version
        )

    def save(self, store: TinkerStore, checkpoint: SavedCheckpoint) -> None:
        """Write a checkpoint: of training with all that the learner needs, of a sampler the weights only."""
        now = self.weights()
        state = self._built()[1].whole_state() if checkpoint.kind == "weights" else None
        store.write(replace(checkpoint, step=now.version), now, state)

    def load(self, place: Path, *, optimizer: bool) -> None:
        """Continue from a checkpoint. optimizer: with its optimizer, bit by bit; without it, from its weights only.

        Raises CheckpointError, and changes nothing, if it does not fit this model.
        """
        policy, learner = self._built()
        if optimizer:
            learner.restore_whole(read_tensors(place / "state.safetensors"))
        else:
            _, config = policy.loadable(learner.parameters)
            parameters = flat(read_adapter(place, learner.parameters, config))
            learner.begin()
            named = {f"parameters.{name}": array for name, array in parameters.items()}
            learner.restore_whole(learner.whole_state() | named)
        self.steps = learner.version


def _result(batch: CheckedData, logprobs: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> Answer:
    rows = []
    for datum, row in zip(batch.data, logprobs, strict=True):
        logp_N = np.asarray(row, dtype=np.float32)
        outputs = {"logprobs": logp_N}
        if batch.loss == "cross_entropy":
            outputs["elementwise_loss"] = -np.asarray(datum.advantages, dtype=np.float32) * logp_N
        rows.append({k: {"data": v, "dtype": "float32", "shape": [len(v)]} for k, v in outputs.items()})
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": rows, "metrics": metrics}
