"""Reward functions: one function per module, a registry, and the runner that applies the functions of a profile.

A reward function scores one completion of one problem:

    def reward(problem: Problem, completion: str) -> float | None

or the same signature as `async def`, or an object with such a `__call__`.

Arguments:
    problem: `problem.prompt`, `problem.answer` (the reference answer) and `problem.type`: strings from the dataset.
    completion: the decoded completion, without the prompt and without a matched stop string.

Return value:
    A finite real number. `True` and `False` count as 1.0 and 0.0. `None` means that the function does not apply to the
    problem; the weighted sum then skips the function.

Errors:
    A function that raises, exceeds `timeout_seconds`, or returns anything else discards the group with the reason
    `reward_error`. So does a completion to which no function applies. The run continues.

Names in a profile (`[[rewards]] name`):
    `format`, `math_eval`, ...: a key of `registry.BUILT_IN`.
    `module:function`: a module on the Python path; the current directory is searched last.
    `path/to/file.py:function`: a Python file.

Threads: reward functions run outside the event loop of the pipeline. Synchronous functions run in worker threads, and
calls for several groups may overlap. Asynchronous functions share one event loop that exists for the whole run, so that
a function may keep a client open; all completions of a group are awaited concurrently.

Python cannot interrupt a thread inside a C call. A function that may hang there (for example, in a regular expression
with catastrophic backtracking, which also holds the GIL) should run that work in a separate process.
"""
