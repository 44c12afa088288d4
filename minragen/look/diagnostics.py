"""Whether a run can begin, and whether it learns or collapses: reasoning, warnings, gradients.

Success shows a collapse late; these metrics show it earlier. docs/metrics.md defines them all.
Reading order: `diagnose`, `collapse_metrics`, `regime`, `warnings_of`, `gradient_metrics`; last
`first_look`, before the first update.

Axes: M rows (reasonings), N columns (distinct prompts), P groups.

Entropy alone does not show template collapse: the wording may vary at random without depending on
the prompt. The chain rule H(Z) = I(X;Z) + H(Z|X) separates the two (RAGEN-2, section 3), with
prompt X and reasoning Z:

    S[i,j] = sum_t log p(z_it | x_j, z_i<t)      matched a_i = S[i, own(i)]
    b_i    = log sum_j w_j exp S[i,j]            w_j = share of the rows that have prompt j
    I(X;Z) = mean(a - b)     H(Z|X) = -mean a     H(Z) = -mean b
Here p(z) is the probability that the reply begins with z. The estimate sums over all prompts and
samples only the reasonings; it may be negative by chance and never exceeds H(w). With the suffix
`_per_token`, S[i,j] / |z_i| replaces S[i,j]: comparable between lengths, not information in nats.

Tests: `python -m pytest tests/test_diagnostics.py`.
"""

import functools
import math
import re
import sys
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from minragen import starpo
from minragen.cache import micro_batches
from minragen.train import World, add_loss_weights, hash_seed, policy_losses

EMA = 0.9  # weight of the past in the averaged marginal_std
ZSCORE_EPS = 1e-3  # nats, added to a standard deviation that may be 0
TIE = 1e-5  # nats per token: scores this close are equal, float32 resolves no finer

LOW_ENTROPY = 0.5  # H(Z|X) per token is low below this share of its first value ...
NO_ENTROPY = 0.05  # ... or below this many nats per token
LOW_MI = 0.25  # I(X;Z) is low below this share of its first value ...
CHANCE_ERRORS = 2  # ... or if retrieval is less than so many standard errors above chance
LEAST_THINKING, LEAST_COLUMNS = 0.5, 4  # with less there is no regime

ALONE = World()
FEW_VALID = 0.05  # share of valid replies below which RL has little to begin with
WINDOW = 5  # steps averaged at the beginning of a run and now
LESS_STD = 0.6  # reward_std below this share of its first value warns,
MORE_ENTROPY, MORE_VARIED = 1.5, 3  # and so do entropy and H(Z|X) above these multiples ...
RISEN, SOLVED = 0.1, 0.9  # ... unless success has risen so much, or is so high
VARIED = "first_turn/conditional_entropy_per_token"
REARM = 20  # steps that a condition must be false before it warns again


# ---- What a run asks for -------------------------------------------------------------------------
def diagnose(learner, config, step, trajectories, history):
    """How varied the replies are, every step; how much they depend on the prompt, when due."""
    if "reasoning" not in learner.frame.parts:
        return {}
    pairs, turns = reasoning_pairs(learner.frame, trajectories)
    metrics = {"valid_thinking": len(pairs) / max(turns, 1)}
    if pairs:
        metrics["distinct_3"] = distinct_ngrams([p.reasoning for p in pairs])
    if due(step, config.diagnose_every):
        metrics |= collapse_metrics(
            learner.policy, pairs, learner.ema, hash_seed(config.seed, step),
            temperature=config.temperature, token_budget=config.token_budget,
            world=learner.world)
        first = next((line for line in history if "first_turn/mi" in line), metrics)
        metrics["regime"] = regime(first, metrics)
    return metrics


