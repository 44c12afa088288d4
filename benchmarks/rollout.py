"""Rollout speed: `minragen.rollout.collect` against `model.generate`, side by side in one run.

Both sides play the same number of conversations with the same model, prompts, sampling and lengths:
every turn is exactly `new_tokens` sampled tokens followed by exactly `observation_tokens` given
ones. One side is what training runs, unchanged. The other is what a plain user of transformers
writes: every turn, the whole history goes through `generate` again.

Reading order: `FixedLengths` (an environment whose texts have a known number of tokens), `ours`,
`plain` (the two sides), `measure` (how they alternate), `main`.

Axes: B trajectories, T tokens, K turns.

What favours `generate`:
  1. its observations are token ids made beforehand, while `collect` resets and steps its
     environments, decodes and parses every reply, encodes every observation and records masks and
     logprobs;
  2. all its rows are equally long at all times, so it pads nothing. With replies of unequal lengths
     it would compute left padding, and the rows that have stopped, until the longest one ends;
  3. it has no end-of-turn token to look for.
What favours `collect`:
  1. the members of a group share their prompt, as in training. The row "no shared prompt" takes
     that away;
  2. on a CPU, the C allocator. `generate` joins every layer's cache to its new key in fresh memory
     at every token, `KVSlots` takes fresh memory once a turn. Where the allocator hands large
     blocks back to the kernel (glibc does), they are faulted in again page by page, and that is a
     good part of the difference: MALLOC_MMAP_THRESHOLD_=2000000000
     MALLOC_TRIM_THRESHOLD_=4000000000 in front of the command takes it away.
The row "generate, keeping its cache" is no plain user's: it hands the cache of one turn to the
next, which transformers allows here because no row is padded.

The model is untrained (a trained one would reply at its own length) and nothing that it may sample
ends a reply early on either side.

Run: `python -m benchmarks.rollout`; the last line printed is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
import transformers

from minragen.bundled import choose_model, resolve, tiny_policy
from minragen.chat import ChatFrame
from minragen.envs import Budget, EnvGroups, Outcome, TextEnv
from minragen.models import load_policy
from minragen.rollout import Rules, collect

SPEC = "benchmarks.rollout:FixedLengths"
FIRST_SEED = 0
CONTEXT_SLACK = 64  # tokens of context beyond the longest trajectory, so that no reply is cut by it
SMALL_BATCH = 32  # rows of the row of the table that plays few conversations at a time


class FixedLengths(TextEnv):
    """An environment in which nothing happens, in texts whose number of tokens can be set.

    Goal: none. Actions: go. Reward: 0. Ends when: the turns run out.
    Observation: ten words, of the instance at first, later of the member's own dynamics, and
    filling. So groups have different prompts and no two observations are alike, as where something
    happens. Options: `prompt_filling`, `observation_filling`: how often the first and the later
    observations say "and". One more "and" is one more token.
    """

    actions = ("go",)
    defaults = {"prompt_filling": 1, "observation_filling": 1}
    instruction = "Nothing happens here."
    # Of four letters each, so that even a tokenizer that spells them gives all of them the same
    # number.
    WORDS = ("blue", "gold", "pink", "dark", "high", "deep", "long", "wide", "cold", "warm", "fast",
             "slow", "hard", "soft", "kind", "open")

    def _reset(self, rng):
        self._words = self._draw(rng)

    def _draw(self, rng):
        return " ".join(self.WORDS[i] for i in rng.integers(len(self.WORDS), size=10))

    def _act(self, action):
        return Outcome(0.0)

    def instance_split(self):
        return self.split

    def render(self):
        return self._words

    def _observe(self, reward=None, valid=True):
        # Not the base class's text: its length depends on whether the reply was valid.
        if reward is None:
            return f"State: {self._words}" + " and" * self.options["prompt_filling"]
        return f"State: {self._draw(self.dynamics)}" + " and" * self.options["observation_filling"]

    def solve(self):
        return ["go"] * self.turns_left


def main(arguments=None):
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    name, device, _ = choose_model(args.model, args.device)
    budget = Budget(args.turns, 1, args.turns)
    if name == "tiny":
        policy = tiny_policy([FixedLengths(budget=budget, prompt_filling=2, observation_filling=2)])
        policy.model.to(device)
    else:
        policy = load_policy(resolve(name, None), device, stored_dtype=name == "smollm2", name=name)
    frame = ChatFrame(policy.tokenizer)
    never_stop(policy, frame)
    options = fillings(frame, budget, args)

    def groups(group_size):
        return EnvGroups(SPEC, args.trajectories // group_size, group_size, options=options,
                         budgets=vars(budget))

    shared, apart = groups(args.group_size), groups(1)
    prompts, observation = plain_ids(frame, shared, device, args)
    sides = {
        "collect": lambda: ours(policy, frame, shared, args),
        "generate": lambda: plain(policy, prompts, observation, args),
        "collect, no shared prompt": lambda: ours(policy, frame, apart, args),
        f"collect, {SMALL_BATCH} rows at a time":
            lambda: ours(policy, frame, shared, args, SMALL_BATCH),
        "generate, keeping its cache":
            lambda: plain(policy, prompts, observation, args, keep_cache=True),
    }
    card(policy, args)
    seconds = measure(sides, args.repeats, device)
    report(seconds, policy, args)


def ours(policy, frame, groups, args, max_rows=0):
    """One rollout as training does it. Checks that it was of the announced size."""
    longest = args.prompt_tokens + args.turns * (args.new_tokens + args.observation_tokens)
    rules = Rules(max_new_tokens=args.new_tokens, max_context=longest + CONTEXT_SLACK,
                  max_rows=max_rows or args.trajectories)
    for t in collect(policy, frame, groups, FIRST_SEED, rules):
        sampled = sum(t.sequences[-1].response_mask)
        assert sampled == args.turns * args.new_tokens, (t.stop, sampled)
        # No observation follows the last reply.
        assert len(t.tokens) == longest - args.observation_tokens


def plain(policy, prompts, observation, args, keep_cache=False):
    """The same conversations as a loop around `generate`, which gets the whole history every turn.

    prompts: (B, prompt_tokens) int64      observation: (B, observation_tokens) int64
    keep_cache: hand each turn's keys and values to the next, so that only new ids are computed
    """
    tokens, cache = prompts, {}
    for _ in range(args.turns):
        out = policy.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, max_new_tokens=args.new_tokens, use_cache=True,
            return_dict_in_generate=True, **cache)
        assert out.sequences.shape[1] == tokens.shape[1] + args.new_tokens, out.sequences.shape
        tokens = torch.cat([out.sequences, observation], dim=1)
        if keep_cache:
            cache = {"past_key_values": out.past_key_values}


def never_stop(policy, frame):
    """Take every way to end a reply before its last token from both sides alike."""
    frame.end_ids = set()
    frame.end_of_turn = None  # so the framing of an observation is as long after any last token
    frame.completes = lambda *ids_and_tag: False
    policy.model.generation_config.eos_token_id = None
    policy.model.generation_config.pad_token_id = policy.tokenizer.pad_token_id or 0


def fillings(frame, budget, args):
    """Options of FixedLengths with which prompt and observation have exactly the wanted number of
    tokens.

    raises: ValueError if a text is longer than wanted before it is filled
    """
    probe = FixedLengths(budget=budget)
    first = len(frame.open(frame.system_message(probe), probe.reset(seed=FIRST_SEED)[0]))
    later = len(frame.between(None, probe.step("go")[0]))
    wanted = {"prompt": (args.prompt_tokens, first),
              "observation": (args.observation_tokens, later)}
    for what, (target, bare) in wanted.items():
        if target < bare:
            raise ValueError(f"--{what}-tokens is {target}, but with this tokenizer the shortest "
                             f"{what} has {bare}.")
    return {f"{what}_filling": 1 + target - bare for what, (target, bare) in wanted.items()}


def plain_ids(frame, groups, device, args):
    """The ids that `plain` needs, made once: prompts (B, T) and one observation for all rows
    (B, T).

    raises: ValueError if the fillings did not lead to the wanted number of tokens
    """
    prompts = [frame.open(frame.system_message(env), text)
               for env, text in zip(groups.envs, groups.reset(FIRST_SEED))]
    observation = frame.between(None, groups.envs[0].step("go")[0])
    if ({len(p) for p in prompts} != {args.prompt_tokens}
            or len(observation) != args.observation_tokens):
        raise ValueError(f"prompts have {sorted({len(p) for p in prompts})} tokens and "
                         f"observations {len(observation)}: the tokenizer of {args.model!r} has "
                         f"no single token for ' and'.")
    assert len({tuple(p) for p in prompts}) == groups.num_groups
    return (torch.tensor(prompts, device=device),
            torch.tensor([observation] * len(prompts), device=device))


def measure(sides, repeats, device):
    """Seconds of each side in each round: {name: [seconds, ...]}.

    Every round runs all sides once, so that a slow moment of the machine falls on neighbours and
    ratios are taken within a round. The first round warms up and is not kept.
    """
    def once(side):
        synchronise(device)
        start = time.perf_counter()
        side()
        synchronise(device)
        return time.perf_counter() - start

    rounds = [{name: once(side) for name, side in sides.items()} for _ in range(1 + repeats)][1:]
    return {name: [r[name] for r in rounds] for name in sides}


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def card(policy, args):
    """What is measured, on what."""
    device = (torch.cuda.get_device_name() if policy.device.type == "cuda" else
              f"cpu, {args.threads} thread(s)")
    dtype = str(next(policy.model.parameters()).dtype).removeprefix("torch.")
    print(f"model     {policy.name}, {policy.num_parameters / 1e6:.2f}M parameters, {dtype}")
    print(f"device    {device}; torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"work      {args.trajectories} trajectories in groups of {args.group_size}, "
          f"{args.turns} turns")
    print(f"tokens    prompt {args.prompt_tokens}, then each turn {args.new_tokens} sampled and "
          f"{args.observation_tokens} of observation")
    malloc = (" ".join(f"{k}={v}" for k, v in os.environ.items() if k.startswith("MALLOC_"))
              or "its defaults")
    print(f"memory    C allocator: {malloc}")
    print(f"timing    median of {args.repeats} rounds after one that is not counted\n", flush=True)


def report(seconds, policy, args):
    """The table, then one JSON object on the last line. A ratio is a median of ratios within
    rounds."""
    sampled = args.trajectories * args.turns * args.new_tokens
    rate = {name: sampled / statistics.median(times) for name, times in seconds.items()}
    ratio = {name: statistics.median(g / s for g, s in zip(seconds["generate"], times))
             for name, times in seconds.items()}
    print(f"{'':32}{'seconds':>9}{'sampled tokens/s':>18}{'x generate':>12}")
    for name, times in seconds.items():
        print(f"{name:32}{statistics.median(times):9.2f}{rate[name]:18,.0f}{ratio[name]:12.2f}")
    print()
    print(json.dumps({
        "speedup": round(ratio["collect"], 3), "ours_tokens_per_second": round(rate["collect"], 1),
        "generate_tokens_per_second": round(rate["generate"], 1), **vars(args),
        "device": str(policy.device),
        "torch": torch.__version__, "transformers": transformers.__version__}))


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", allow_abbrev=False,
                                     description="Rollout speed against model.generate.")
    parser.add_argument("--model", default="tiny",
                        help="tiny, smollm2, a local folder or a Hugging Face id")
    parser.add_argument("--device", default="", help="cpu or cuda; chosen when empty")
    for option, default in dict(trajectories=128, turns=5, new_tokens=24, observation_tokens=40,
                                prompt_tokens=120, group_size=16, repeats=3, threads=1).items():
        parser.add_argument("--" + option.replace("_", "-"), type=int, default=default)
    args = parser.parse_args(arguments)
    for option, value in vars(args).items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {value}, expected at least 1.")
    if args.trajectories % args.group_size:
        raise ValueError(f"--trajectories is {args.trajectories}, expected a multiple of "
                         f"--group-size {args.group_size}.")
    return args


if __name__ == "__main__":
    try:
        main()
    except (ValueError, RuntimeError) as problem:
        sys.exit(f"error: {problem}")
