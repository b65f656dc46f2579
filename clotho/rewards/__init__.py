"""Reward functions: one function per module, a registry, and their weighted sum.

A reward function scores one completion of one problem:

    def reward(problem: Problem, completion: str) -> float | None

A function with a parameter `completions`, `prompts` or `completion_ids` scores all completions of a group in one call,
with the signature of reward functions of TRL:

    def reward(completions: list[str], prompts: list[str], **columns: list[Any]) -> list[float | None]

Both may be `async def`, or an object with such a `__call__`. completion: decoded, without the prompt and without a
matched stop string. The result is a real number of at most 1e6 in absolute size, or None if the function does not apply
to the problem; the weighted sum then skips it. Everything else, and a completion to which no function applies, is an
error. docs/rewards.md says where a run calls functions, and what it does with errors.
"""
