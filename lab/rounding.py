"""How far bfloat16 logprobs are from float32 ones, with the output layer in either.

    python -m lab.rounding      (a minute, for docs/models.md)

SmolLM2 and a model of its shape with random weights score the same 16 conversations of 120 tokens,
sampled by SmolLM2 in float32. `gap` is the mean absolute difference per token, in nats.
"""

import copy

import torch
from transformers import AutoModelForCausalLM, set_seed

from minragen.models import load_policy, token_logprobs
from minragen.run import bundled

ROWS, LENGTH = 16, 120


def gaps(model, tokens):
    """{whether logits are float32: the gap to the same weights and states' dtype in float32}."""
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    rounded = copy.deepcopy(model).bfloat16()
    exact, _ = token_logprobs(copy.deepcopy(rounded).float(), tokens, mask)
    found = {}
    for rounded.float32_logits in (False, True):
        logprobs, _ = token_logprobs(rounded, tokens, mask)
        found[rounded.float32_logits] = float((logprobs - exact)[mask].abs().mean())
    return found


@torch.no_grad()
def main():
    set_seed(0)
    policy = load_policy(bundled.resolve("smollm2", None))
    start = policy.tokenizer("The", return_tensors="pt").input_ids.expand(ROWS, -1)
    tokens = policy.model.generate(start, do_sample=True, min_new_tokens=LENGTH,
                                   max_new_tokens=LENGTH)
    random = AutoModelForCausalLM.from_config(policy.model.config, dtype=torch.float32)
    print("weights   output layer   gap")
    for name, model in (("SmolLM2", policy.model), ("random", random)):
        for float32, gap in gaps(model.eval(), tokens).items():
            print(f"{name:9} {'float32' if float32 else 'bfloat16':14} {gap:.4f}")


if __name__ == "__main__":
    main()
