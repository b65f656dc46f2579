"""GRPO on the Tinker SDK, against a server of this machine. The policy that ships with Clotho learns arithmetic.

clotho serve --model profiles/embedded --server.tinker on
pip install tinker && python attachments/tinker/examples/grpo.py http://127.0.0.1:8000
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import tinker
from tinker import types

import clotho

URL, (STEPS, HELD_OUT) = sys.argv[1], map(int, [*sys.argv[2:], "60", "256"][:2])
PROBLEMS, GROUP, RATE = 16, 8, 1e-3
EMBEDDED = Path(__file__).parents[3] / "profiles" / "embedded"

train = clotho.problems(f"{EMBEDDED}/train.jsonl")
held_out = clotho.problems(f"{EMBEDDED}/heldout.jsonl")[:HELD_OUT]
reward = clotho.Rewards(format=0.2, math_eval=1.0, choice_correctness=1.0, jaccard=1.0)
explore, greedy = (types.SamplingParams(max_tokens=96, temperature=t) for t in (1.0, 0.0))

service = tinker.ServiceClient(base_url=URL, api_key="tml-local")
base = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(base_model=base, rank=16, seed=0)
tokenizer = training.get_tokenizer()


def sample(sampler: Any, problems: Sequence[Any], params: Any, n: int) -> list[tuple[list[int], Any]]:
    """Return prompt and sequences of each problem; all requests are under way at once."""
    chats = [problem.messages or [{"role": "user", "content": problem.prompt}] for problem in problems]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), n, params) for prompt in prompts]
    return [(prompt, future.result().sequences) for prompt, future in zip(prompts, futures, strict=True)]


def text(sequence: Any) -> str:
    """Return what was sampled."""
    return str(tokenizer.decode(sequence.tokens, skip_special_tokens=True))


def accuracy(sampler: Any) -> float:
    """Return the fraction of the held-out problems that are answered correctly, greedily."""
    found = zip(held_out, sample(sampler, held_out, greedy, 1), strict=True)
    return mean(reward.correct(problem, text(sequence)) for problem, (_, (sequence,)) in found)


def datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """One sequence: every token predicts the next one, and the prompt has no advantage."""
    tokens, zeros = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    inputs = {"target_tokens": tokens[1:], "logprobs": [*zeros, *sequence.logprobs]}
    inputs["advantages"] = [*zeros, *[advantage] * len(sequence.tokens)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


started, sampler = time.monotonic(), training.save_weights_and_get_sampling_client().result()
print(f"before: {accuracy(sampler):.2f}")
for step in range(STEPS):
    batch = [train[(step * PROBLEMS + i) % len(train)] for i in range(PROBLEMS)]
    data, seen = [], []
    for problem, (prompt, group) in zip(batch, sample(sampler, batch, explore, GROUP), strict=True):
        rewards = [reward(problem, text(sequence)) for sequence in group]
        centre, spread = mean(rewards), pstdev(rewards)
        seen.append(centre)
        if spread > 0:
            data += [datum(prompt, s, (r - centre) / (spread + 1e-4)) for s, r in zip(group, rewards, strict=True)]
    if data:  # equal rewards have no gradient
        training.forward_backward(data, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28})
        training.optim_step(types.AdamParams(learning_rate=RATE * (1 - step / STEPS), beta2=0.99, eps=1e-8))
        sampler = training.save_weights_and_get_sampling_client().result()
    print(f"step {step + 1:3}  reward {mean(seen):.2f}  {time.monotonic() - started:.0f} s")
print(f"after: {accuracy(sampler):.2f}  {time.monotonic() - started:.0f} s")
