"""Speed, side by side in one run: rollouts, a whole GRPO step, FrozenLake's step.

    python -m lab.speed
    python -m lab.speed --model smollm2    (rollouts in bfloat16, 16 rows)
    python -m lab.speed --model smollm2 --device cuda    (one GPU; rollouts alone)

All sides play the same number of conversations with the same model, prompts, sampling and lengths:
every turn is exactly `new_tokens` sampled tokens, then exactly `observation_tokens` given ones.
The sections of the table (`--parts`):

    rollout     `collect`, as training calls it, in one process and in two with half of the groups
                each, beside two loops around `generate`: the usual one gives it the whole history;
                the best that transformers' public API allows prefills each distinct prompt once and
                keeps the cache. The products with weights in `collect` are also timed alone.
    turns       the same with twice as many turns
    step        `train_step`
    frozenlake  the phases of a step of `make train ENV=frozenlake`

Reading order: `main`, `Work` (what all sides share), `ours` and `by_generate` (a rollout),
`step_sides`, `frozenlake_sides`, `measure`.

The model is untrained, and nothing that it samples ends a reply early on any side. In favour of
`generate`: it steps no environments, parses nothing and pads nothing. In favour of `collect`:
`generate` copies each layer's cache into fresh memory at every token, and glibc gives the old one
back to the kernel, unless MALLOC_MMAP_THRESHOLD_=2000000000 MALLOC_TRIM_THRESHOLD_=4000000000.
"""

import argparse
import contextlib
import copy
import json
import multiprocessing
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from minragen import config as settings
from minragen import rollout, train
from minragen.chat import ChatFrame
from minragen.envs import Budget, EnvGroups, Outcome, TextEnv
from minragen.fast import llama
from minragen.fast.policies import faster
from minragen.models import AdamW, Policy
from minragen.rollout import Rules, collect
from minragen.run import start
from minragen.run.bundled import resolve
from minragen.run.load import NO_CODE
from minragen.run.tiny import tiny_policy

PARTS = ("rollout", "turns", "step", "frozenlake")
ON_GPU = ("rollout", "turns")
SPEC = "lab.speed:FixedLengths"
FIRST_SEED = 0
# What a phase is called -> the function that it is spent in, without other phases inside it.
PHASES = {
    "prefill prompts": (rollout, "prefill"),
    "append observations": (rollout, "feed"),
    "sample replies": (rollout, "sample_replies"),
    "parse replies": (rollout, "end_replies"),
    "step environments": (EnvGroups, "step"),
    "next prompts": (rollout, "end_turn"),
    "compute targets": (train, "compute_targets"),
    "forward and backward": (train, "backward"),
    "optimizer steps": (AdamW, "step"),
}


def main(arguments=None):
    args = parse(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    work, longer = Work(args), copy.copy(args)
    longer.turns *= 2
    where = args.device if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"model     {args.model} on {where}, {work.policy.model.num_parameters() / 1e6:.2f}M "
          f"parameters, {work.policy.model.dtype}")
    print(f"work      {args.trajectories} trajectories in groups of {args.group_size}; prompt of "
          f"{args.prompt_tokens} tokens, each turn {args.new_tokens} sampled and "
          f"{args.observation_tokens} observed; one core a process, median of {args.repeats}\n")
    sections = {  # part -> title, function that returns its sides
        "rollout": (f"rollout of {args.turns} turns", lambda: rollout_sides(work)),
        "turns": (f"rollout of {longer.turns} turns", lambda: rollout_sides(Work(longer))),
        "step": (f"GRPO step of {args.turns} turns", lambda: step_sides(work)),
        "frozenlake": ("FrozenLake's step", lambda: frozenlake_sides(args))}
    columns = ("seconds", "ratio to first", "sampled tokens/s", "ids/trajectory")
    print(" " * 46 + "".join(f"{column:>18}" for column in columns), flush=True)
    table = {title: measure(title, sides(), args.repeats)
             for title, sides in (sections[part] for part in args.parts)}
    print("\n" + json.dumps({"table": table, "torch": torch.__version__,
                             "transformers": transformers.__version__, "where": where,
                             **vars(args)}))


