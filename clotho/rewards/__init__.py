"""Reward functions: plain Python, one idea per module.

A reward function judges one completion of one problem:

    def reward(problem: Problem, completion: str) -> float | None

or the same as `async def`. `completion` is the decoded text the policy wrote, `problem` the line of the dataset it
answers. The result is a finite number (True and False count as 1.0 and 0.0), or None where the function does not apply
to this problem: that part is then left out of the weighted sum. A completion to which no part applies cannot be
rewarded, and its group is discarded with the reason `reward_error`; so it is when a function raises, exceeds its time
limit, or returns something else.

In a profile a function is named by its entry in `registry.BUILT_IN`, or as `module:function`, found on the Python path
with the current directory at its end. It is called outside of the pipeline's event loop: a synchronous function in a
worker thread, where calls for several groups may overlap; an asynchronous one in an event loop of its own that lasts as
long as the run, so that it may keep a client open, with all completions of a group at once.

Nothing in Python can stop a thread inside a C call. A function that may hang there, above all in a catastrophic regular
expression, which keeps every other thread waiting too, should do that work in a process of its own.
"""
