"""Four pictures: an agent's loop, a collapse, the memory that training needs, a map of the code.

    python -m lab.figure      (draws them with all others, in docs/)

loop.png     one turn of FrozenLake, and an instance that a stored run fails before RL and solves
             after it
collapse.png GRPO learns MetaMathQA at the preset's learning rate and collapses at three times that
             rate: three seeds of each, and replies before and after
memory.png   the forecast of run/memory.py for models of five sizes, with all weights and with LoRA
code.png     the files of the reading list in the order of a step, and the wings around them

Reading order: `draw_loop`, `draw_collapse`, `draw_memory`, `draw_code`, each below the data that
it draws.

Tests: `python -m pytest tests/long/test_pictures.py`.
"""

import textwrap
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from lab import algorithm, archive
from minragen.config import from_options
from minragen.fast import head
from minragen.models import Policy
from minragen.more.lora import add_adapters
from minragen.run import memory
from minragen.run.groups import env_groups
from minragen.support.formats import forced_prefix
from minragen.train import World

# Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PALE_BLUE, PALE_GREEN, PALE_ORANGE = "#E3F0F8", "#E0F3ED", "#FCF1DC"
LOOP_RUN = "smollm2-frozenlake-s0"  # the stored run whose episodes loop.png shows


def draw(folder):
    for name, picture in PICTURES.items():
        picture(folder / name)


def sheet(width, height):
    """A figure and an axis whose unit is an inch."""
    figure = plt.figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.set_axis_off()
    return figure, axis


def arrow(axis, *points, colour="#444444"):
    """An arrow through two or more points."""
    for begin, end in zip(points, points[1:]):
        axis.add_patch(FancyArrowPatch(
            begin, end, arrowstyle="-|>" if end == points[-1] else "-", lw=1.8, color=colour,
            mutation_scale=16, shrinkA=0, shrinkB=0))


def box(axis, left, bottom, width, height, fill, edge):
    axis.add_patch(FancyBboxPatch(
        (left + 0.08, bottom + 0.08), width - 0.16, height - 0.16, boxstyle="round,pad=0.08",
        facecolor=fill, edgecolor=edge, lw=1.4))


# ---- The loop ------------------------------------------------------------------------------------
def draw_loop(path, run=LOOP_RUN):
    """The last turn: board, reply, reward, board; then the whole instance before and after RL."""
    before, after = pair(run)
    figure, axis = sheet(10, 5.3)
    _turn(axis, *after[-2:])
    axis.plot((0.2, 9.8), (2.15, 2.15), color="#BBBBBB", lw=1)
    left = _episode(axis, 0.2, before, "This lake with SmolLM2-135M before RL: ", VERMILION)
    _episode(axis, left + 0.45, after, "After RL: ", GREEN)
    algorithm._save(figure, path)


def pair(run):
    """(before, after): the episodes of an instance that a run failed at its first validation and
    solves at its last, in most turns. Each is played again: [Turn], and last the board that is
    left. Raises ValueError if no such instance is stored."""
    at = {}  # seed -> episodes
    for e in archive.episodes(run):
        at.setdefault(e["seed"], []).append(e)
    learnt = [both for both in at.values() if [e["success"] for e in both] == [False, True]]
    if not learnt:
        raise ValueError(f"run {run}: no stored instance fails first and succeeds last.")
    both = max(learnt, key=lambda both: len(both[1]["turn_rewards"]))
    return [replayed(archive.config(run), e) for e in both]


def replayed(config, episode):
    """The turns of a stored episode as SimpleNamespaces of board (an image), observation, text,
    answer and reward. The last one has only the board and observation that the episode ends with.
    """
    env = env_groups(config, "val").envs[0]
    observation, _ = env.reset(seed=episode["seed"], options={"member": episode["member"]})
    prefix, turns = forced_prefix(config.response_format), []
    replies = [m["content"] for m in episode["messages"] if m["role"] == "assistant"]
    for reply in replies:
        answer = reply.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        turns.append(SimpleNamespace(board=env.draw(), observation=observation, answer=answer,
                                     text=prefix + reply))
        observation, turns[-1].reward, *_ = env.step(answer)
    return [*turns, SimpleNamespace(board=env.draw(), observation=observation)]


