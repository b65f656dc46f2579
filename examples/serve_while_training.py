"""Answer an OpenAI client while the policy learns: each answer names the version of the weights that sampled it.

python examples/serve_while_training.py
"""

import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import clotho

STEPS, PORT = (int(one) for one in [*sys.argv[1:], "10", "8000"][:2])
EMBEDDED = Path(__file__).parents[1] / "profiles" / "embedded"

problems = clotho.problems(f"{EMBEDDED}/train.jsonl")
reward = clotho.Rewards(format=0.2, math_eval=1.0, choice_correctness=1.0, jaccard=1.0)
explore = clotho.Sampling(max_tokens=96)
policy = clotho.load(str(EMBEDDED), method=clotho.LoRA(rank=16, scale=2.0))
learner = clotho.Learner(policy, objective="dapo", sampling=explore, learning_rate=1e-3)


def ask(url: str, question: str) -> str:
    """Ask as any client does: `openai.OpenAI(base_url=url + "/v1", api_key="-")` works as well."""
    body = {"model": "policy", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 96}
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
        return f"version {response.headers['x-clotho-weights-version']}: {answer.strip()}"


with clotho.Sampler(policy) as sampler, clotho.serve(sampler, port=PORT) as server:
    print(f"{server.url}/v1")
    for step in range(STEPS):
        batch = problems[16 * step : 16 * (step + 1)]
        prompts = [policy.chat(problem) for problem in batch]
        groups = sampler.sample(prompts, explore, n=8, seed=step)
        rewards = [[reward(p, one.text) for one in group] for p, group in zip(batch, groups, strict=True)]
        learner.update(zip(prompts, groups, rewards, strict=True))
        sampler.publish(learner)
        print(ask(server.url, "What is 53 + 5 - 7?"))
