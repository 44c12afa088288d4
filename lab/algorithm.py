"""Two pictures of the algorithm, drawn from the first training step of a stored run, made again.

    python -m lab.figure      (draws them with all others, in docs/)

step.png   the whole step: from episodes to updated weights, with its numbers
row.png    one episode as a row of the batch: which tokens are trained

Reading order: `first_step`, then `draw_step` and `draw_row`. In both pictures a green
token is sampled by the policy and trained, and a grey token is context and not trained.

Tests: `python -m pytest tests/long/test_pictures.py`.
"""

import io
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from PIL import Image

from lab import archive
from minragen import starpo, train
from minragen.run import start
from minragen.trajectory import make_batch

# Okabe and Ito's colours, which the colour-blind tell apart.
SAMPLED, CONTEXT, PADDING = "#009E73", "#CFCFCF", "#FFFFFF"
SUCCESS, FAILURE, KEPT, LEFT_OUT = "#A05195", "#F1E4EF", "#555555", "#F3F3F3"
SIGNED = LinearSegmentedColormap.from_list("signed", (
    "#B34700", "#F7A35C", "#FFFFFF", "#6BAED6", "#084594"))
SURPRISE = LinearSegmentedColormap.from_list("surprise", ("#FFFFFF", "#6A3D9A"))
MOST = 2.0  # advantages beyond this have the darkest colour
MEMBERS, ROW = (8, 9, 10, 11), 9  # of the batch: four members of group 1, as in the course
ARROW = {"arrowstyle": "-|>", "lw": 1.6, "color": "#444444", "mutation_scale": 16}
LEGEND = {"fontsize": 10.5, "frameon": False, "borderpad": 0, "handlelength": 1.5}


def draw(folder, run):
    """Draw the pictures in a folder from the first step of a stored run."""
    step = first_step(run)
    for name, picture in PICTURES.items():
        picture(step, folder / name)


def first_step(run):
    """What the first training step of a stored run makes, part after part."""
    config = archive.config(run)
    groups = start.build_groups(config)
    learner = start.build_learner(config, groups, say=lambda line: None)
    batch = make_batch(train.roll_out(learner, groups["train"], config))
    kept, metrics = train.choose_groups(learner, batch, config)
    trained, _ = train.compute_targets(
        learner, batch.take(kept[batch.group_ids].nonzero()[:, 0]), config)
    minis = list(train.mini_batches(trained, config, 1))
    return SimpleNamespace(
        config=config, batch=batch, kept=kept.numpy(), trained=trained, minis=minis,
        std=starpo.group_std(batch.episode_returns, batch.group_ids).numpy(),
        tokenizer=learner.policy.tokenizer,
        metrics=metrics | train.update(learner, trained, config, 1))


def kinds(batch):
    """(B, T, 3) colours: sampled, context or padding."""
    image = np.full((*batch.tokens.shape, 3), to_rgb(CONTEXT))
    image[batch.response_mask.numpy()] = to_rgb(SAMPLED)
    image[~batch.attention_mask.numpy()] = to_rgb(PADDING)
    return image


def signed(batch):
    """(B, T, 3) colours: the advantages of sampled tokens, context or padding."""
    image, sampled = kinds(batch), batch.response_mask.numpy()
    image[sampled] = [colour_of(a) for a in batch.advantages[batch.response_mask].tolist()]
    return image


def colour_of(advantage):
    """Blue if it is positive, orange if negative, darker the larger it is; never as pale as 0."""
    share = 0.35 + 0.5 * min(1, abs(advantage) / MOST)
    return SIGNED(0.5 + 0.5 * share * np.sign(advantage))[:3]


