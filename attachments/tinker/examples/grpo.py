"""GRPO on the Tinker SDK, against a server of this machine. The policy that ships with Clotho learns arithmetic.

clotho serve --model profiles/embedded --server.tinker on
pip install tinker && python attachments/tinker/examples/grpo.py http://127.0.0.1:8000
"""

import sys
import time
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import tinker
from tinker import types

import clotho

URL, STEPS, HELD_OUT = sys.argv[1], *map(int, [*sys.argv[2:], "60", "256"][:2])
PROBLEMS, GROUP, RATE, EMBEDDED = 16, 8, 1e-3, Path(__file__).parents[3] / "profiles" / "embedded"
train, held_out = (clotho.problems(f"{EMBEDDED}/{name}.jsonl") for name in ("train", "heldout"))
reward = clotho.Rewards(format=0.2, math_eval=1.0, choice_correctness=1.0, jaccard=1.0)
service = tinker.ServiceClient(base_url=URL, api_key="tml-local")
base = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(base_model=base, rank=16, seed=0)
tokenizer, started = training.get_tokenizer(), time.monotonic()


def sample(problems: list[Any], temperature: float, n: int) -> Any:
    """Yield each problem with its prompt, its sequences and their texts, sampled at once from the newest weights."""
    sampler: Any = training.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler  # SDK 0.34 returns it at once
    chats = [one.messages or [{"role": "user", "content": one.prompt}] for one in problems]
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    params = types.SamplingParams(max_tokens=96, temperature=temperature)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), n, params) for prompt in prompts]
    for problem, prompt, future in zip(problems, prompts, futures, strict=True):
        group = future.result().sequences
        yield problem, prompt, group, [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in group]


def datum(prompt: list[int], sequence: Any, advantage: float) -> types.Datum:
    """One sequence: every token predicts the next one, and the prompt has no advantage."""
    tokens, zeros = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    advantages = [*zeros, *[advantage] * len(sequence.tokens)]
    inputs: Any = {"target_tokens": tokens[1:], "logprobs": [*zeros, *sequence.logprobs], "advantages": advantages}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


for step in range(STEPS + 1):
    if step % 10 == 0 or step == STEPS:
        right = mean(reward.correct(one, texts[0]) for one, _, _, texts in sample(held_out[:HELD_OUT], 0.0, 1))
        print(f"step {step}: {right:.2f}  {time.monotonic() - started:.0f} s", flush=True)
    data, batch = [], [train[(step * PROBLEMS + i) % len(train)] for i in range(PROBLEMS if step < STEPS else 0)]
    for problem, prompt, group, texts in sample(batch, 1.0, GROUP):
        rewards = [reward(problem, text) for text in texts]
        scored = [(one, r - mean(rewards)) for one, r in zip(group, rewards, strict=True)]
        data += [datum(prompt, one, gain / (pstdev(rewards) + 1e-4)) for one, gain in scored if gain]  # 0: no gradient
    if data:
        training.forward_backward(data, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28})
        training.optim_step(types.AdamParams(learning_rate=RATE * (1 - step / STEPS), beta2=0.99, eps=1e-8))
