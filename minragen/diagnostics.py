"""Is it learning or collapsing: what reasoning says about its prompt, and which gradients say so.

Success tells late. Four earlier signs, each of its own function:

    reply_metrics        every step, cheap: is there any reasoning, and does it repeat itself
    collapse_metrics     now and then: mutual information of prompt X and reasoning Z, retrieval
    regime, warnings_of  the numbers above as one label and as plain sentences
    gradient_metrics     now and then: how much of the gradient is reward, how much regulariser

Reading order: `reasoning_pairs` (what X and Z are), `score_matrix` (the only expensive part),
`information` and `retrieval` (the estimates), `regime`, `warnings_of`, `gradient_metrics`.

Axes: M rows (reasonings), N columns (distinct prompts), Q reasoning tokens side by side, P groups.

Entropy alone does not see template collapse: wording may vary at random while nothing in it depends
on the prompt. The chain rule H(Z) = I(X;Z) + H(Z|X) separates the two (RAGEN V2, section 3):

    S[i,j] = sum_t log p(z_it | x_j, z_i<t)      matched a_i = S[i, own(i)]
    b_i    = log sum_j w_j exp S[i,j]            w_j = share of the rows that have prompt j
    I(X;Z) = mean(a - b)     H(Z|X) = -mean a     H(Z) = -mean b
The event of which p is the probability is "the reply begins with z". The estimate is exact in the
prompts and samples only the reasonings; it may be negative by chance and never exceeds H(w).

The metrics are `first_turn/...` (first turns) and `trajectory/...` (turns of all depths); with the
suffix `_per_token` the same of S[i,j] / |z_i|: comparable between lengths, but a proxy, not
information. docs/metrics.md defines them all, with units and healthy ranges.

Deltas (from RAGEN V2's CollapseDetector and gradient analysis):
  1. Z is the sampled ids, in front of the tokens that `</think>` touches. There the text is
     stripped and tokenised on its own, which changes tokens at both ends.
  2. Columns are distinct prompts, weighted by their rows. There a pair drawn twice is two columns,
     and every column weighs the same: with unequal rows that adds KL(true mixture || uniform one)
     to the information. Here rows and columns have one distribution of X.
  3. No pair is drawn twice, and from a generator of our own.
  4. Each prompt goes through the model once; its keys serve all reasonings, which stand side by
     side behind it. There every pair of N x M is a whole sequence.
  5. Equal scores share the rank: who ignores the prompt retrieves at chance, whatever the order.
     Identical prompts are one class simply because they are one column.
  6. `mi` is the information of the sequence; there it is the length-normalised proxy.
  7. Buckets are as equal as can be (there the remainder goes to the last), each has one exact
     gradient over its own tokens (there: an average of mini-batch norms, scaled down in small
     buckets). Nothing is swallowed: what fails, raises.

Exercise: `python -m pytest tests/test_diagnostics.py`.
"""

import math
import time
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
import torch

from minragen.models import LOGIT_BUDGET, output_layer
from minragen.rollout import KVSlots, forward_slots

NUM_SAMPLES = 64  # rows of a score matrix
TOKEN_BUDGET = 8192  # padded tokens in one forward pass
PACK_TOKENS = 256  # reasoning tokens side by side; more would mostly compute masked attention
TAG = "</think>"
TAG_TAIL = 12  # tokens that the tag can be spread over, and a few more
EMA = 0.9  # weight of the past in the averaged marginal_std
ZSCORE_EPS = 1e-3  # nats, added to a standard deviation that may be 0
TIE = 1e-5  # nats per token: scores this close are equal, float32 resolves no finer
RETRIEVAL_RANKS = (1, 2, 4, 8)
NGRAM, NGRAM_DRAWS = 3, 256

LOW_ENTROPY = 0.5  # H(Z|X) per token below this share of its first value is low ...
NO_ENTROPY = 0.05  # ... and so is one below this many nats per token, whatever it began with
LOW_MI = 0.25  # I(X;Z) below this share of its first value is low ...
CHANCE_ERRORS = 2  # ... and so is retrieval less than so many standard errors above chance
LEAST_THINKING, LEAST_COLUMNS = 0.5, 4  # with less there is no regime

