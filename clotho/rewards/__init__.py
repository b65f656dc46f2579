"""Reward functions: one function per module, a registry, and their weighted sum.

A reward function scores one completion of one problem:

    def reward(problem: Problem, completion: str) -> float | None

A function with a parameter `completions`, `prompts` or `completion_ids` scores all completions of a group in one call,
with the signature of reward functions of TRL:

    def reward(completions: list[str], prompts: list[str], **columns: list[Any]) -> list[float | None]

Both may be `async def`, or an object with such a `__call__`.

Arguments:
    problem: `problem.prompt`, `problem.answer` (the reference answer) and `problem.type`: strings from the dataset.
        `problem.extra`: all columns, by name. `problem.messages`: the conversation, if the problem is one.
    completion: the decoded completion, without the prompt and without a matched stop string.
    completions, prompts, completion_ids, trainer_state, and a list per column: see `values`.

Return value:
    A real number of at most 1e6 in absolute size. `True` and `False` count as 1.0 and 0.0. `None` means that the
    function does not apply to the problem; the weighted sum then skips the function.

Errors:
    A function that raises, exceeds a limit, ends its process, or returns anything else discards the group with the
    reason `reward_error`. So does a completion to which no function applies. The run continues.

Names in a profile (`[[rewards]] name`):
    `format`, `math_eval`, ...: a key of `registry.built_in`.
    `module:function`: a module on the Python path; the current directory is searched last.
    `path/to/file.py:function`: a Python file.

Processes: a function of the user runs in worker processes of its own, each of which answers one call at
a time. A call scores all completions of one group. A synchronous function runs in the main thread of its process. The
event loop of an asynchronous function exists as long as its process, so that the function may keep a client open; all
completions of a group are awaited concurrently.

Threads: most built-in functions, and functions with `run_in = "thread"`, run in threads of the run. Calls for
several groups may overlap. Python cannot interrupt a thread inside a C call, and a call that holds the GIL stops the
run.
"""