# ---- The whole step ------------------------------------------------------------------------------
def draw_step(step, path):
    """One training step as a flow of seven stages, and the meaning of the colours."""
    figure = plt.figure(figsize=(11, 6.3))
    stages = (_play, _pad, _filter, _advantages, _mini_batches, _loss, _update, _colours)
    for number, stage in enumerate(stages):
        line, column = divmod(number, 4)
        left, bottom, width, height = 0.02 + 0.25 * column, 0.675 - 0.505 * line, 0.19, 0.215
        axis = figure.add_axes((left, bottom, width, height))
        axis.set(xticks=[], yticks=[])
        title, code, caption = stage(step, axis)
        for y, text, style in ((1.2, title, {"fontsize": 12, "fontweight": "bold"}),
                               (1.06, code, {"family": "monospace", "color": "#555555"}),
                               (-0.07, caption, {"va": "top", "linespacing": 1.3})):
            axis.text(0, y, text, transform=axis.transAxes, **{"fontsize": 10, **style})
        if column < 3 and number < 6:
            middle = bottom + height / 2
            figure.add_artist(FancyArrowPatch((left + width + 0.004, middle),
                                              (left + 0.246, middle), **ARROW))
    for begin, end, style in (((0.865, 0.545), (0.865, 0.522), "-"), ((0.865, 0.522),
                              (0.115, 0.522), "-"), ((0.115, 0.522), (0.115, 0.49), "-|>")):
        figure.add_artist(FancyArrowPatch(begin, end, **{**ARROW, "arrowstyle": style,
                                                         "shrinkA": 0, "shrinkB": 0}))
    _save(figure, path)


def _save(figure, path):
    """Write a PNG with a palette, which takes a third of the bytes."""
    figure.savefig(file := io.BytesIO(), dpi=130)
    plt.close(figure)
    Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def _play(step, axis):
    size, returns = step.config.group_size, step.batch.episode_returns.numpy()
    won = returns.reshape(-1, size) > 0.5
    axis.imshow(np.where(won[..., None], to_rgb(SUCCESS), to_rgb(FAILURE)), aspect="auto")
    axis.hlines(np.arange(0.5, len(won) - 1), -0.5, size - 0.5, color="white", lw=0.8)
    axis.vlines(np.arange(0.5, size - 1), -0.5, len(won) - 0.5, color="white", lw=0.8)
    return "1. Play", "collect", (
        f"P = {len(won)} maps, one in each line,\nby G = {size} episodes: {won.size} in all.\n"
        f"{won.sum()} reach the goal (dark).")


def _pad(step, axis):
    b, t = step.batch.tokens.shape
    _rows(axis, [kinds(step.batch)[::16]])
    return "2. Pad to a batch", "make_batch", (
        f"B = {b} rows of up to T = {t}\ntokens, {step.batch.attention_mask.sum():,} in all; "
        f"{step.batch.response_mask.sum():,}\nare sampled (16 rows are drawn).")


def _rows(axis, images, apart=2):
    """Draw rows of colours with white between them, and more of it between the images."""
    width = max(image.shape[1] for image in images)
    parts = []
    for image in images:
        padded = np.pad(image, ((0, 0), (0, width - image.shape[1]), (0, 0)), constant_values=1)
        parts += [np.repeat(padded, 4, axis=0), np.ones((4 * apart, width, 3))]
        parts[-2][::4] = 1
    axis.imshow(np.vstack(parts[:-1]), aspect="auto", interpolation="nearest")
    axis.set_frame_on(len(images) == 1)


def _filter(step, axis):
    for group, (height, kept) in enumerate(zip(step.std, step.kept)):
        axis.bar(group, height, color=KEPT if kept else LEFT_OUT, edgecolor="#555555", lw=0.6,
                 hatch="" if kept else "////")
    axis.set_ylim(0, 0.6)
    axis.spines[["top", "right"]].set_visible(False)
    return "3. Keep groups that differ", "filter_groups", (
        "Bars: std of a group's returns; none\nif all are equal. Hatched: left out by\n"
        f"the filter. {step.kept.sum()} of {len(step.kept)} kept: {len(step.trained)} rows.")