def _turn(axis, turn, following):
    """The upper half: the environment shows a board, the policy replies, the environment acts."""
    for left, number, name in ((0.2, 1, "Observation"), (3.3, 2, "Reply of the agent"),
                               (7.9, 3, f"Reward {turn.reward:g}, next observation")):
        axis.text(left if number < 3 else 9.8, 5.07, f"{number}. {name}", fontsize=12.5,
                  fontweight="bold", va="center", ha="left" if number < 3 else "right")
    for left, board in ((0.2, turn.board), (7.9, following.board)):
        _board(axis, left, 2.95, 1.9, board)
    box(axis, 3.3, 3.2, 3.4, 1.4, PALE_GREEN, GREEN)
    # A token of the model begins with a blank, so one follows each tag; it is left out here.
    lines = [line for part in turn.text.replace("><", ">\n<").replace("> ", ">").splitlines()
             for line in textwrap.wrap(part, 31)]
    axis.text(3.45, 3.9, "\n".join(lines), family="monospace", fontsize=11.5, va="center",
              linespacing=1.5)
    grid = "\n".join(turn.observation.splitlines()[-5:-1])
    for begin, end, above, below in ((2.2, 3.2, grid, "as text"),
                                     (6.8, 7.8, "", "moves")):
        arrow(axis, (begin, 3.9), (end, 3.9))
        middle = (begin + end) / 2 - 0.05
        axis.text(middle, 4.0, above, ha="center", va="bottom", fontsize=11.5, family="monospace")
        axis.text(middle, 3.8, below, ha="center", va="top", fontsize=11.5)
    arrow(axis, (8.85, 2.9), (8.85, 2.45), (1.15, 2.45), (1.15, 2.9))
    axis.text(5, 2.53, "an episode: again until the goal, a hole or the last turn; the sum of its "
              "rewards is its return", ha="center", va="bottom", fontsize=11.5)


def _episode(axis, left, turns, name, colour, side=0.93, apart=0.09):
    """The lower half: the boards of an episode, below each the moves. Returns the right edge."""
    total = sum(turn.reward for turn in turns[:-1])
    ending = f"return {total:g}" + (", goal" if total else ", out of turns")
    start = axis.text(left, 1.88, name, fontsize=12.5, fontweight="bold", va="center")
    axis.annotate(ending, (1, 0.5), xycoords=start, fontsize=12.5, fontweight="bold", color=colour,
                  va="center")
    for turn in turns:
        _board(axis, left, 0.68, side, turn.board)
        moves = getattr(turn, "answer", "").replace(" || ", "\n")
        axis.text(left + side / 2, 0.57, moves, ha="center", va="top", fontsize=11.5)
        left += side + apart
    return left - apart


def _board(axis, left, bottom, side, image):
    axis.imshow(image, extent=(left, left + side, bottom, bottom + side), aspect="auto",
                interpolation="nearest", zorder=2)
    axis.add_patch(Rectangle((left, bottom), side, side, fill=False, ec="#444444", lw=1, zorder=3))


# ---- A collapse ----------------------------------------------------------------------------------
# the stored runs of a learning rate -> its name and colour
RATES = {"metamathqa-stable": ("the preset's learning rate", BLUE),
         "metamathqa-collapse": ("three times that rate", VERMILION)}
CURVES = {"success": "success", "reward_std": "reward std", "valid": "valid replies"}
SHOWN = 3  # questions whose replies are shown


def draw_collapse(path):
    """Three metrics from step 1 on, a dot for a step of a seed and a line for the mean of the
    seeds; below, how questions are answered before RL and at the end of the runs of seed 0."""
    figure = plt.figure(figsize=(10, 5.4))
    for place, (key, title) in enumerate(CURVES.items()):
        axis = figure.add_axes((0.05 + 0.325 * place, 0.58, 0.275, 0.31))
        for stem, (name, colour) in RATES.items():
            runs = [[line[key] for line in archive.metrics(run) if key in line]
                    for run in archive.names(f"{stem}-s?")]
            steps = range(1, len(runs[0]) + 1)
            for run in runs:
                axis.plot(steps, run, ".", color=colour, alpha=0.35, ms=5)
            axis.plot(steps, np.mean(runs, axis=0), color=colour, lw=2, label=name)
        axis.set_title(title, fontsize=12)
        axis.set_xlabel("training step", fontsize=11)
        axis.set_ylim(0, 1.03 if key != "reward_std" else 0.55)
        axis.grid(alpha=0.3)
    axis.plot([], [], ".", color="gray", label="a seed")
    figure.legend(*axis.get_legend_handles_labels(), loc="upper center", ncols=3, fontsize=12,
                  frameon=False)
    _replies(figure.add_axes((0.05, 0.0, 0.925, 0.46)))
    algorithm._save(figure, path)