WINDOW = 10  # steps: beginning and end of a run are means over so many
SOLVED = 0.9  # mean success of a window from which on a lack of variety is no trap
STD_CLIFF = 0.1  # share of the first window's reward_std
ENTROPY_RISE, ENTROPY_COLLAPSE = 2.0, 0.2  # times the steps before; share of the first window's
GRADIENT_SPIKE = 4.0  # times the median of the steps before
REPETITION = 0.5  # share of the first window's distinct_3
FORM_LOST = 0.5  # share of the largest `valid` so far
RECENT, BEFORE = 3, 20  # steps: "now" and "the steps before" of rises and spikes
REARM = 20  # steps of silence after which a warning may be given again

NUM_BUCKETS = 6


# ==================================================================================================
# Prompt and reasoning


@dataclass(frozen=True)
class Pair:
    """One turn: all ids before its first sampled one, and the sampled ids before `</think>`."""

    trajectory: int
    turn: int
    prompt: tuple
    reasoning: tuple


def reasoning_pairs(frame, trajectories):
    """The turns that reasoned, and how many turns there were.

    A turn without a closed tag, or with nothing but blanks before it, has no reasoning. Of VAGEN's
    formats the reasoning is everything up to the tag, observation and prediction included.

    returns: list of Pair, number of turns
    raises: ValueError for a response format without thinking
    """
    if not frame.thinks:
        raise ValueError("nothing to measure: the response format has no reasoning. Choose one "
                         "that thinks, or leave the diagnostics out.")
    cut, pairs, turns = _Cut(frame), [], 0
    for i, trajectory in enumerate(trajectories):
        for sample in trajectory.samples:
            for turn in sorted(set(sample.turn_ids) - {-1}):
                start = sample.turn_ids.index(turn)
                # A reply is one stretch of ids.
                reply = tuple(sample.tokens[start:start + sample.turn_ids.count(turn)])
                reasoning = cut(reply)
                if reasoning:
                    pairs.append(Pair(i, turn, tuple(sample.tokens[:start]), reasoning))
                turns += 1
    return pairs, turns


class _Cut:
    """reply ids -> the ids that lie wholly before `</think>`, () if there is nothing to measure.

    Tokenizers merge `</`, `think` and `>` with their neighbours as they like, so the tag is looked
    for in text, and only behind a token with a ">" in it. From there, back: the last stretch that
    still spells the whole tag begins with the first token that it touches. Replies repeat, so each
    is cut once.
    """

    def __init__(self, frame):
        self.decode = frame.tokenizer.decode
        self.closers = set(frame.may_close.nonzero()[:, 0].tolist())
        self.seen = {}

    def __call__(self, reply):
        if reply not in self.seen:
            self.seen[reply] = self._cut(reply)
        return self.seen[reply]

    def _cut(self, reply):
        for end, token in enumerate(reply, 1):
            tail = reply[max(0, end - TAG_TAIL):end]
            if token in self.closers and TAG in self.decode(tail):
                start = next(n for n in range(end - 1, -1, -1) if TAG in self.decode(reply[n:end]))
                return reply[:start] if self.decode(reply[:start]).strip() else ()
        return ()


def reply_metrics(frame, trajectories):
    """`valid_thinking` and, where anything reasoned, `distinct_3`; for every step."""
    pairs, turns = reasoning_pairs(frame, trajectories)
    metrics = {"valid_thinking": len(pairs) / max(turns, 1)}
    if pairs:
        metrics[f"distinct_{NGRAM}"] = distinct_ngrams([p.reasoning for p in pairs])
    return metrics


def distinct_ngrams(sequences, n=NGRAM, draws=NGRAM_DRAWS):
    """Share of distinct n-grams that `draws` of them, drawn without replacement, would show.

    Distinct / all falls by itself as a batch grows, for there is only so much to say. Among a fixed
    number of draws it does not (rarefaction; Hurlbert 1971). With c_g the count of n-gram g and C
    the count of all:

        E[distinct] / draws = sum_g (1 - binom(C - c_g, draws) / binom(C, draws)) / draws
    With fewer n-grams than draws it is distinct / all. A sequence shorter than n is one n-gram.

    >>> distinct_ngrams([(1, 2, 3, 4), (1, 2, 3)])      # 123 twice, 234 once
    0.6666666666666666
    """
    counts = Counter(gram for s in sequences
                     for gram in (zip(*(s[k:] for k in range(n))) if len(s) >= n else [s]))
    total = sum(counts.values())
    draws = min(draws, total)
    expected = 0.0
    for count, grams in Counter(counts.values()).items():  # few n-grams have a count of their own
        log_missed = (-math.inf if draws > total - count else
                      math.lgamma(total - count + 1) - math.lgamma(total - count - draws + 1)
                      - math.lgamma(total + 1) + math.lgamma(total - draws + 1))
        expected += grams * -math.expm1(log_missed)
    return expected / max(draws, 1)


