"""What the example in the prompt changes in the first turns of a model that has not been trained.

    .venv/bin/python -m lab.examples --model smollm2

For each environment, SIZE test instances, free_think and the preset's tokens a reply; the two
prompts differ by the example's line alone. Shares of the first replies:

    form      all parts of the response format are there
    valid     and the answer is an action
    own       valid, and the answer is not the example's
    success   the episode has already succeeded

The table is printed and stored in lab/results/examples.json; what is stored there is not measured
again.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from minragen.chat import ChatFrame
from minragen.config import preset
from minragen.envs import REGISTRY
from minragen.rollout import collect
from minragen.run.groups import env_groups
from minragen.run.start import load
from minragen.train import rules_of

SIZE = 128  # instances
TEMPERATURES = (1.0, 0.5)
COLUMNS = ("form", "valid", "own", "success")
STORED = Path(__file__).resolve().parent / "results" / "examples.json"


class FirstTurn(ChatFrame):
    """A ChatFrame whose conversations end after one turn."""

    def append_next_prompt(self, trajectory, rules):
        return False


def first_turns(policy, config, temperature):
    """{column: share of the first replies} of an environment."""
    groups = env_groups(config, "test", SIZE, 1)
    frame = FirstTurn(policy.tokenizer, config.response_format,
                      policy.model.generation_config.eos_token_id, config.max_new_tokens,
                      example=config.example)
    played = collect(policy, frame, groups, 0, rules_of(config).held_out(temperature))
    shown = groups.envs[0].example_parts()["answer"]
    share = {column: 0.0 for column in COLUMNS}
    for t in played:
        reply, valid = t.turns[0].reply, bool(t.metrics.get("valid"))
        found = (reply.valid, valid, valid and reply.answer != shown, t.success)
        for column, value in zip(COLUMNS, found):
            share[column] += value / len(played)
    return {column: round(value, 4) for column, value in share.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--env", nargs="+", default=[name.lower() for name in REGISTRY])
    args = parser.parse_args()
    stored = json.loads(STORED.read_text("utf-8")) if STORED.exists() else {}
    base = dataclasses.replace(preset("bandit", model=args.model), warmup_steps=0)
    policy, _ = load(base)
    name = Path(args.model).name
    for env in args.env:
        for temperature in TEMPERATURES:
            for example in (False, True):
                where = f"{name} {env} temperature {temperature} example {example}".lower()
                if where in stored:
                    continue
                config = dataclasses.replace(preset(env, "grpo", args.model, "free_think"),
                                             warmup_steps=0, example=example)
                share = first_turns(policy, config, temperature)
                print(where, *(f"{column} {value:.2f}" for column, value in share.items()),
                      flush=True)
                stored[where] = share | {"n": SIZE, "max_new_tokens": config.max_new_tokens}
                STORED.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