def _advantages(step, axis):
    _rows(axis, [signed(step.trained)[::13]])
    return "4. Advantages", "compute_targets", (
        "A = (return - mean) / std of the\ngroup, on all sampled tokens of the\n"
        "row (16 rows are drawn).")


def _mini_batches(step, axis):
    _rows(axis, [signed(mini)[::13] for mini in step.minis])
    counts = [f"{mini.response_mask.sum():,}" for mini in step.minis]
    return "5. Random mini-batches", "mini_batches", (
        f"{len(counts)} mini-batches of {len(step.minis[0])} rows, with\n{', '.join(counts[:-1])} "
        f"and {counts[-1]}\nsampled tokens (4 rows of each\nare drawn).")


def _loss(step, axis):
    low, high = 1 - step.config.clip_low, 1 + step.config.clip_high
    ratio = np.linspace(0.5, 1.6, 200)
    for sign in (1, -1):
        loss = np.maximum(-sign * ratio, -sign * ratio.clip(low, high))
        axis.plot(ratio, loss, color=colour_of(sign * MOST), lw=2.5)
        axis.text(1.02, -0.42 * sign, f"A = {sign:+}", fontsize=10, color=colour_of(sign * MOST),
                  fontweight="bold", va="center")
    axis.set(ylim=(-1.75, 1.75), xlim=(0.5, 1.6))
    for x in (low, 1, high):
        axis.axvline(x, color="#BBBBBB", lw=0.8, zorder=0)
        axis.text(x, -1.7, f"{x:.2f}", fontsize=9, ha="center", va="bottom",
                  bbox={"color": "white", "pad": 0.5})
    axis.spines[["top", "right"]].set_visible(False)
    return "6. Clipped loss of a token", "policy_losses", (
        "x: ratio p(now) / p(at sampling).\nFlat, so no gradient, where clipped.\n"
        f"Plus {step.config.kl_coef:g} KL, minus {step.config.entropy_coef:g} entropy;\n"
        "mean over sampled tokens.")


def _update(step, axis):
    axis.set_facecolor("#F3F3F3")
    axis.text(0.06, 0.5, f"{len(step.minis)} AdamW steps, one for\neach mini-batch\n"
              f"lr {step.config.lr:g}\ngradient norm {step.metrics['grad_norm']:.2f}\n"
              f"clipped tokens {step.metrics['clip_fraction']:.1%}",
              transform=axis.transAxes, fontsize=10, va="center", linespacing=1.45)
    return "7. Update the weights", "optimizer.step", (
        "Micro-batches bound memory and\nchange nothing. Then 1 again,\nwith new maps.")


def _colours(step, axis):
    axis.set_axis_off()
    axis.legend(handles=_patches((
        (SAMPLED, "sampled by the policy:\ntrained"),
        (colour_of(MOST), "the same, A > 0:\nmade more likely"),
        (colour_of(-MOST), "the same, A < 0:\nmade less likely\n(paler: |A| smaller)"),
        (CONTEXT, "prompt, observation:\nread, not trained"), (PADDING, "padding"))),
        loc="upper left", bbox_to_anchor=(0, 1.3), labelspacing=0.7, **LEGEND)
    return "", "", ""


def _patches(labels):
    return [Patch(facecolor=colour, edgecolor="#555555", label=label) for colour, label in labels]