# ==================================================================================================
# Mutual information


def collapse_metrics(policy, frame, trajectories, ema, seed=0, num_samples=NUM_SAMPLES,
                     temperature=1.0, token_budget=TOKEN_BUDGET):
    """All metrics of both samplers (see the module's table).

    ema: {name: float}, {} at first; advanced in place, to be kept in the checkpoint
    seed: of the choice of rows (run seed and step, say); no other generator is touched
    num_samples: rows of each sampler; 0: all
    temperature: of the sampling, so that p is what was sampled from (before top_k and top_p)
    returns: {} without `*/...` of a sampler that has fewer than two prompts
    raises: ValueError for a response format without thinking
    """
    pairs, _ = reasoning_pairs(frame, trajectories)
    rng, metrics = np.random.default_rng(seed), {}
    for name, draw in (("first_turn", first_turns), ("trajectory", trajectory_uniform)):
        began = time.perf_counter()
        rows = draw(pairs, num_samples, rng)
        found = _measure(policy.model, rows, ema, name, temperature, token_budget)
        if found:
            found["seconds"] = time.perf_counter() - began
        metrics |= {f"{name}/{key}": value for key, value in found.items()}
    return metrics


def _measure(model, pairs, ema, name, temperature, token_budget):
    """The metrics of one sampler, names without its prefix; {} with fewer than two prompts."""
    prompts = {p: j for j, p in enumerate(dict.fromkeys(pair.prompt for pair in pairs))}
    # Equal reasonings have equal scores.
    said = {z: i for i, z in enumerate(dict.fromkeys(pair.reasoning for pair in pairs))}
    if len(prompts) < 2:
        return {}
    scores, tokens = score_matrix(model, list(prompts), list(said), temperature, token_budget)
    scores = scores[[said[pair.reasoning] for pair in pairs]]
    own = torch.tensor([prompts[pair.prompt] for pair in pairs])
    per_token = scores / torch.tensor([len(pair.reasoning) for pair in pairs])[:, None]
    weights = own.bincount(minlength=len(prompts)).double() / len(own)
    metrics = {"mi_upper_bound": -float((weights * weights.log()).sum())}
    for suffix, matrix in (("", scores), ("_per_token", per_token)):
        found = information(matrix, own)
        std, key = found["marginal_std"], f"{name}/marginal_std{suffix}"
        ema[key] = EMA * ema.get(key, std) + (1 - EMA) * std
        found["marginal_std_ema"] = ema[key]
        found["mi_zscore_ema"] = found["mi"] / (ema[key] + ZSCORE_EPS)
        metrics |= {key + suffix: value for key, value in found.items()}
    return metrics | retrieval(per_token, own) | {"rows": len(pairs), "columns": len(prompts),
                                                  "tokens": tokens}


def first_turns(pairs, num_samples, rng):
    """The first turns of all trajectories; a uniform subset if there are more than num_samples."""
    chosen = [p for p in pairs if p.turn == 0]
    if 0 < num_samples < len(chosen):
        chosen = [chosen[i] for i in sorted(rng.choice(len(chosen), num_samples, replace=False))]
    return chosen


def trajectory_uniform(pairs, num_samples, rng):
    """A trajectory uniformly, then a turn of it uniformly, among the pairs not drawn yet.

    Long episodes do not outweigh short ones, as they would in a uniform draw over turns.
    """
    left, drawn = {}, []
    for p in pairs:
        left.setdefault(p.trajectory, []).append(p)
    while left and len(drawn) < (num_samples or len(pairs)):
        trajectory = list(left)[rng.integers(len(left))]
        turns = left[trajectory]
        drawn.append(turns.pop(rng.integers(len(turns))))
        if not turns:
            del left[trajectory]
    return drawn


