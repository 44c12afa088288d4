"""Training on a GPU: is it right, what share of the card's rates does it reach, how much memory?

    python -m lab.gpu                              (FrozenLake with each of MODELS)
    python -m lab.gpu --model tiny --device cpu    (a trial without a GPU)

lab/results/gpu.json holds what it printed on an H200, beside other measurements of that day; the
tables of docs/performance.md are made of it.

It takes the options of training. For each model it prints and measures

- decode steps of 1 to 512 rows that have 512 tokens each, with and without CUDA graphs: tokens a
  second, time, and the share of the copy rate at which weights, keys and values are read;
- training as given, with activation checkpointing, and with --attention flash_attention_2 where
  flash-attn is installed. Each variant plays a batch of episodes and learns from it, and does the
  same again with fresh episodes. The second time counts: as in training, its shapes are new, and a
  kernel that plans anew for each shape shows. Random returns replace the real ones, so that every
  group has a gradient;
- what to run for the same work with `generate` of transformers and with vLLM.

The copy rate and that of matrix products are measured in the same run. The last line is all
numbers as JSON.
"""

import gc
import importlib.util
import itertools
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lab.environments import table
from minragen import config as settings
from minragen import train
from minragen.cache import KVSlots
from minragen.fast import graphs, llama
from minragen.run import bundled, memory, start
from minragen.run.proof import in_float32
from minragen.trajectory import make_batch

WORK = dict(device="cuda", num_groups=8, group_size=16, val_size=1)
MODELS = ("smollm2", "Qwen/Qwen2.5-0.5B-Instruct")  # vocabularies of 49,152 and 151,936 ids
OTHERS = """
the same card with generate of transformers, and with vLLM (give it a folder or Hugging Face id)
  python -m lab.speed --model {model} --device cuda
  vllm bench throughput --model {model} --input-len {before} --output-len {steps} --num-prompts 256
"""
STORED = Path(__file__).resolve().parent / "results" / "gpu.json"
SIDE = {"cuda": 8192, "cpu": 512}  # rows and columns of the products that measure the rate
COPIED = {"cuda": 2**31, "cpu": 2**26}  # bytes
REPEATS = 10
ROWS = (1, 16, 64, 256, 512)  # of a decode step
BEFORE, STEPS = 512, 32  # tokens in each row before it; steps timed


def main(arguments=None):
    """Measure all variants of each model. Returns {model: {variant: {name: number}}}."""
    results = {"torch": torch.__version__}
    try:
        given = settings.parse(sys.argv[1:] if arguments is None else arguments)
        del given["resume"], given["print_config"]
        for model in [given["model"]] if "model" in given else MODELS:
            config = settings.from_options(WORK | given | {"model": model})
            _, device, results["where"] = bundled.choose_model(config.model, config.device)
            print(f"device    {results['where']}\nmodel     {model}")
            results[model] = measure_all(config, device)
            print(OTHERS.format(model=model, before=BEFORE, steps=STEPS))
    except ValueError as problem:
        sys.exit(f"error: {problem}")
    finally:  # also what was measured before a model that cannot be had
        print(json.dumps(results))
    return {name: found for name, found in results.items() if isinstance(found, dict)}


def measure_all(config, device):
    """{variant: {name: number}} of one model, printed."""
    variants = {"as given": config,
                "activation checkpointing": replace(config, activation_checkpointing=True)}
    if device.type == "cuda" and importlib.util.find_spec("flash_attn"):
        variants["flash_attention_2"] = replace(config, attention="flash_attention_2")
    results, measures = {}, {"decode steps": partial(decode_steps, config)} | {
        name: partial(measure, variant) for name, variant in variants.items()}
    for name, measured in measures.items():
        print(f"\n{name}")
        results[name] = measured()
        for what, number in results[name].items():
            print(f"  {what:48}{number:14.5g}")
        gc.collect()  # a learner holds itself through the hooks of its optimizer
    return results