def diagnose_update(learner, config, step, batch):
    """Gradient norms by reward std, when due. batch: with its targets"""
    if not due(step, config.gradients_every):
        return {}
    scores = starpo.group_std(*map(batch.by_episode, (batch.episode_returns, batch.group_ids)))
    return gradient_metrics(
        learner.policy.model, add_loss_weights(batch, config),
        lambda part: policy_losses(learner.policy, part, config)[0], scores,
        config.token_budget)


def due(step, every):
    """Whether `step` is 1 or a multiple of `every`; 0: never."""
    return every > 0 and (step == 1 or step % every == 0)


# ---- Prompt and reasoning ------------------------------------------------------------------------
class Pair(NamedTuple):
    """One turn: all ids before its first sampled one, and the sampled ids before `</think>`."""

    trajectory: int
    turn: int
    prompt: tuple
    reasoning: tuple


def reasoning_pairs(frame, trajectories):
    """The Pairs of all turns with a reasoning, and the number of all turns.

    Without a closed tag, or with only blanks before it, there is no reasoning. VAGEN's observation
    and prediction are part of it.
    """
    @functools.cache  # replies repeat
    def reasoning_of(reply):
        ids = reply[:end_of_thought(frame, reply)]
        return ids if frame.tokenizer.decode(ids).strip() else ()

    pairs, turns = [], 0
    for i, trajectory in enumerate(trajectories):
        for sequence in trajectory.sequences:
            for turn, last in sequence.last_of_turn.items():
                turns += 1
                start = sequence.turn_ids.index(turn)  # a reply is one stretch of ids
                if reasoning := reasoning_of(tuple(sequence.tokens[start:last + 1])):
                    pairs.append(Pair(i, turn, tuple(sequence.tokens[:start]), reasoning))
    return pairs, turns


def end_of_thought(frame, ids):
    """The index of the first id that the tag after the thought touches, 0 without one. As in the
    parser, a `</think>` that a thought quotes does not end it if another one stands before
    `<answer>`."""
    decode = frame.tokenizer.decode
    text = decode(ids)
    found = re.search(r"</think>\s*<answer>", text) or re.search("</think>", text)
    if not found:
        return 0
    return bisect_right(range(len(ids)), found.start(), key=lambda n: len(decode(ids[:n + 1])))


def distinct_ngrams(sequences, n=3, draws=256):
    """The expected share of distinct n-grams among `draws` of them, drawn without replacement.

    Distinct / all falls as a batch grows; among a fixed number of draws it does not (rarefaction;
    Hurlbert 1971). With c_g the count of n-gram g and C the count of all (at least `draws`):

        E[distinct] / draws = sum_g (1 - binom(C - c_g, draws) / binom(C, draws)) / draws
    With fewer n-grams all are drawn. A sequence shorter than n is one n-gram.

    >>> distinct_ngrams([(1, 2, 3, 4), (1, 2, 3)])      # 123 twice, 234 once
    0.6666666666666666
    """
    counts = Counter(gram for s in sequences
                     for gram in (zip(*(s[k:] for k in range(n))) if len(s) >= n else [s]))
    total = sum(counts.values())
    draws = min(draws, total)
    # Many n-grams share a count: one term for each count.
    expected = sum(grams * (1 - math.comb(total - count, draws) / math.comb(total, draws))
                   for count, grams in Counter(counts.values()).items())
    return expected / max(draws, 1)


