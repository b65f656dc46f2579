"""GRPO from the ground: sample, reward, compare, step, publish. The policy that ships with Clotho learns arithmetic.

python examples/grpo.py        # about 0.53 of the held-out problems before, at least 0.90 after
"""

import sys
from pathlib import Path
from statistics import mean, pstdev

import clotho

STEPS, PROBLEMS, GROUP, RATE = int([*sys.argv[1:], "60"][0]), 16, 8, 1e-3
EMBEDDED = Path(__file__).parents[1] / "profiles" / "embedded"

train = clotho.problems(f"{EMBEDDED}/train.jsonl")
held_out = clotho.problems(f"{EMBEDDED}/heldout.jsonl")[:256]
reward = clotho.Rewards(format=0.2, math_eval=1.0, choice_correctness=1.0, jaccard=1.0)
explore = clotho.Sampling(max_tokens=96, temperature=1.0)  # the learner evaluates what was sampled at temperature 1
greedy = clotho.Sampling(max_tokens=96, temperature=0.0)

policy = clotho.load(str(EMBEDDED), method=clotho.LoRA(rank=16, scale=2.0))
learner = clotho.Learner(policy, objective=clotho.GRPO(clip_high=0.28), sampling=explore)


def accuracy(sampler: clotho.Sampler) -> float:
    """The fraction of the held-out problems that the served policy answers correctly, greedily."""
    answers = sampler.sample([policy.chat(problem) for problem in held_out], greedy)
    return mean(reward.correct(problem, answer.text) for problem, (answer,) in zip(held_out, answers, strict=True))


def advantages(rewards: list[float]) -> list[float]:
    """How much better than its group each completion is, in standard deviations of the group: this is GRPO."""
    centre, spread = mean(rewards), pstdev(rewards)
    return [(one - centre) / (spread + 1e-4) for one in rewards]


with clotho.Sampler(policy) as sampler:
    print(f"before: {accuracy(sampler):.2f}")
    for step in range(STEPS):
        batch = [train[(step * PROBLEMS + i) % len(train)] for i in range(PROBLEMS)]
        prompts = [policy.chat(problem) for problem in batch]
        groups = sampler.sample(prompts, explore, n=GROUP, seed=step)

        data, seen = [], []
        for problem, prompt, group in zip(batch, prompts, groups, strict=True):
            rewards = [reward(problem, completion.text) for completion in group]
            seen.append(mean(rewards))
            if max(rewards) > min(rewards):  # equal rewards have no gradient
                pairs = zip(group, advantages(rewards), strict=True)
                data += [clotho.Datum(prompt, completion, advantage) for completion, advantage in pairs]

        gradient = learner.forward_backward(data)
        learner.optim_step(learning_rate=RATE * (1 - step / STEPS))
        sampler.publish(learner)  # between two tokens; what is sampled from now on is the new policy
        print(f"step {step + 1:3}  reward {mean(seen):.2f}  loss {gradient.loss:+.4f}")
    print(f"after: {accuracy(sampler):.2f}")

print(learner.save("adapter"))  # opens in mlx_lm.load(model, adapter_path=...)