def decode_steps(config):
    """{name: number} of steps that append a token to each row."""
    policy, _ = start.load(config)
    ways = {"eager": policy}
    if policy.last_hidden is graphs.last_hidden and policy.device.type == "cuda":
        ways = {"eager": replace(policy, last_hidden=llama.last_hidden), "graph": policy}
    weights, keyed = bytes_of(policy, config)
    copied, found = copy_rate(policy.device), {}
    for rows, (name, way) in itertools.product(ROWS, ways.items()):
        seconds = step_seconds(way, rows)
        read = weights + rows * (BEFORE + 1.5 * STEPS) * keyed
        found |= {f"{rows} rows, {name}, ms": 1000 * seconds,
                  f"{rows} rows, {name}, tokens/s": rows / seconds,
                  f"{rows} rows, {name}, share of the copy rate": read / seconds / copied}
    return found


@torch.no_grad()
def step_seconds(policy, rows):
    slots = KVSlots(policy.model, rows, BEFORE + 2 * STEPS)
    ids = torch.randint(9, (rows, BEFORE), device=policy.device)
    counts = torch.ones_like(ids[:, 0])
    for first in range(0, rows, 16):
        policy.extend(slots, ids[first:first + 16], BEFORE * counts[first:first + 16], first)

    def steps():
        for _ in range(STEPS):
            policy.extend(slots, ids[:, :1], counts)

    steps()
    return timed(policy.device, steps) / STEPS