def _replies(axis):
    """A row for each question, a column before RL and one at the end of a run at each rate."""
    axis.set(xlim=(0, 1), ylim=(0, SHOWN + 0.5))
    axis.set_axis_off()
    columns = [(0.3, "before RL", "black", "metamathqa-stable", 0),
               (0.54, "after RL", BLUE, "metamathqa-stable", -1),
               (0.78, "after the collapse", VERMILION, "metamathqa-collapse", -1)]
    for left, title, colour, stem, when in columns:
        run, at = f"{stem}-s0", {}
        for episode in archive.episodes(run):
            at.setdefault(episode["seed"], []).append(episode["messages"])
        prefix = forced_prefix(archive.config(run).response_format)
        axis.text(left, SHOWN, title, fontsize=12, fontweight="bold", color=colour, va="bottom")
        for row, messages in enumerate([*at.values()][:SHOWN]):
            _, question, reply = (m["content"] for m in messages[when])
            if when == 0:
                axis.text(0, SHOWN - 0.45 - row, textwrap.fill(question, 30), fontsize=11,
                          va="center")
            axis.text(left, SHOWN - 0.45 - row, family="monospace", fontsize=11, va="center",
                      s=(prefix + reply).replace("><", ">\n<").replace("> ", ">"))


# ---- Memory --------------------------------------------------------------------------------------
# vocabulary, width, MLP, layers, query heads, key heads, and whether the output layer is tied
ARCHITECTURES = {"SmolLM2-135M": (49152, 576, 1536, 30, 9, 3, True),
                 "Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, True),
                 "Llama-3.2-1B": (128256, 2048, 8192, 16, 32, 8, True),
                 "Qwen2.5-1.5B": (151936, 1536, 8960, 28, 12, 2, True),
                 "Qwen2.5-3B": (151936, 2048, 11008, 36, 16, 2, True)}
CARDS = (24, 48, 80)  # GB
RANK = 16
WAYS = {"all weights": (0, BLUE), f"LoRA, rank {RANK}": (RANK, ORANGE)}  # rank, colour


def draw_memory(path):
    """A pair of bars for each model: with activation checkpointing, and paler what comes on top
    without it."""
    figure, axis = plt.subplots(figsize=(9, 4.6), layout="constrained")
    for x, name in enumerate(ARCHITECTURES):
        for side, (rank, colour) in zip((-0.2, 0.2), WAYS.values()):
            low, high = (size / 1e9 for size in peaks(name, rank))
            axis.bar(x + side, high, 0.38, color=colour, alpha=0.35)
            axis.bar(x + side, low, 0.38, color=colour)
            axis.text(x + side, high + 0.8, f"{high:.0f}", ha="center", va="bottom", fontsize=11,
                      bbox={"color": "white", "pad": 0.3}, zorder=3)
            if high - low > 4:
                axis.text(x + side, low - 0.8, f"{low:.0f}", ha="center", va="top", fontsize=11,
                          color="black" if rank else "white")
    for size in CARDS:
        axis.axhline(size, color="black", linestyle="--", lw=1, zorder=0)
        axis.text(-0.55, size + 0.8, f"card of {size} GB", fontsize=11, va="bottom")
    axis.set_xticks(range(len(ARCHITECTURES)), ARCHITECTURES, fontsize=11)
    axis.set_xlim(-0.6, len(ARCHITECTURES) - 0.4)
    axis.set_ylabel("forecast of the peak, GB", fontsize=11.5)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=[
        *(Patch(color=colour, label=way) for way, (_, colour) in WAYS.items()),
        Patch(color="#555555", label="with --activation-checkpointing"),
        Patch(color="#555555", alpha=0.35, label="without it")],
        loc="outside upper center", ncols=4, fontsize=11, frameon=False)
    algorithm._save(figure, path)


def peaks(name, rank):
    """Bytes, with activation checkpointing and without: the forecast for FrozenLake with the preset
    of pretrained models, all weights (rank 0) or adapters."""
    policy = Policy(name, without_weights(*ARCHITECTURES[name], llama=name[0] != "Q"), None,
                    output_layer=head.output_layer, token_logprobs=head.token_logprobs)
    if rank:
        with torch.device("meta"):
            add_adapters(policy, rank, 0)
    learner = SimpleNamespace(policy=policy, world=World(), critic=None, reference=None)
    for on in (True, False):
        config = from_options(dict(env="frozenlake", model=f"hub/{name}", algo="grpo",
                                   lora_rank=rank, activation_checkpointing=on))
        always, *phases = (sum(sizes.values())
                           for sizes in memory.phases(learner, config).values())
        yield always + max(phases)


def without_weights(vocabulary, width, mlp, layers, heads, keys, tied, llama):
    """A bfloat16 model without memory for its weights."""
    config = (LlamaConfig if llama else Qwen2Config)(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=tied)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