class FixedLengths(TextEnv):
    """Nothing happens, in texts whose number of tokens can be set.

    Reward: random, so that no group has a reward std of 0. Observation: words in the instance's
    order, later in the member's own, and `prompt_filling` or `observation_filling` times "and".
    """

    actions = ("go",)
    defaults = {"prompt_filling": 0, "observation_filling": 0}
    instruction = "Nothing happens here."
    WORDS = ("blue", "gold", "pink", "dark", "high", "deep", "long", "wide", "cold", "and")

    def _reset(self, rng):
        self._order = rng

    def _act(self, action):
        return Outcome(0.0)

    def step(self, answer):
        # An untrained model gives no valid answer, so the reward cannot depend on it.
        observation, _, *rest = super().step(answer)
        return observation, float(self.dynamics.random()), *rest

    def instance_split(self):
        return self.split

    def _observe(self, reward=None, valid=True):
        order, filling = ((self._order, "prompt_filling") if reward is None else
                          (self.dynamics, "observation_filling"))
        words = [*order.permutation(self.WORDS), *["and"] * self.options[filling]]
        return f"State: {' '.join(words)}"


class Work:
    """What all sides share. prompts, observation: (B, T) int64, rows group-major; length: tokens of
    a finished trajectory, which has no observation after its last reply.

    raises: ValueError for lengths that the tokenizer cannot have
    """

    def __init__(self, args):
        self.args, budget = args, Budget(args.turns, 1, args.turns)
        turn = args.new_tokens + args.observation_tokens
        self.length = args.prompt_tokens + args.turns * turn - args.observation_tokens
        self.max_context = self.length + turn  # cuts no reply
        if args.model == "tiny":
            self.policy = tiny_policy([FixedLengths(budget=budget)])
        else:  # not load_policy, which makes it float32 on a CPU
            folder = resolve(args.model, None)
            self.policy = Policy(args.model, AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, **NO_CODE).eval(), AutoTokenizer.from_pretrained(
                    folder, **NO_CODE))
        self.policy.model.to(args.device)
        self.policy = faster(self.policy, room=self.max_context + args.new_tokens)
        self.frame = frame = ChatFrame(self.policy.tokenizer)
        never_stop(self.policy, frame)
        filling = {}
        for _ in range(2):  # the second time with the filling that the first one lacked
            self.groups = EnvGroups(SPEC, args.trajectories // args.group_size, args.group_size,
                                    options=filling, budgets=vars(budget))
            prompts = [frame.first_prompt_ids(frame.system_message(env), text)
                       for env, text in zip(self.groups.envs, self.groups.reset(FIRST_SEED))]
            observation = frame.next_prompt_ids(None, self.groups.envs[0].step("go")[0])
            filling = {"prompt_filling": args.prompt_tokens - len(prompts[0]),
                       "observation_filling": args.observation_tokens - len(observation)}
        if any(filling.values()):
            raise ValueError(f"prompt and observation need {len(prompts[0])} and {len(observation)}"
                             f" tokens: raise --prompt-tokens or --observation-tokens.")
        self.prompts = torch.tensor(prompts, device=args.device)
        self.observation = torch.tensor([observation] * len(prompts), device=args.device)
        assert len(self.prompts.unique(dim=0)) == self.groups.num_groups

    def check(self, trajectories):
        for t in trajectories:
            assert t.response_tokens == self.args.turns * self.args.new_tokens, t.stop
            assert len(t.tokens) == self.length


def never_stop(policy, frame):
    """Take every way to end a reply before its last token from all sides alike."""
    frame.end_ids = set()
    frame.end_of_turn = None  # so the framing of an observation is as long after any last token
    frame.parts_ended = lambda ids, before: 0
    policy.model.generation_config.eos_token_id = None
    policy.model.generation_config.pad_token_id = policy.tokenizer.pad_token_id or 0


