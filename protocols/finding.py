"""Findings: the results of checks at the start of a run and during the run, each with the command that helps."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FindingName = Literal[
    "all_truncated", "always_rewarded", "answers_without_reward", "constant_reward_part", "cut_without_moving",
    "dataset_unparsable", "dataset_unusable", "disk_space_low", "display_awake", "end_token_mismatch", "entropy_drop",
    "entropy_rise", "experts_die", "far_from_reference", "few_problems", "format_without_content", "groups_lost",
    "kernel_panic", "kv_cache_full", "length_growth", "lora_scale_unusual", "low_effective_sample_size",
    "low_power_mode", "memory_occupied", "memory_pressure", "model_unusable", "no_reward", "no_reward_applies",
    "no_signal", "on_battery", "parity_differs", "port_in_use", "reward_collapse", "reward_drop", "rewards_fail",
    "routes_flip", "run_refused", "scorer_full", "slow", "slow_blas", "slow_quantized", "swap_growing", "swap_in_use",
    "template_drops_thinking", "template_opens_tag", "template_rewrites_history", "thermal_pressure", "too_easy",
    "too_hard", "too_little_memory", "tools_not_shown", "truncated", "truncation_growth", "update_not_finite",
    "update_too_large", "version_known_bad", "wired_limit_high",
]  # fmt: skip
"""Kinds of problems that checks find."""


class Change(Struct, frozen=True, kw_only=True):
    """A new value of a setting: `value`, as its flag takes it, or a number times `factor`.

    of: the setting whose present value is the number; empty: the setting itself.
    """

    key: str
    value: str = ""
    factor: float = 1.0
    of: str = ""


class Remedy(Struct, frozen=True, kw_only=True):
    """The command that corrects what a finding is about, or that follows when the user has corrected it.

    action: `start` a new run, `resume` this run, or `fork` it; `check` its settings and the machine with `doctor`.
    changes: alternatives, best first; the first one that the settings of the run accept is used. If they accept none,
    the action is a check. before_step: a fork starts from a checkpoint before this step; None: from the newest.
    from_step: step of the checkpoint that the command of a fork names.
    """

    action: Literal["start", "resume", "fork", "check"]
    changes: tuple[Change, ...] = ()
    before_step: int | None = None
    from_step: int | None = None


CHECK = Remedy(action="check")
"""The remedy of findings whose correction is outside of the program."""

LOWER_RATE = Remedy(action="fork", changes=(Change(key="learner.optimizer.learning_rate", factor=0.1),))
"""A tenth of the learning rate, from a checkpoint before the harm."""

LESS_MEMORY = Remedy(
    action="resume",
    changes=(
        Change(key="engine.max_num_seqs", factor=0.5),
        Change(key="learner.micro_batch_tokens", factor=0.5),
    ),
)
"""Half as many sequences at once, or half as many tokens per pass of the learner: both need less memory and heat."""


class Finding(Struct, frozen=True, kw_only=True):
    """A problem that a check found.

    severity: an error lets the run fail or learn nothing; a warning costs time or quality. fact: what was observed.
    consequence: what it leads to. advice: what to do, in words. remedy: what the command does. command: the complete
    command line of the remedy; empty until the run or the profile is known. example: a completion or an exception, if
    one shows the problem.
    """

    name: FindingName
    severity: Literal["error", "warning"] = "warning"
    fact: str
    consequence: str
    advice: str
    remedy: Remedy = CHECK
    command: str = ""
    example: str = ""

    @property
    def use(self) -> str:
        """The words before the command: what it is for."""
        return "then check" if self.remedy.action == "check" else "run"

    @property
    def text(self) -> str:
        """Fact, consequence, advice and command on one line."""
        command = f"; {self.use}: {self.command}" if self.command else ""
        return f"{self.fact}; {self.consequence}; {self.advice}{command}"
