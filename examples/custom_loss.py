"""A loss of one's own: DPO, which raises the log-probability of the better answer of each pair over the worse one.

python examples/custom_loss.py        # the margin between better and worse answers grows
"""

import sys
from pathlib import Path

import mlx.core as mx

import clotho

STEPS, PAIRS, BETA = int([*sys.argv[1:], "20"][0]), 32, 0.1
EMBEDDED = Path(__file__).parents[1] / "profiles" / "embedded"

problems = clotho.problems(f"{EMBEDDED}/train.jsonl")
reward = clotho.Rewards(math_eval=1.0, choice_correctness=1.0, jaccard=1.0)
explore = clotho.Sampling(max_tokens=96)
policy = clotho.load(str(EMBEDDED), method="lora")
learner = clotho.Learner(policy, optimizer="adamw", learning_rate=3e-4, sampling=explore)

data: list[clotho.Datum] = []  # better, worse, better, worse, ...
with clotho.Sampler(policy) as sampler:
    prompts = [policy.chat(problem) for problem in problems[: 4 * PAIRS]]
    for problem, prompt, group in zip(problems, prompts, sampler.sample(prompts, explore, n=4), strict=False):
        ranked = sorted(group, key=lambda completion: reward(problem, completion.text))
        if reward(problem, ranked[0].text) < reward(problem, ranked[-1].text):
            data += [clotho.Datum(prompt, ranked[-1]), clotho.Datum(prompt, ranked[0])]
data = data[: 2 * PAIRS]


def dpo(logp_B_T: mx.array, inputs: clotho.LossInputs) -> tuple[mx.array, dict[str, mx.array]]:
    """-log sigmoid(beta (r_better - r_worse)), r = log pi - log pi_ref, with the sampler as reference (2305.18290).

    All data are here at once, whatever the size of micro-batches, so that a loss may compare them.
    """
    ratio_B = (inputs.mask_B_T * (logp_B_T - inputs.sampler_logp_B_T)).sum(axis=1)
    margin_P = BETA * (ratio_B[0::2] - ratio_B[1::2])
    loss = mx.logaddexp(0.0, -margin_P).mean()
    return loss, {"margin": margin_P.mean(), "preferred": (margin_P > 0).mean()}


for step in range(STEPS):
    gradient = learner.forward_backward(data, dpo)
    learner.optim_step()
    numbers = "  ".join(f"{name} {value:.3f}" for name, value in gradient.metrics.items())
    print(f"step {step + 1:3}  loss {gradient.loss:.4f}  {numbers}")