def measure(config):
    """{name: number} of one variant. That cached turns equal a full pass of transformers, in the
    weights' dtype and in float32, is proved by `build`, which raises RuntimeError if they do not.
    """
    groups = start.build_groups(config)
    learner = start.build_learner(config, groups)
    device, model = learner.policy.device, learner.policy.model

    def play(first_seed):
        return learner.collect(learner.policy, learner.frame, groups["train"], first_seed,
                               train.rules_of(config))

    def learn(batch):
        train.update(learner, train.compute_targets(learner, batch, config)[0], config, step=2)

    batch = with_random_returns(play(0)).to(device)
    compared = against_float32(learner, batch, config)
    learn(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    read, played, play_seconds = bytes_read(learner.policy, config,
                                            partial(play, config.num_groups))
    batch = with_random_returns(played).to(device)
    update_seconds = timed(device, partial(learn, batch))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else float("nan")
    needed = products(learner, batch, config)
    always, *phases = (sum(sizes.values()) for sizes in memory.phases(learner, config).values())
    side, copied = SIDE[device.type], copy_rate(device)
    square = torch.randn(side, side, device=device).to(model.dtype)
    product_rate = rate(device, 2 * side**3, lambda: square @ square)
    return compared | {
        "sampled tokens/s": sum(t.response_tokens for t in played) / play_seconds,
        "copy, GB/s (read and written)": copied / 1e9,
        "rollout, share of that rate": read / play_seconds / copied,
        "matrix products, TFLOP/s": product_rate / 1e12,
        "update, seconds": update_seconds,
        "update, tokens/s": int(batch.attention_mask.sum()) / update_seconds,
        "update, share of that rate": needed / update_seconds / product_rate,
        "memory forecast, GiB": (always + max(phases)) / 2**30,
        "memory peak / forecast": peak / (always + max(phases))}


def with_random_returns(played):
    """The batch of episodes, with returns that differ within every group."""
    batch = make_batch([t for t in played if not t.error])
    returns = torch.rand(len(played), generator=torch.Generator().manual_seed(0))
    return replace(batch, episode_returns=returns[batch.episode_ids])


def timed(device, function):
    """Seconds of function(); the GPU's work is waited for on both sides."""
    wait = torch.cuda.synchronize if device.type == "cuda" else bool
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def rate(device, amount, function):
    """What function() does a second, if it does `amount` of it."""
    function()
    return REPEATS * amount / timed(device, lambda: [function() for _ in range(REPEATS)])


def copy_rate(device):
    """Bytes a second that a copy reads and writes."""
    half = torch.zeros(COPIED[device.type] // 8, device=device)
    target = half.clone()
    return rate(device, 2 * half.nbytes, lambda: target.copy_(half))


def bytes_of(policy, config):
    """What a decode step reads: all weights but an input embedding of its own; keys and values, for
    each token of a row."""
    model, sizes = policy.model, memory._sizes(policy, config, 1)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    own = 0 if embedding.weight is output.weight else embedding.weight.nbytes
    weights = sum(p.nbytes for p in model.parameters()) - own
    return weights, sizes.layers * sizes.keys * sizes.width


def bytes_read(policy, config, play):
    """What the decode steps of play() must read, keys and values up to the longest row, its result,
    and its seconds."""
    weights, keyed = bytes_of(policy, config)
    usual, read, played = policy.extend, [], []

    def counted(slots, tokens, *rest):
        if tokens.shape[1] == 1:
            keys = len(tokens) * (1 + int(slots.bounds[:len(tokens)].max()))
            read.append(weights + keys * keyed)
        return usual(slots, tokens, *rest)

    policy.extend = counted
    try:
        seconds = timed(policy.device, lambda: played.extend(play()))
    finally:
        del policy.extend
    return sum(read), played, seconds


def products(learner, batch, config):
    """FLOPs of an update in products with weights, 2 for each multiplication: forward, twice that
    backward, and in bfloat16 forward for the old logprobs. Attention and recomputation are left
    out."""
    model, flops = learner.policy.model, []
    hooks = [layer.register_forward_hook(
        lambda layer, x, _: flops.append(2 * x[0].numel() * layer.out_features))
        for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    for mini in train.mini_batches(batch, config, 2):
        train.in_micro_batches(learner, mini, config, lambda part: learner.policy.logprobs(
            part.tokens, part.response_mask, config.temperature)[0])
    for hook in hooks:
        hook.remove()
    return (3 if model.dtype == torch.float32 else 4) * sum(flops)


def against_float32(learner, batch, config):
    """The sampler's logprobs and the gradient of one optimizer step over the whole batch, beside
    those of a float32 copy of the weights: mean absolute nats, cosine, |difference| / |gradient|.
    """
    exact, gap, gradients = in_float32(learner.policy), 0.0, []
    mini = train.add_loss_weights(train.compute_targets(learner, batch, config)[0], config)
    for policy, masters in ((learner.policy, learner.optimizer.masters),
                            (exact, list(exact.model.parameters()))):
        for rows in train.parts_of(mini, learner, config):
            losses, shares = train.policy_losses(policy, mini.take(rows), config)
            sum(losses.values()).backward()
            gap += float(shares["logprob_gap"]) * (policy is exact)
        gradients.append([m.grad for m in masters])
        for master in masters:
            master.grad = None
    ours, theirs, error = (sum(float(g.double().square().sum()) for g in each)**0.5 for each in (
        *gradients, [a - b for a, b in zip(*gradients)]))
    cosine = (ours**2 + theirs**2 - error**2) / (2 * ours * theirs)
    return {"sampler and float32 differ by, nats": gap, "gradient, cosine with float32": cosine,
            "gradient, relative error": error / theirs}


# ---- docs/performance.md -------------------------------------------------------------------------
# What the page tells of a variant, in its words.
TOLD = {"sampled tokens/s": "sampled tokens a second", "update, seconds": "update, seconds",
        "memory forecast, GiB": "memory forecast, GiB",
        "memory peak / forecast": "measured peak / forecast"}


def tables():
    """What was measured on a GPU: two tables."""
    found = json.loads(STORED.read_text())["lab.gpu"]
    small, large = found["smollm2"], found["untrained"]
    steps = table(("rows", "SmolLM2-135M, tokens/s", "0.40B, tokens/s"), [
        [f"{rows}", *(f"{1000 * rows / model['decode steps'][f'{rows} rows, graph, ms']:,.0f}"
                      for model in (small, large))] for rows in ROWS])
    columns = [model[variant] for model in (small, large)
               for variant in ("as given", "activation checkpointing")]
    measured = table(("", "SmolLM2-135M", "checkpointing", "0.40B", "checkpointing"), [
        [told, *(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (c[name] for c in columns))]
        for name, told in TOLD.items()])
    return f"{steps}\n\n{measured}"


if __name__ == "__main__":
    main()