# ---- One row -------------------------------------------------------------------------------------
def draw_row(step, path):
    """One episode of two turns as a row of the batch: its tokens, and what each field holds."""
    batch, row = _members(step), MEMBERS.index(ROW)
    texts = [repr(step.tokenizer.decode(token))[1:-1] for token in batch.tokens[row]]
    sampled, turns = batch.response_mask[row].tolist(), batch.turn_ids[row].tolist()
    starts = [i for i, (one, two) in enumerate(pairwise(sampled), 1) if two and not one]
    stops = [texts.index("</answer>", i) + 1 for i in starts]
    answers = [texts.index("<answer>", i) for i in starts]
    shown = [*range(3), None, *range(starts[0] - 3, stops[0] + 8), None,
             *range(starts[1] - 3, stops[1])]  # None: some are left out
    figure, axis = plt.subplots(figsize=(11, 5.3))
    figure.subplots_adjust(0, 0, 0.998, 1)
    names = ("token", "response_mask", "turn_ids", "sample_logprobs\n(nats)", "advantages")
    heights, tops = (1.9, 0.5, 0.5, 0.8, 0.8), np.array((7, 4.95, 4.3, 3.65, 2.7))
    for name, top, height in zip(names, tops, heights):
        axis.text(-0.4, top - height / 2, name, ha="right", va="center", fontsize=10.5,
                  family="monospace" if name != "token" else None)
    for x, i in enumerate(shown):
        if i is None:
            axis.text(x + 0.5, 6, "...", ha="center", fontsize=12)
            continue
        logprob, advantage = (float(field[row, i]) for field in (
            batch.sample_logprobs, batch.advantages))
        cells = ((SAMPLED if sampled[i] else CONTEXT, texts[i]),
                 (SAMPLED, "1"), ("#BBBBBB", str(turns[i])),
                 (SURPRISE(min(1, -logprob / MOST)), f"{logprob:.2f}".replace("-0.00", "0.00")),
                 (colour_of(advantage), f"{advantage:+.2f}")) if sampled[i] else (
                 (CONTEXT, texts[i]), ("white", "0"), ("white", "-1"), ("white", "0"),
                 ("white", "0"))
        for (colour, text), top, height in zip(cells, tops, heights):
            axis.add_patch(Rectangle((x + 0.04, top - height), 0.92, height, facecolor=colour,
                                     edgecolor="#888888", lw=0.5))
            dark = sum(to_rgb(colour)) < 1.5
            axis.text(x + 0.5, top - height / 2, text, ha="center", va="center", fontsize=9.5,
                      rotation=90 if height > 0.6 else 0, color="white" if dark else
                      "black" if sampled[i] or top == tops[0] else "#999999")
    parts = [(0, starts[0], f"prompt: {starts[0]} tokens"), (starts[0], answers[0], "thought"),
             (answers[0], stops[0], "answer"),
             (stops[0], starts[1], f"observation: {starts[1] - stops[0]} tokens"),
             (starts[1], answers[1], "thought"), (answers[1], stops[1], "answer")]
    for begin, end, name in parts:
        _bracket(axis, shown.index(begin), shown.index(end - 1) + 1, 7.15, name)
    for begin, end in ((0, starts[0]), (starts[0], stops[0]), (stops[0], starts[1]),
                       (starts[1], stops[1])):
        on = sampled[begin]
        _bracket(axis, shown.index(begin), shown.index(end - 1) + 1, 1.7,
                 f"trained: the {end - begin} tokens\nof reply {turns[begin] + 1}" if on else
                 "not trained", SAMPLED if on else "#777777")
    axis.set(xlim=(-8.6, len(shown)), ylim=(0.6, 8.1))
    axis.set_axis_off()
    _save(figure, path)


def _bracket(axis, left, right, y, text, colour="black"):
    """A bracket over [left, right] with its text above; below, if it has a colour."""
    side = 1 if colour == "black" else -1
    axis.plot([left + 0.1, left + 0.1, right - 0.1, right - 0.1],
              [y, y + 0.12 * side, y + 0.12 * side, y], color=colour, lw=1.8)
    axis.text((left + right) / 2, y + 0.25 * side, text, ha="center", color=colour,
              va="bottom" if side > 0 else "top", fontsize=10.5,
              fontweight="bold" if colour == SAMPLED else None)


def _members(step):
    """Four members of a group with the advantages that they have as a group of four, as in
    docs/course/3-step.md."""
    batch = step.batch.take(torch.tensor(MEMBERS))
    return replace(batch, advantages=batch.to_tokens(starpo.group_advantages(
        batch.episode_returns, batch.group_ids)))


PICTURES = {"step.png": draw_step, "row.png": draw_row}