# ---- Mutual information --------------------------------------------------------------------------
def collapse_metrics(policy, pairs, ema, seed=0, num_samples=64, temperature=1.0,
                     token_budget=8192, world=ALONE):
    """The metrics `first_turn/...` (first turns) and `trajectory/...` (turns of all depths).

    pairs: of `reasoning_pairs`
    ema: {name: moving average}, {} at first; advanced in place, kept in the checkpoint
    seed: of the choice of rows; no other generator is touched
    num_samples: rows of each of the two, at most. With fewer than two prompts it has no metrics.
    temperature: of the sampling, so that p is what was sampled from (before top_k and top_p)
    """
    rng, metrics = np.random.default_rng(seed), {}
    for name, draw in (("first_turn", first_turns), ("trajectory", trajectory_uniform)):
        began = time.perf_counter()
        rows = draw(pairs, num_samples, rng)
        # Equal prompts are one column, and equal reasonings are scored once.
        prompts = {x: j for j, x in enumerate(dict.fromkeys(p.prompt for p in rows))}
        reasonings = {z: i for i, z in enumerate(dict.fromkeys(p.reasoning for p in rows))}
        if len(prompts) < 2:
            continue
        scores = score_matrix(policy, list(prompts), list(reasonings), temperature, token_budget,
                              world)
        scores = scores[[reasonings[p.reasoning] for p in rows]]
        own = torch.tensor([prompts[p.prompt] for p in rows])
        per_token = scores / torch.tensor([[len(p.reasoning)] for p in rows])
        shares = own.bincount().double() / len(own)
        found = {"mi_upper_bound": float(torch.special.entr(shares).sum()),
                 **retrieval(per_token, own), "rows": len(rows), "columns": len(prompts)}
        for suffix, matrix in (("", scores), ("_per_token", per_token)):
            known = information(matrix, own)
            std, key = known["marginal_std"], f"{name}/marginal_std{suffix}"
            ema[key] = EMA * ema.get(key, std) + (1 - EMA) * std
            known |= {"marginal_std_ema": ema[key],
                      "mi_zscore_ema": known["mi"] / (ema[key] + ZSCORE_EPS)}
            found |= {key + suffix: value for key, value in known.items()}
        found["seconds"] = time.perf_counter() - began
        metrics |= {f"{name}/{key}": value for key, value in found.items()}
    return metrics


def first_turns(pairs, num_samples, rng):
    """The first turns of all trajectories; a random subset if there are more than num_samples."""
    chosen = [p for p in pairs if p.turn == 0]
    if len(chosen) > num_samples:
        chosen = [chosen[i] for i in sorted(rng.choice(len(chosen), num_samples, replace=False))]
    return chosen


def trajectory_uniform(pairs, num_samples, rng):
    """Draw a trajectory, then one of its turns: a draw over turns would favour long episodes."""
    left, drawn = {}, []
    for p in pairs:
        left.setdefault(p.trajectory, []).append(p)
    while left and len(drawn) < num_samples:
        trajectory = list(left)[rng.integers(len(left))]
        turns = left[trajectory]
        drawn.append(turns.pop(rng.integers(len(turns))))
        if not turns:
            del left[trajectory]
    return drawn


@torch.no_grad()
def score_matrix(policy, prompts, reasonings, temperature=1.0, token_budget=8192, world=ALONE):
    """S[i, j] = log p(reasoning i | prompt j), (M, N) float64 on the CPU.

    Every pair is a row of the learner's own passes; fast/prefix_tree.py computes each prompt once.
    Of a pair that is longer than the model's positions the beginning is left out.

    prompts, reasonings: non-empty sequences of ids
    token_budget: tokens in one forward pass; the processes of `world` share the passes
    """
    most = max_positions(policy.model)
    pairs = [([*x, *z][-most:], len(z)) for z in reasonings for x in prompts]
    tokens = pad_sequence([torch.tensor(ids) for ids, _ in pairs], batch_first=True)
    lengths, said = torch.tensor([(len(ids), n) for ids, n in pairs]).T
    place = torch.arange(tokens.shape[1])
    mask = (place < lengths[:, None]) & (place >= (lengths - said)[:, None])
    scores = torch.zeros(len(pairs), dtype=torch.float64)
    for part in policy.micro_batches(tokens, lengths, token_budget, world.rank, world.size):
        logprobs, _ = policy.logprobs(tokens[part].to(policy.device), mask[part].to(policy.device),
                                      temperature)
        scores[part] = logprobs.cpu().double().sum(dim=1)
    return world.sum(scores).view(len(reasonings), len(prompts))