# ---- Rollouts ------------------------------------------------------------------------------------
def rollout_sides(work):
    """{name: side}. A side is a function without arguments; see `measure`."""
    collected = Rollout(work, partial(ours, work))
    generate = partial(by_generate, work.policy.model, work)
    kept = {"generate, prompt shared, cache kept": Rollout(work, partial(generate, True))}
    if work.args.device != "cpu":  # a graph is replayed without showing its operations
        eager = copy.copy(work)
        eager.policy = replace(work.policy, last_hidden=llama.last_hidden)
        return {"collect": partial(ours, work),
                "collect without graphs": partial(ours, eager), **kept}
    sides = {"collect": collected, "its products with weights alone": collected.replay,
             **kept}
    if work.args.model == "tiny":  # minutes for a pretrained model
        sides["generate, whole history"] = Rollout(work, partial(generate, False))
        if work.groups.num_groups % 2 == 0:
            sides["collect, two processes"] = two_processes(work.args)
    return sides


def ours(work, first_seed=FIRST_SEED):
    """A rollout as training does it."""
    rules = Rules(max_new_tokens=work.args.new_tokens, max_rows=work.args.trajectories,
                  max_context=work.max_context)
    work.check(collect(work.policy, work.frame, work.groups, first_seed, rules))


@torch.inference_mode()
def by_generate(model, work, keep_cache):
    """The same as a loop around `generate`. Returns the tokens of all trajectories (B, T).

    `generate` takes a filled cache if the rows have no padding and their last id is not in it.
    """
    args, tokens, cache = work.args, work.prompts, None
    if keep_cache:
        cache = DynamicCache(config=model.config)
        model.base_model(tokens[::args.group_size, :-1], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(args.group_size)
    for turn in range(args.turns):
        if turn > 0:
            tokens = torch.cat([tokens, work.observation], dim=1)
        tokens = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, use_cache=True,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=args.new_tokens)
    assert tokens.shape == (args.trajectories, work.length)
    return tokens


def two_processes(args):
    """A side in which this process and a new one play half of the groups each, on a core each."""
    fork, half = multiprocessing.get_context("fork"), copy.copy(args)
    half.trajectories //= 2
    work, barrier = Work(half), fork.Barrier(2)

    def play(process=0):
        barrier.wait(timeout=600)
        ours(work, FIRST_SEED + process * work.groups.num_groups)
        barrier.wait(timeout=600)

    def play_on():
        while True:  # a daemon: it ends with this process
            play(process=1)

    fork.Process(target=play_on, daemon=True).start()
    return play


