"""GRPO with two tasks: rollouts run ahead of the updates, and new weights arrive between two tokens.

python examples/async_grpo.py        # chat with the policy on port 8000 while it learns
"""

import asyncio
import sys
from pathlib import Path
from statistics import mean

import clotho

STEPS, PORT = (int(one) for one in [*sys.argv[1:], "60", "8000"][:2])
PROBLEMS, GROUP, AHEAD = 16, 8, 2
EMBEDDED = Path(__file__).parents[1] / "profiles" / "embedded"

train = clotho.problems(f"{EMBEDDED}/train.jsonl")
reward = clotho.Rewards(format=0.2, math_eval=1.0, choice_correctness=1.0, jaccard=1.0)
explore = clotho.Sampling(max_tokens=96)
policy = clotho.load(str(EMBEDDED), method=clotho.LoRA(rank=16, scale=2.0))
learner = clotho.Learner(policy, objective="dapo", sampling=explore, learning_rate=1e-3)

Batch = list[tuple[tuple[int, ...], list[clotho.Completion], list[float]]]


async def roll(sampler: clotho.Sampler, batches: asyncio.Queue[Batch]) -> None:
    """Sample and reward batch after batch. A completion that spans an update has tokens of two versions."""
    for step in range(STEPS):
        problems = [train[(step * PROBLEMS + i) % len(train)] for i in range(PROBLEMS)]
        prompts = [policy.chat(problem) for problem in problems]
        groups = await sampler.sample_async(prompts, explore, n=GROUP, seed=step)
        rewards = [[reward(p, one.text) for one in group] for p, group in zip(problems, groups, strict=True)]
        await batches.put(list(zip(prompts, groups, rewards, strict=True)))  # waits while AHEAD batches are unread


async def main() -> None:
    """Learn from each batch; the clipped ratio of learner to sampler corrects for the age of its tokens."""
    batches: asyncio.Queue[Batch] = asyncio.Queue(maxsize=AHEAD)
    with clotho.Sampler(policy) as sampler, clotho.serve(sampler, port=PORT):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(roll(sampler, batches))
            for step in range(STEPS):
                batch = await batches.get()
                update = await learner.update_async(batch)
                await sampler.publish_async(learner)
                oldest = min(version for _, group, _ in batch for one in group for version in one.versions)
                seen = mean(one for _, _, rewards in batch for one in rewards)
                print(f"step {step + 1:3}  reward {seen:.2f}  age {step - oldest}  ess {update.metrics.ess:.3f}")


asyncio.run(main())