def max_positions(model):
    """The maximum length of a conversation: the model's, or longrope's original length. Beyond that
    its frequencies change, and cached keys would be wrong."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    original = [part["original_max_position_embeddings"] for part in (rope, *rope.values())
                if isinstance(part, dict) and part.get("rope_type") == "longrope"]
    return min([getattr(config, "max_position_embeddings", sys.maxsize), *original])


def information(scores, own):
    """Information and entropies of a score matrix, by the module's equations.

    scores: (M, N) float64, log p      own: (M,) int64, the column of each row's own prompt
    returns: {mi, conditional_entropy, reasoning_entropy, marginal_std, mi_zscore}

    >>> round(information(torch.tensor([[0.0, -99.0], [-99.0, 0.0]]), torch.arange(2))["mi"], 4)
    0.6931
    """
    weights = own.bincount(minlength=scores.shape[1]).double() / len(own)
    matched = scores.double().gather(1, own[:, None])[:, 0]
    marginal = (scores.double() + weights.log()).logsumexp(dim=1)
    mi, std = float((matched - marginal).mean()), float(marginal.std(correction=0))
    return {"mi": mi, "conditional_entropy": -float(matched.mean()),
            "reasoning_entropy": -float(marginal.mean()), "marginal_std": std,
            "mi_zscore": mi / (std + ZSCORE_EPS)}


def retrieval(scores, own):
    """How often a row's own prompt is among the k columns that make it most probable.

    Equal scores are ranked at random, in expectation: with g columns above the own one and e equal
    to it, itself included, P(rank <= k) = (k - g) / e, clipped to [0, 1].

    scores: (M, N), per token      own: (M,)
    returns: {retrieval, retrieval_chance, retrieval@2, ...} for k < N
    """
    margin = scores - scores.gather(1, own[:, None])
    above, equal = (margin > TIE).sum(dim=1), (margin.abs() <= TIE).sum(dim=1)
    metrics = {}
    for k in (1, 2, 4, 8):
        if k < scores.shape[1]:
            at = "" if k == 1 else f"@{k}"
            metrics[f"retrieval{at}"] = float(((k - above) / equal).clamp(0, 1).mean())
            metrics[f"retrieval_chance{at}"] = k / scores.shape[1]
    return metrics


# ---- Regime and warnings -------------------------------------------------------------------------
def regime(first, now):
    """The label of a measurement, compared with the first measurement of the run.

                    high I(X;Z)   low I(X;Z)
        high H(Z|X) diverse       template collapse: wording varies, the prompt is ignored
        low H(Z|X)  compressed    low-entropy collapse: one text for every prompt
    low H: conditional_entropy_per_token below LOW_ENTROPY of its first value, or below NO_ENTROPY
    (where `tiny` begins; half of so little is noise). low I: mi below LOW_MI of its
    first value, or retrieval less than CHANCE_ERRORS standard errors above chance. RAGEN-2 names
    the four and gives no thresholds.

    first, now: metrics of two steps, with `valid_thinking`
    returns: one of the four, or "undetermined": not measured, too little reasoning, few prompts
    """
    def value(metrics, name):
        found = metrics.get(f"first_turn/{name}")
        return math.nan if found is None else found

    first_entropy, entropy = (value(m, "conditional_entropy_per_token") for m in (first, now))
    if (math.isnan(first_entropy + entropy) or value(now, "columns") < LEAST_COLUMNS
            or now.get("valid_thinking", 0.0) < LEAST_THINKING):
        return "undetermined"
    chance = value(now, "retrieval_chance")
    error = math.sqrt(chance * (1 - chance) / value(now, "rows"))
    low_mi = (value(now, "mi") < LOW_MI * value(first, "mi")
              or value(now, "retrieval") < chance + CHANCE_ERRORS * error)
    if entropy < max(LOW_ENTROPY * first_entropy, NO_ENTROPY):
        return "low-entropy collapse" if low_mi else "compressed"
    return "template collapse" if low_mi else "diverse"


def first_look(played, config):
    """Lines for the console: what the policy does before the first update; warnings if it is poor.

    RL reinforces what some episodes do better than others. So there must be valid replies, a
    success among them, and, if members of a group are compared, members that earn differently.
    """
    valid, solved = (fmean(values) for values in zip(*(
        (t.metrics.get("valid", 0.0), t.success) for t in played)))
    returns = {}
    for t in played:
        returns.setdefault(t.group_id, set()).add(t.episode_return)
    apart = sum(len(distinct) > 1 for distinct in returns.values())
    lines = [f"start     before the first update: valid replies {valid:.2f}, success {solved:.2f}, "
             f"groups with different returns {apart} of {len(returns)}"]
    compares = starpo.ESTIMATORS[config.advantages][0] == "group" or config.filter != "none"
    if valid < FEW_VALID or not solved:
        lines.append("warning   RL can only reinforce what is sometimes done. Begin with "
                     "--warmup-steps 40, an easier option of the environment, or "
                     "--response-format no_think.")
    elif not apart and compares:
        lines.append("warning   all members of each group earn the same, so there is nothing to "
                     "learn. Take harder instances or a higher temperature.")
    return lines


def warnings_of(history):
    """The warnings after the last step of a run: a list of sentences, mostly empty.

    Three signs of a collapse, each compared with the first WINDOW steps. While a run learns they
    mean nothing: a solved task has little reward_std, too. docs/metrics.md says how often they are
    right. A warning is given when its condition becomes true, and again only after REARM steps in
    which it was false.

    history: the lines of metrics.jsonl so far; only those of training steps (`reward_std`) count
    """
    steps = [line for line in history if "reward_std" in line]
    if not steps or steps[-1] is not history[-1]:
        return []
    earlier = range(1, min(REARM + 1, len(steps)))
    return [sentence for condition, sentence in _true_conditions(steps).items()
            if not any(condition in _true_conditions(steps[:-k]) for k in earlier)]


def _true_conditions(steps):
    """{metric: sentence} of what is true at the last of these steps. A mean of nothing is nan, and
    nothing is true of it."""
    if len(steps) < 2 * WINDOW:
        return {}
    first, now = ({metric: fmean(_values(part, metric) or [math.nan])
                   for metric in ("success", "reward_std", "entropy", VARIED)}
                  for part in (steps[:WINDOW], steps[-WINDOW:]))
    gain = now["success"] - first["success"]
    # A rise from almost no entropy is no sign.
    rise = {metric: now[metric] / max(first[metric], NO_ENTROPY) for metric in ("entropy", VARIED)}
    signs = {
        "reward_std": (now["reward_std"] < LESS_STD * first["reward_std"] and gain <= 0,
                       "the members of a group earn alike, so there is little to learn from"),
        "entropy": (rise["entropy"] > MORE_ENTROPY and gain < RISEN,
                    "replies are becoming incoherent"),
        VARIED: (rise[VARIED] > MORE_VARIED and gain < RISEN,
                 "the reasoning varies more and helps no more")}
    return {metric: f"{metric} is {now[metric]:.3g} over the last {WINDOW} steps, it began at "
                    f"{first[metric]:.3g}, and success has changed by {gain:+.2f}: {meaning}. "
                    f"Lower lr, or raise mini_batch."
            for metric, (true, meaning) in signs.items() if true and now["success"] < SOLVED}


def early_stop(history):
    """Why RAGEN V2's trainer would end the run after these lines of metrics.jsonl, or "".

        reward std   each of the last 10 steps is below a tenth of the mean of the first 10
        success      of an environment: 5 validations in a row below 0.01 or a tenth of the best
    Only steps that trained on some group count, with their validations.
    """
    trained = [line for line in history if line.get("groups_kept")]
    stds = _values(trained, "reward_std")
    if len(stds) >= 20 and max(stds[-10:]) < 0.1 * fmean(stds[:10]):
        return (f"for 10 steps the reward std has been below a tenth of {fmean(stds[:10]):.3g}, "
                f"its mean of the first 10.")
    names = {name for line in trained for name in line if re.fullmatch("val/(.*/)?success", name)}
    of_each = names - {"val/success"}  # only a mixture has more than the mean
    for name in sorted(of_each or names):
        validated = _values(trained, name)
        best = max(validated, default=0.0)
        if len(validated) >= 5 and max(validated[-5:]) < max(0.01, 0.1 * best):
            return f"{name} was at most {max(validated[-5:]):.3g} in 5 validations in a row."
    return ""


def _values(steps, metric):
    """The finite values of a metric, which a step may lack; nan is None in JSON."""
    values = (s.get(metric) for s in steps)
    return [v for v in values if v is not None and math.isfinite(v)]


# ---- Gradients by reward std ---------------------------------------------------------------------
def gradient_metrics(model, batch, losses_of, reward_std, token_budget, num_buckets=6):
    """Gradient norm per loss token of each term of the objective, in buckets of reward std.

    The signal of a group grows with its reward std, the pull of the regularisers does not: where
    the signal is smaller, the update is mostly noise and regularisation (RAGEN-2, section 4).
    Nothing is left behind: no `.grad`, no optimizer state, no hook fires.

    batch: a whole update with its loss weights
    losses_of: part of the batch -> {"task": scalar, "entropy": scalar, ...}, each the part's share
        of the weighted sum, so that the parts of a bucket add up to its exact gradient
    reward_std: (P,) of each group, in the order of group id
    num_buckets: by ascending reward std, with nearly as many groups each; no more than groups
    returns: `gradient/...`; a bucket without loss tokens has sizes and no norms
    """
    # Sums over tokens; the norms are divided by the tokens of their bucket.
    batch = replace(batch, loss_weights=batch.loss_weights * int(batch.response_mask.sum()))
    parameters = [p for p in model.parameters() if p.requires_grad]
    ids, metrics, everything = batch.group_ids.unique(), {}, Counter()
    reward_std = reward_std[ids]
    order = reward_std.argsort(stable=True)
    for number, groups in enumerate(order.tensor_split(min(num_buckets, len(order))), 1):
        bucket = batch.take(torch.isin(batch.group_ids, ids[groups]).nonzero()[:, 0])
        gradients = Counter()
        for rows in micro_batches(bucket.tokens, bucket.lengths, token_budget):
            gradients.update(_gradients(parameters, losses_of(bucket.take(rows))))
        metrics |= _gradient_row(f"gradient/bucket_{number}", gradients, bucket, reward_std[groups])
        everything.update(gradients)
    return metrics | _gradient_row("gradient/all", everything, batch, reward_std)


def _gradients(parameters, losses):
    """{term: its gradient, a float32 vector (a bfloat16 sum loses small parts)}, without the terms
    that do not depend on the parameters."""
    live = [name for name, value in losses.items() if value.requires_grad]
    return {name: torch.cat([piece.flatten().float() for piece in torch.autograd.grad(
        losses[name], parameters, retain_graph=name != live[-1], materialize_grads=True)])
        for name in live}


def _gradient_row(prefix, gradients, batch, reward_std):
    """The metrics of a bucket: sizes, and of each term the norm of its gradient per token."""
    tokens = int(batch.response_mask.sum())
    metrics = {"groups": len(reward_std), "rows": len(batch), "tokens": tokens,
               "reward_std": float(reward_std.mean()), "reward_std_min": float(reward_std.min()),
               "reward_std_max": float(reward_std.max())}
    if tokens:
        metrics |= {term: float(gradient.norm()) / tokens for term, gradient in gradients.items()}
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