class Rollout(TorchDispatchMode):
    """A side whose first call is recorded: `ids`, how many went through the model, padding
    included; and the products with weights, which `replay` computes again without the rest."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
                torch.ops.aten.linear.default)

    def __init__(self, work, play):
        super().__init__()
        self.args, self.play, self.ids, self.products, self.kept = work.args, play, 0, [], {}
        self.weights = {p.untyped_storage().data_ptr() for p in work.policy.model.parameters()}

    def __call__(self):
        with contextlib.nullcontext() if self.products else self:
            self.play()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func == torch.ops.aten.embedding.default:
            self.ids += args[1].numel()
        if func in self.PRODUCTS:
            self.products.append((func, [self.keep(x) for x in args]))
        return func(*args, **kwargs or {})

    def keep(self, x):
        """The weight itself; of all else one of each shape, or memory would fill up."""
        if x is None or x.untyped_storage().data_ptr() in self.weights:
            return x
        return self.kept.setdefault((x.shape, x.stride(), x.dtype), x)

    @torch.inference_mode()
    def replay(self):
        for func, args in self.products:
            func(*args)


# ---- Steps ---------------------------------------------------------------------------------------
def step_sides(work):
    """A step of plain GRPO in float32, two optimizer steps."""
    args, groups = work.args, work.groups
    config = settings.Config(
        num_groups=groups.num_groups, group_size=args.group_size, max_context=work.max_context,
        max_new_tokens=args.new_tokens, mini_batch=args.trajectories // 2, filter="none",
        entropy_coef=0.0, diagnose_every=0)
    policy = replace(work.policy, model=copy.deepcopy(work.policy.model))
    learner = train.Learner(policy, work.frame, AdamW(policy.model.parameters(), config.lr))

    def step():
        metrics, trajectories = train.train_step(learner, groups, config)
        work.check(trajectories)
        assert metrics["groups_kept"] == groups.num_groups
        return {"": metrics["seconds"], "rollout": metrics["rollout_seconds"]}

    return {"train_step": step}


def frozenlake_sides(args):
    """The first steps of `make train ENV=frozenlake`; smaller ones below 128 --trajectories."""
    config = settings.preset("frozenlake")
    config = replace(config, device="cpu", diagnose_every=0, num_groups=min(
        config.num_groups, max(1, 2 * args.trajectories // config.group_size)))
    groups, seconds = start.build_groups(config), Counter()
    learner = start.build_learner(config, groups, say=lambda line: None)
    for phase, (owner, name) in PHASES.items():  # until the end of the process
        setattr(owner, name, timed(getattr(owner, name), seconds, phase))

    def step():
        seconds.clear()
        total = train.train_step(learner, groups["train"], config)[0]["seconds"]
        return {"": total, **seconds, "all else": total - seconds.total()}

    return {"train_step": step}


def timed(function, seconds, phase):
    def wrapper(*args, **kwargs):
        start, inside = time.perf_counter(), seconds.total()
        result = function(*args, **kwargs)
        seconds[phase] += time.perf_counter() - start - (seconds.total() - inside)
        return result

    return wrapper


# ---- Measuring -----------------------------------------------------------------------------------
def measure(title, sides, repeats):
    """Time the sides, print their rows, and return them: {name: {column: number}}.

    Every round runs all sides once, so that a slow moment of the machine falls on neighbours, and
    ratios (to the first row) are taken within a round. The first round warms up and is not kept.
    A side that returns {part: seconds} has timed itself; part "" is all of it.
    """
    seconds, rows = defaultdict(list), {}
    for _ in range(1 + repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            parts = side()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            for part, taken in (parts or {"": time.perf_counter() - start}).items():
                seconds[f"{name}: {part}" if part else name].append(taken)
    print(title)
    first = next(iter(seconds.values()))[1:]
    for name, (_, *times) in seconds.items():
        row = rows[name] = {"seconds": statistics.median(times),
                            "ratio": statistics.median(t / f for t, f in zip(times, first))}
        if isinstance(side := sides.get(name), Rollout):
            sampled = side.args.trajectories * side.args.turns * side.args.new_tokens
            row |= {"sampled tokens/s": sampled / row["seconds"],
                    "ids/trajectory": side.ids / side.args.trajectories}
        print(f"  {name:44}" + "".join(f"{value:18,.3f}" for value in row.values()), flush=True)
    return rows


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m lab.speed", allow_abbrev=False)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a local folder")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="[cpu]")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="tiny: all; others: rollout")
    parser.add_argument("--trajectories", type=int, help="tiny: 128; others: 16")
    for option, default in dict(turns=5, new_tokens=24, observation_tokens=40, prompt_tokens=120,
                                group_size=16, repeats=5).items():
        parser.add_argument("--" + option.replace("_", "-"), type=int, default=default)
    args = parser.parse_args(arguments)
    tiny = args.model == "tiny"
    args.trajectories = args.trajectories or (128 if tiny else 16)
    parts = PARTS if tiny else PARTS[:1]
    args.parts = args.parts or [p for p in parts if args.device == "cpu" or p in ON_GPU]
    for part in args.parts:
        if args.device != "cpu" and part not in ON_GPU:
            raise ValueError(f"--parts: {part} is measured on a CPU alone.")
    if args.trajectories % args.group_size:
        raise ValueError(f"--trajectories: got {args.trajectories}, expected a multiple of "
                         f"--group-size {args.group_size}.")
    return args


if __name__ == "__main__":
    try:
        main()
    except (ValueError, RuntimeError, ImportError) as problem:
        sys.exit(f"error: {problem}")
