"""Learner: gradients and optimizer steps in a thread of its own, from the newest weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from clotho.lanes.compute_thread import finish
from clotho.library import DEFAULT, compute, result_of, settings
from clotho.models.machine import restore_random_state
from clotho.models.parameters import Parameters
from clotho.models.policy import Policy
from clotho.settings.learner import ConstantSchedule, LearnerSection, Optimizer
from clotho.settings.objectives import Objective
from clotho.storage.adapters import write_adapter
from clotho.storage.atomic_files import make_directory, replaced_from_directory
from clotho.storage.tensors import read_tensors, write_tensors
from clotho.training.stepwise import NOTHING, Gradient, Loss, StepwiseLearner
from clotho.training.update import Update
from protocols.errors import ProfileError
from protocols.prompt import Problem, Prompt
from protocols.rollout import RolloutGroup, ScoredGroup
from protocols.sampling import Completion, Sampling

T = TypeVar("T")

Scored = tuple[Sequence[int], Sequence[Completion], Sequence[float]]
"""The prompt of a group, its completions, and the reward of each."""

UNKNOWN = Problem(prompt="")


class Datum(Struct, frozen=True):
    """One sequence to learn from.

    prompt: token ids. completion: a `Completion` of a sampler, or token ids, whose sampler is then unknown. advantage:
    one number for all tokens, or one for each; positive makes the completion more probable. Raises ValueError for an
    empty prompt or completion, and for advantages of another number than the tokens.
    """

    prompt: Sequence[int]
    completion: Completion | Sequence[int]
    advantage: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        """Check the lengths."""
        texts: tuple[object, ...] = (self.prompt, self.completion)
        if any(isinstance(one, str) for one in texts):
            raise TypeError("a datum has token ids: policy.chat(text), policy.tokenizer.encode(text)")
        if not len(self.prompt) or not len(self.tokens):
            raise ValueError("a datum has a prompt and a completion of at least one token each")
        if len(self.advantages) != len(self.tokens):
            raise ValueError(f"{len(self.advantages)} advantages for {len(self.tokens)} tokens of a completion")

    @property
    def tokens(self) -> Sequence[int]:
        """The token ids of the completion."""
        return self.completion.tokens if isinstance(self.completion, Completion) else self.completion

    @property
    def advantages(self) -> tuple[float, ...]:
        """The advantage of each token."""
        if isinstance(self.advantage, Sequence):
            return tuple(float(one) for one in self.advantage)
        return (float(self.advantage),) * len(self.tokens)


class Newest(NamedTuple):
    """The newest weights of a learner."""

    parameters: Parameters
    version: int
    fingerprint: str


class Learner:
    """The newest weights of a policy, the state of the optimizer, and the loss.

    All calls compute in a thread of their own, one after the other; any thread and event loop may make them. Each has
    an `_async` form that awaits the same result. A policy may have several learners; they know nothing of one another.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        objective: Objective | str | Mapping[str, Any] = "grpo",
        optimizer: Optimizer | str | Mapping[str, Any] = "adamw",
        learning_rate: float | None = None,
        sampling: Sampling = DEFAULT,
        steps: int | None = None,
        seed: int = 0,
        **others: Any,
    ) -> None:
        """Begin with the weights of `load`, as version 0.

        objective, optimizer: a name or a table as in `[learner.objective]` and `[learner.optimizer]`, or a struct such
        as `GRPO(clip_high=0.28)`. learning_rate: the highest, in place of the optimizer's; without both, 1e-4 for an
        adapter and 1e-6 for all weights. sampling: how completions are sampled, because the learner evaluates the same
        distribution (temperature, logit bias); `max_tokens` matters for the loss aggregation `token_sum`. steps: length
        of a `schedule` that decays; the default schedule is constant after five updates. seed: of dropout, and of the
        assignment of groups to minibatches. others: further keys of `[learner]`, such as kl_penalty,
        micro_batch_tokens, max_grad_norm, update_epochs, schedule.
        Raises ProfileError for a setting that is not valid, or a sampling that the learner cannot evaluate.
        """
        values = {"objective": objective, "optimizer": optimizer} | others
        section = settings("learner", LearnerSection, values, {"learner.optimizer.learning_rate": learning_rate})
        section = section.with_rate(in_full=not policy.adapted)
        if steps is None and not isinstance(section.schedule, ConstantSchedule):
            raise ProfileError("Learner: a schedule that decays needs steps, the number of updates until its end")
        self.policy, self._thread = policy, compute().learner

        def make() -> StepwiseLearner:
            restore_random_state((0, seed))
            return StepwiseLearner(policy, section, sampling, steps=steps or 0, seed=seed, lane=self._thread.lane)

        self._learner = result_of(self._thread.submit(make))
        self.newest = self._newest()

    @property
    def version(self) -> int:
        """Number of updates that changed the weights."""
        return self.newest.version

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a digest of the newest weights; equal weights have equal fingerprints."""
        return self.newest.fingerprint

    def forward_backward(self, data: Sequence[Datum], loss: Loss = "objective") -> Gradient:
        """Compute loss and gradient of the data, and add the gradient to the one that is held.

        Gradients of several calls add up until `optim_step`; each call is a mean over its data, as the objective's
        `loss_aggregation` says, whatever its number of micro-batches. loss: "objective", with the KL penalty and the
        entropy bonus of the learner; "cross_entropy", minus advantage times log-probability; or a function
        `(logp_B_T, inputs) -> (loss, metrics)`, see `LossInputs`, which is called once with all data, in the learner's
        thread, and costs one more forward pass. No data: a gradient of 0 tokens, and nothing is held.
        Raises ValueError if the objective gets a completion whose sampler is unknown.
        """
        return result_of(self._forward_backward(data, loss))

    async def forward_backward_async(self, data: Sequence[Datum], loss: Loss = "objective") -> Gradient:
        """Await what `forward_backward` returns."""
        return await finish(self._forward_backward(data, loss))

    def _forward_backward(self, data: Sequence[Datum], loss: Loss) -> Future[Gradient]:
        if loss == "objective" and not all(isinstance(one.completion, Completion) for one in data):
            raise ValueError(
                'the loss "objective" compares with the probabilities at which tokens were sampled: give it the '
                'completions of Sampler.sample, or use "cross_entropy"'
            )
        if isinstance(loss, str) and loss not in ("objective", "cross_entropy"):
            raise ValueError(f'loss is "objective", "cross_entropy" or a function, not {loss!r}')
        groups = groups_of(data)
        return self._submit(lambda: self._learner.forward_backward(groups, loss) if groups else NOTHING)

    def forward(self, data: Sequence[Datum]) -> list[tuple[float, ...]]:
        """Return the log-probabilities in nats of the tokens of each datum under the newest weights.

        At the learner's temperature; 0 at tokens that the policy did not sample, such as the answer of a tool.
        """
        return result_of(self._forward(data))

    async def forward_async(self, data: Sequence[Datum]) -> list[tuple[float, ...]]:
        """Await what `forward` returns."""
        return await finish(self._forward(data))

    def _forward(self, data: Sequence[Datum]) -> Future[list[tuple[float, ...]]]:
        groups = groups_of(data)
        return self._submit(lambda: list(self._learner.logprobs(groups)) if groups else [])

    def optim_step(self, *, learning_rate: float | None = None) -> Update:
        """Take one optimizer step along the gradient that is held.

        All or nothing: the result's `applied` says whether the weights changed, as version and fingerprint. They do
        not if no gradient is held, if it is exactly zero, or if it is not finite (`finite` is False then); in each case
        nothing is held afterwards. `metrics` has the names of metrics.jsonl. learning_rate: of this step, instead of
        the schedule's.
        """
        return result_of(self._submit(lambda: self._learner.optim_step(learning_rate=learning_rate)))

    async def optim_step_async(self, *, learning_rate: float | None = None) -> Update:
        """Await what `optim_step` returns."""
        return await finish(self._submit(lambda: self._learner.optim_step(learning_rate=learning_rate)))

    def update(self, groups: Iterable[Scored | ScoredGroup], *, step: int | None = None) -> Update:
        """Make one whole update from groups with rewards: advantages, penalties, minibatches, epochs, steps.

        groups: (prompt, completions, rewards) of each prompt, so that `zip(prompts, completions, rewards)` is enough. A
        group of equal rewards has no advantage, and counts in the mean over tokens. step: which rate of the schedule is
        used; by default the number of updates so far. No groups: nothing changes. Raises ValueError if a group has not
        one reward for each completion.
        """
        return result_of(self._update(groups, step))

    async def update_async(self, groups: Iterable[Scored | ScoredGroup], *, step: int | None = None) -> Update:
        """Await what `update` returns."""
        return await finish(self._update(groups, step))

    def _update(self, groups: Iterable[Scored | ScoredGroup], step: int | None) -> Future[Update]:
        try:
            scored = [one if isinstance(one, ScoredGroup) else _scored(i, *one) for i, one in enumerate(groups)]
        except TypeError as error:
            raise TypeError(f"groups are (prompt, completions, rewards) of each prompt: {error}") from error
        return self._submit(lambda: self._learner.update(scored, step=step) if scored else self._learner.optim_step())

    def save(self, path: str | Path) -> Path:
        """Write the newest weights as an adapter of mlx-lm, and return its directory.

        `mlx_lm.load(model, adapter_path=path)` loads it, and so does `clotho serve --adapter`. With `Full()`, the
        directory has all weights. Raises RunDirectoryError if it cannot be written.
        """
        directory = Path(path).expanduser()
        parameters, config = result_of(self._submit(lambda: self.policy.loadable(self._learner.parameters)))
        write_adapter(directory, parameters, config)
        return directory

    def save_state(self, path: str | Path) -> Path:
        """Write all that training needs to continue bit by bit: weights, optimizer, coefficients, reference, version.

        path: of a `.safetensors` file, which is replaced as a whole or not at all. A gradient that is held is not part
        of it. Raises OSError if it cannot be written.
        """
        file = Path(path).expanduser()
        if file.suffix != ".safetensors":
            raise ValueError(f"{file}: the file of a state ends in .safetensors")
        arrays = result_of(self._submit(self._learner.whole_state))
        make_directory(file.parent)
        with replaced_from_directory(file) as unfinished:
            write_tensors(unfinished / file.name, arrays)
        return file

    def load_state(self, path: str | Path) -> None:
        """Continue from a state that a learner of the same policy and the same settings saved.

        Raises CheckpointError, and changes nothing, if the file is damaged or does not fit.
        """
        file = Path(path).expanduser()
        result_of(self._submit(lambda: self._learner.restore_whole(read_tensors(file))))

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Compute in the learner's thread, and note the newest weights afterwards."""

        def noted() -> T:
            found = work()
            self.newest = self._newest()
            return found

        return self._thread.submit(noted)

    def _newest(self) -> Newest:
        learner = self._learner
        return Newest(learner.parameters, learner.version, learner.fingerprint)


def _scored(
    number: int, prompt: Sequence[int], completions: Sequence[Completion], rewards: Sequence[float]
) -> ScoredGroup:
    group = RolloutGroup(
        prompt=Prompt(group_id=number, problem=UNKNOWN, tokens=tuple(prompt), seed=0), completions=tuple(completions)
    )
    return ScoredGroup(group=group, rewards=tuple(map(float, rewards)), parts={})


def groups_of(data: Sequence[Datum]) -> list[ScoredGroup]:
    """Return data as groups with advantages per token, in their order: neighbours with one prompt are a group."""
    groups = []
    for number, (prompt, members) in enumerate(groupby(data, key=lambda one: tuple(one.prompt))):
        rows = list(members)
        group = _scored(number, prompt, [_completion(one) for one in rows], [0.0] * len(rows))
        groups.append(replace(group, token_advantages=tuple(one.advantages for one in rows)))
    return groups


def _completion(datum: Datum) -> Completion:
    if isinstance(datum.completion, Completion):
        return datum.completion
    zeros = (0.0,) * len(datum.tokens)
    return Completion(
        tokens=tuple(datum.tokens), logprobs=zeros, versions=(0,) * len(zeros), text="", finish_reason="stop"
    )