# ---- The code ------------------------------------------------------------------------------------
# file of the reading list or wing -> left, bottom, width and what it does
PLACES = {
    "nano.py": (0.2, 6.3, 2.0, "the idea on one page"),
    "config.py": (2.4, 6.3, 2.0, "all options"),
    "eval.py": (4.6, 6.3, 1.7, "evaluation"),
    "run/": (6.5, 6.3, 2.0, "start, save, resume"),
    "look/": (8.7, 6.3, 2.1, "diagnose, report"),
    "train.py": (0.9, 5.0, 9.9, "one step of StarPO, and the loop around it"),
    "rollout.py": (0.9, 3.3, 2.6, "all episodes take turns"),
    "trajectory.py": (3.9, 3.3, 2.0, "what an episode is"),
    "starpo.py": (6.3, 3.3, 2.0, "the equations"),
    "envs.py": (0.2, 1.6, 2.0, "what a task is"),
    "chat.py": (2.5, 1.6, 2.2, "text and tokens"),
    "cache.py": (4.9, 1.6, 2.3, "keys and values"),
    "models.py": (8.5, 1.6, 2.3, "policy, optimizer"),
    "environments/": (0.2, 0.1, 2.0, "ten tasks"),
    "support/": (2.5, 0.1, 2.2, "formats, templates"),
    "fast/": (4.9, 0.1, 2.3, "the same sooner"),
    "more/": (8.5, 0.1, 2.3, "LoRA, images, ..."),
}
# from, to, the points of the arrow, where its label begins, and what is called: the numbers are the
# order of a step, the letters that of a turn
CALLS = [
    ("train.py", "rollout.py", [(2.0, 5.0), (2.0, 4.1)], (2.15, 4.55), ["1 collect"]),
    ("train.py", "trajectory.py", [(4.6, 5.0), (4.6, 4.1)], (4.75, 4.55), ["2 make_batch"]),
    ("train.py", "starpo.py", [(6.6, 5.0), (6.6, 4.1)], (6.75, 4.55),
     ["3 filter_groups", "5 ESTIMATORS", "6 policy_loss"]),
    ("train.py", "models.py", [(9.3, 5.0), (9.3, 2.4)], (9.45, 4.2),
     ["4 logprobs", "7 AdamW.step"]),
    ("rollout.py", "trajectory.py", [(3.5, 3.7), (3.9, 3.7)], None, ["Trajectory"]),
    ("rollout.py", "envs.py", [(1.1, 3.3), (1.1, 2.4)], (1.2, 2.85), ["a reset", "e step"]),
    ("rollout.py", "chat.py", [(2.7, 3.3), (2.7, 2.4)], (2.8, 2.7),
     ["b append_next_prompt", "d parse"]),
    ("rollout.py", "models.py", [(3.3, 3.3), (3.3, 3.1), (8.9, 3.1), (8.9, 2.4)], (7.0, 2.93),
     ["c extend"]),
    ("models.py", "cache.py", [(8.5, 2.0), (7.2, 2.0)], (7.3, 2.17), ["last_hidden"]),
]
# a wing, and the file of the reading list that it imports or that imports it
SERVES = [("run/", "train.py"), ("look/", "train.py"), ("environments/", "envs.py"),
          ("support/", "chat.py"), ("fast/", "cache.py"), ("more/", "models.py")]


def draw_code(path):
    """The files of the reading list with the calls of a step, and the wings that serve them."""
    figure, axis = sheet(11, 7.6)
    axis.text(0.2, 7.35, "Blue: the reading list. Orange: what serves it. Numbers: what train.py "
              "calls in a step; letters: what rollout.py calls in a turn.", fontsize=11,
              va="center")
    for name, (left, bottom, width, text) in PLACES.items():
        wing = name.endswith("/")
        box(axis, left, bottom, width, 0.8, PALE_ORANGE if wing else PALE_BLUE,
            ORANGE if wing else BLUE)
        axis.text(left + 0.12, bottom + 0.54, name, fontsize=12.5, fontweight="bold", va="center")
        axis.text(left + 0.12, bottom + 0.23, text, fontsize=11, va="center")
    for _, _, points, place, functions in CALLS:
        arrow(axis, *points)
        if place:
            axis.text(*place, "\n".join(functions), family="monospace", fontsize=11, va="center",
                      linespacing=1.25)
    for wing, served in SERVES:
        left, bottom, width, _ = PLACES[wing]
        above = PLACES[served][1] > bottom
        x, begin = left + width / 2, bottom + 0.8 * above
        arrow(axis, (x, begin), (x, PLACES[served][1] + 0.8 * (not above)), colour=ORANGE)
    algorithm._save(figure, path)


PICTURES = {"loop.png": draw_loop, "collapse.png": draw_collapse, "memory.png": draw_memory,
            "code.png": draw_code}