@torch.no_grad()
def score_matrix(model, prompts, reasonings, temperature=1.0, token_budget=TOKEN_BUDGET):
    """S[i, j] = log p(reasoning i | prompt j), each prompt through the model once.

        prompt j | z_1 z_1 z_1 | z_2 z_2 | z_3 ...     every z sees the prompt and itself
    Keys and values of the prompts lie in KV slots; the reasonings are laid behind them side by
    side, at the positions that each would have alone, under a mask that keeps them apart. Nothing
    is copied or padded, and the slots behind the prompts are used again for the next reasonings.

    prompts, reasonings: non-empty sequences of ids      token_budget: bounds a forward pass
    returns: (M, N) float64 on the CPU, and the number of tokens that went through the model
    """
    scores = torch.zeros(len(reasonings), len(prompts), dtype=torch.float64)
    first = torch.tensor([z[0] for z in reasonings])
    # The last token of a reasoning predicts nothing that is asked for.
    fed = [len(z) - 1 for z in reasonings]
    widest = max(fed)
    for columns in _prompt_chunks([max(len(x), widest) for x in prompts], token_budget):
        lengths = torch.tensor([len(prompts[j]) for j in columns])
        tokens = torch.zeros(len(columns), int(lengths.max()), dtype=torch.int64)
        for row, j in enumerate(columns):
            tokens[row, :lengths[row]] = torch.tensor(prompts[j])
        packs = list(_packs(fed, min(PACK_TOKENS, token_budget // len(columns))))
        width = max(sum(fed[i] for i in rows) for rows in packs)
        slots = KVSlots(model, len(columns), tokens.shape[1] + width)
        logits = forward_slots(model, slots, tokens, lengths).float().cpu()
        log_p = (logits / (temperature or 1.0)).log_softmax(dim=-1)  # (n, V) after the prompts
        block = log_p[:, first].T.double()  # (M, n)
        for rows in packs:
            block[rows] += _continuations(model, slots, [reasonings[i] for i in rows], temperature)
        scores[:, columns] = block
    return scores, sum(map(len, prompts)) + len(prompts) * sum(fed)


def _continuations(model, slots, reasonings, temperature):
    """Logprobs of all but the first token of each reasoning behind each prompt, summed: (m, n)."""
    n, longest, device = len(slots.lengths), int(slots.lengths.max()), slots.layers[0].device
    scores = torch.zeros(len(reasonings), n, dtype=torch.float64)
    of = torch.tensor([i for i, z in enumerate(reasonings) for _ in z[1:]], dtype=torch.int64)
    q = len(of)
    if not q:
        return scores
    tokens = torch.tensor([token for z in reasonings for token in z[:-1]], device=device)
    targets = torch.tensor([token for z in reasonings for token in z[1:]], device=device)
    depth = torch.tensor([t for z in reasonings for t in range(len(z) - 1)])
    # Behind the longest prompt for all rows: what lies between is padding, and is masked.
    slots.place((longest + torch.arange(q)).expand(n, q).to(device), longest + q)
    prompt = torch.arange(longest) < slots.lengths[:, None]  # (n, longest)
    itself = (of[:, None] == of) & (torch.arange(q)[:, None] >= torch.arange(q))  # (q, q)
    visible = torch.cat([prompt[:, None, None].expand(n, 1, q, longest),
                         itself.expand(n, 1, q, q)], dim=-1).to(device)
    hidden = model.base_model(
        input_ids=tokens.expand(n, q), attention_mask=visible,
        position_ids=(slots.lengths[:, None] + depth).to(device), past_key_values=slots,
        use_cache=True).last_hidden_state.flatten(0, 1)
    rows, chosen = max(1, LOGIT_BUDGET // model.config.vocab_size), []
    for part, target in zip(hidden.split(rows), targets.repeat(n).split(rows)):
        log_p = (output_layer(model, part).float() / (temperature or 1.0)).log_softmax(dim=-1)
        chosen.append(log_p.gather(-1, target[:, None])[:, 0])
    return scores.index_add(0, of, torch.cat(chosen).view(n, q).T.double().cpu())


def _prompt_chunks(lengths, token_budget):
    """Indices, longest first, cut so that columns * longest <= token_budget; at least one each."""
    order, start = sorted(range(len(lengths)), key=lambda j: -lengths[j]), 0
    while start < len(order):
        count = max(1, token_budget // lengths[order[start]])
        yield order[start:start + count]
        start += count


def _packs(lengths, most):
    """Consecutive indices whose lengths sum to at most `most`; one that is longer stands alone."""
    pack, held = [], 0
    for i, length in enumerate(lengths):
        if pack and held + length > most:
            yield pack
            pack, held = [], 0
        pack.append(i)
        held += length
    yield pack


def information(scores, own):
    """Information and entropies of a score matrix, in its unit (see the module's equations).

    scores: (M, N) float64, log p      own: (M,) int64, the column of each row's own prompt
    returns: {mi, conditional_entropy, reasoning_entropy, marginal_std, mi_zscore}

    >>> round(information(torch.tensor([[0.0, -99.0], [-99.0, 0.0]]), torch.arange(2))["mi"], 4)
    0.6931
    """
    # A prompt without a row has weight 0.
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
    to it, itself included, the rank is uniform over g+1 .. g+e, so P(rank <= k) = (k - g) / e
    within [0, 1].

    scores: (M, N), per token      own: (M,)
    returns: {retrieval, retrieval_chance, retrieval@2, ...} for k < N
    """
    margin = scores - scores.gather(1, own[:, None])
    above, equal = (margin > TIE).sum(dim=1), (margin.abs() <= TIE).sum(dim=1)
    metrics = {}
    for k in RETRIEVAL_RANKS:
        if k < scores.shape[1]:
            at = "" if k == 1 else f"@{k}"
            metrics[f"retrieval{at}"] = float(((k - above) / equal).clamp(0, 1).mean())
            metrics[f"retrieval_chance{at}"] = k / scores.shape[1]
    return metrics


# ==================================================================================================
# Regime and warnings


def regime(first, now, sampler="first_turn"):
    """Where a run stands, compared with its own first measurement.

                    high I(X;Z)   low I(X;Z)
        high H(Z|X) diverse       template collapse: wording varies, the prompt is ignored
        low H(Z|X)  compressed    low-entropy collapse: one text for every prompt
    low H: conditional_entropy_per_token below LOW_ENTROPY of its first value or below NO_ENTROPY,
    as the base of the model in the box is: half of nearly nothing is noise. low I: mi below LOW_MI
    of its first value, or retrieval less than CHANCE_ERRORS standard errors above chance. RAGEN V2
    names the four and gives no thresholds.

    first, now: metrics of two steps that measured, `valid_thinking` among them
    returns: one of the four, or "undetermined": not measured, too little reasoning, few prompts
    """
    def value(metrics, name):
        found = metrics.get(f"{sampler}/{name}")
        return math.nan if found is None else found

    entropies = [value(m, "conditional_entropy_per_token") for m in (first, now)]
    if (math.isnan(sum(entropies)) or value(now, "columns") < LEAST_COLUMNS
            or now.get("valid_thinking", 0.0) < LEAST_THINKING):
        return "undetermined"
    chance = value(now, "retrieval_chance")
    error = math.sqrt(chance * (1 - chance) / value(now, "rows"))
    low_mi = (value(now, "mi") < LOW_MI * value(first, "mi")
              or value(now, "retrieval") < chance + CHANCE_ERRORS * error)
    if entropies[1] < max(LOW_ENTROPY * entropies[0], NO_ENTROPY):
        return "low-entropy collapse" if low_mi else "compressed"
    return "template collapse" if low_mi else "diverse"


def warnings_of(history):
    """The warnings that the last step of a run gives rise to: plain sentences, mostly none.

    The Echo Trap (RAGEN V1): reward spread falls off a cliff, then entropy misbehaves, then the
    gradient spikes and nothing brings the run back. A warning is given when its condition becomes
    true, and again only after REARM steps in which it was not.

    NOTE: a solved run also has no spread, little entropy and much repetition: all members of all
    groups are right. So these three are silent while success is at least SOLVED; the others are
    told at any success.

    history: the lines of metrics.jsonl so far; only those of training steps (`reward_std`) count
    """
    steps = [line for line in history if "reward_std" in line]
    if not steps or steps[-1] is not history[-1]:
        return []
    return [sentence for condition in CONDITIONS if (sentence := condition(steps))
            and not any(condition(steps[:-k]) for k in range(1, min(REARM + 1, len(steps))))]


def _spread_cliff(steps):
    first, last = _ends(steps, "reward_std")
    if last < STD_CLIFF * first and not _solved(steps):
        return (f"reward spread within groups is {last:.3g}, it began at {first:.3g}, and the task "
                f"is not solved: the members of a group do the same, so there is little left to "
                f"learn from. This is how an Echo Trap begins.")
    return ""


def _entropy_collapse(steps):
    first, last = _ends(steps, "entropy")
    if last < ENTROPY_COLLAPSE * first and not _solved(steps):
        return (f"entropy is {last:.3g} nats per token, it began at {first:.3g}, and the task is "
                f"not solved: the policy has stopped exploring.")
    return ""


def _entropy_rise(steps):
    before, now = _before_and_now(steps, "entropy")
    if now > ENTROPY_RISE * before:
        return (f"entropy rose to {now:.3g} nats per token, from {before:.3g} over the "
                f"{BEFORE} steps before: replies are becoming incoherent.")
    return ""


def _gradient_spike(steps):
    before, now = _before_and_now(steps, "grad_norm")
    if now > GRADIENT_SPIKE * before:
        return (f"gradient norm is {now:.3g} over the last {RECENT} steps, its median was "
                f"{before:.3g} before: runs seldom recover from this. Lower the learning rate.")
    return ""


def _form_lost(steps):
    """A run that dies within a step or two is over before any window is full."""
    values = _series(steps, "valid")
    if len(values) > RECENT and fmean(values[-RECENT:]) < FORM_LOST * max(values):
        return (f"valid is {fmean(values[-RECENT:]):.3g} over the last {RECENT} steps, it was up "
                f"to {max(values):.3g}: replies have lost the response format. Lower the learning "
                f"rate.")
    return ""


def _repetition(steps):
    name = f"distinct_{NGRAM}"
    first, last = _ends(steps, name)
    if last < REPETITION * first and not _solved(steps):
        return (f"{name} is {last:.3g}, it began at {first:.3g}, and the task is not solved: the "
                f"replies of a batch repeat each other.")
    return ""


def _detached(steps):
    measured = [s for s in steps if s.get("first_turn/mi") is not None]
    label = regime(measured[0], measured[-1]) if measured else ""
    if label.endswith("collapse"):
        now = measured[-1]
        return (f"{label}: the reasoning no longer depends on the prompt (mutual information "
                f"{now['first_turn/mi']:.2f} nats, retrieval {now['first_turn/retrieval']:.2f}, "
                f"chance {now['first_turn/retrieval_chance']:.2f}).")
    return ""


CONDITIONS = (_spread_cliff, _entropy_collapse, _entropy_rise, _gradient_spike, _form_lost,
              _repetition, _detached)


def _series(steps, name):
    """The finite values of a metric; a step may lack it, and nan is None in JSON."""
    values = (s.get(name) for s in steps)
    return [v for v in values if v is not None and math.isfinite(v)]


def _ends(steps, name):
    """Means over the first and the last WINDOW values; nan, which no comparison holds for, if they
    would overlap."""
    values = _series(steps, name)
    if len(values) < 2 * WINDOW:
        return math.nan, math.nan
    return fmean(values[:WINDOW]), fmean(values[-WINDOW:])


def _before_and_now(steps, name):
    """Median of up to BEFORE values and mean of the RECENT ones after them; nan if too few."""
    values = _series(steps[-RECENT - BEFORE:], name)
    if len(values) < RECENT + BEFORE // 2:
        return math.nan, math.nan
    return median(values[:-RECENT]), fmean(values[-RECENT:])


def _solved(steps):
    success = _series(steps[-WINDOW:], "success")
    return bool(success) and fmean(success) >= SOLVED


# ==================================================================================================
# Gradients by bucket of reward spread


def gradient_metrics(parameters, components, spread, group_ids, micro_batches,
                     num_buckets=NUM_BUCKETS):
    """How strongly each part of the objective pulls, in groups of little and of much reward spread.

    The signal of a group grows with its spread, the pull of the regularisers does not: where the
    first is the smaller one, the update is mostly noise and regularisation (RAGEN V2, section 4).

    Nothing is left behind: no `.grad`, no optimizer state, no hook fires.

    parameters: what the gradient is taken of; those without requires_grad are left out
    components: rows -> ({"task": scalar, "entropy": scalar, ...}, tokens): *sums* over the loss
        tokens of these rows, weighted as in the objective, and the number of these tokens. Sums,
        so that the micro-batches of a bucket add up to its exact gradient, and the buckets to that
        of `all`, whatever their sizes.
    spread: (P,) standard deviation of the reward in each group, in the order of group id
    group_ids: (B,) int64
    micro_batches: rows (n,) int64 -> the row indices of each micro-batch
    returns: `gradient/...` of the module's table; a bucket without loss tokens has sizes, no norms
    raises: ValueError if `spread` is not one number per group
    """
    ids = group_ids.unique()
    if len(spread) != len(ids):
        raise ValueError(f"gradient_metrics: got {len(spread)} spreads, expected one for each of "
                         f"the {len(ids)} groups of the batch.")
    parameters = [p for p in parameters if p.requires_grad]
    metrics, everything, all_tokens = {}, {}, 0
    for number, groups in enumerate(buckets(spread, num_buckets), 1):
        rows = torch.isin(group_ids, ids[groups]).nonzero()[:, 0]
        gradients, tokens = _summed_gradients(parameters, components, micro_batches(rows))
        metrics |= _described(f"gradient/bucket_{number}", gradients, tokens, spread[groups],
                              len(rows))
        all_tokens += tokens
        for name, gradient in gradients.items():
            everything[name] = _added(everything.get(name), gradient)
    return metrics | _described("gradient/all", everything, all_tokens, spread, len(group_ids))


def buckets(spread, num_buckets=NUM_BUCKETS):
    """Group indices by ascending spread, in min(num_buckets, P) parts whose sizes differ by at most
    one.

    >>> [b.tolist() for b in buckets(torch.tensor([0.5, 0.0, 0.9, 0.1]), 3)]
    [[1, 3], [0], [2]]
    """
    order = spread.argsort(stable=True)
    return order.tensor_split(min(num_buckets, len(order))) if len(order) else ()


def _summed_gradients(parameters, components, parts):
    """{component: gradient of its sum over all parts, one float32 tensor a parameter}, tokens."""
    gradients, tokens = {}, 0
    for rows in parts:
        sums, count = components(rows)
        tokens += count
        # A component that does not depend on the parameters has no graph and no gradient.
        live = [name for name, value in sums.items() if value.requires_grad]
        for name in live:
            pieces = torch.autograd.grad(sums[name], parameters, retain_graph=name != live[-1],
                                         allow_unused=True)
            pieces = [torch.zeros_like(p, dtype=torch.float32) if g is None else g.float()
                      for g, p in zip(pieces, parameters)]
            gradients[name] = _added(gradients.get(name), pieces)
    return gradients, tokens


def _added(total, pieces):
    """`total` plus `pieces`, tensor by tensor; in float32, where small shares are not rounded
    away."""
    return list(pieces) if total is None else [a + b for a, b in zip(total, pieces)]


def _described(prefix, gradients, tokens, spread, rows):
    metrics = {"groups": len(spread), "rows": rows, "tokens": tokens}
    if len(spread):
        metrics |= {"reward_std": float(spread.mean()), "reward_std_min": float(spread.min()),
                    "reward_std_max": float(spread.max())}
    for name, gradient in gradients.items() if tokens else ():
        norms = torch.stack([g.norm() for g in gradient])
        metrics[name] = float(norms.norm()) / tokens
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def plot_gradients(metrics, path):
    """One figure: norms of every bucket, and norms against the bucket's mean reward spread.

    On a logarithmic scale: a regulariser is often a thousandth of the task.
    """
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    prefixes = sorted((name.removesuffix("/groups") for name in metrics
                       if name.startswith("gradient/bucket_") and name.endswith("/groups")),
                      key=lambda prefix: int(prefix.rpartition("_")[2]))
    parts = [c for c in ("task", "entropy", "kl") if any(f"{p}/{c}" in metrics for p in prefixes)]
    spread = [metrics[f"{p}/reward_std"] for p in prefixes]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    bars, curve = figure.subplots(1, 2, sharey=True)
    for i, part in enumerate(parts):
        norms = [metrics.get(f"{p}/{part}", math.nan) for p in prefixes]
        at = [k + (i - (len(parts) - 1) / 2) * 0.25 for k in range(1, len(prefixes) + 1)]
        bars.bar(at, norms, 0.25, label=part)
        curve.plot(spread, norms, "o-", label=part)
    bars.set(xlabel="bucket, by reward spread", ylabel="gradient norm, per token",
             xticks=range(1, len(prefixes) + 1), yscale="log")
    curve.set(xlabel="mean reward spread of the bucket")
    if parts:
        bars.legend()
    figure.savefig(path)
