"""The whole algorithm as an outline: roll out, filter, compare, update; validate, save, go on.

    python -m minragen.train --env frozenlake            (or: make train ENV=frozenlake)
    python -m minragen.train --run my-run --resume       (go on where a run was stopped)

Reading order: `train` (the loop), `roll_out` and `choose_groups` (what is trained on), `update`
(one StarPO update), `prepare` (rewards and advantages of a batch), `losses`, `validate`, then what
keeps a run on disk. What can be set is in config.py. One console line a step; the same names in
runs/NAME/metrics.jsonl (docs/metrics.md).

Deltas (from RAGEN V2's trainer):
  1. Every optimizer step is normalised over its own tokens, whatever the micro-batch size.
  2. Mini-batches are random draws, not neighbours in length, and are never filled up with
     duplicates.
  3. In float32 old_logprobs are the sampler's own: sampler and learner are one set of weights and
     one function, and `logprob_gap` measures every step that they agree. In bfloat16 the kernels of
     a cached and of a full pass round differently, so old_logprobs are computed again before the
     update.
  4. The reference model exists only while a KL is asked for, and the critic only for an estimator
     with values.
"""

import copy
import dataclasses
import json
import math
import os
import shutil
import sys
import time
import zlib
from dataclasses import dataclass

import torch
import transformers
from tqdm import tqdm

from minragen import starpo
from minragen.config import (
    FILTER_METRICS,
    TRAIN_SEED,
    TRAIN_SEED_STRIDE,
    WITH_CRITIC,
    backends,
    budgets,
    build_groups,
    env_names,
    env_options,
    make_folder,
    parse,
    run_folder,
    warmup_steps,
)
from minragen.diagnostics import (
    collapse_metrics,
    gradient_metrics,
    plot_gradients,
    regime,
    reply_metrics,
    warnings_of,
)
from minragen.envs import SPLITS
from minragen.models import (
    AdamW,
    ChatFrame,
    Critic,
    choose,
    kv_shape,
    load_policy,
    token_logprobs,
)
from minragen.rollout import Sampling, StateReward, StopReason, collect, first_prompt, make_batch
from minragen.warmup import warm_start

# Fields of a Learner that go into a checkpoint as they are.
COUNTERS = ("step", "empty_steps", "rounds", "kl_reward_coef", "ema")
EMPTY_STEPS = 5  # consecutive updates without a single informative group after which a run stops


# ==================================================================================================
# The loop


@dataclass
class Learner:
    """Everything that training changes, and the reference that it must not."""

    policy: object
    frame: ChatFrame
    optimizer: AdamW
    critic: Critic | None = None
    critic_optimizer: AdamW | None = None
    reference: torch.nn.Module | None = None
    step: int = 0  # finished steps
    rounds: int = 0  # rollouts of fresh instances, more than steps where `resample` asked for more
    kl_reward_coef: float = 0.0  # as adapted so far
    ema: dict = dataclasses.field(default_factory=dict)  # moving averages of the diagnostics
    empty_steps: int = 0  # consecutive steps whose filter kept nothing


def train(config, resume=False, say=print):
    """Run `config.steps` steps of StarPO in runs/NAME. Returns the metrics of the last line.

    raises: ValueError for a run name that is taken, a damaged checkpoint, a prompt that fills the
        context
    """
    folder = run_folder(config, resume)
    learner = build(config, folder if resume else None, say)
    if not resume:
        make_folder(folder)
    write_whole(folder / "config.json", json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    start = time.time()
    log = Log(folder, learner.step)
    say(f"run       {folder}: metrics.jsonl, trajectories.jsonl, checkpoint/")
    groups = build_groups(config, "train", config.num_groups, config.group_size)
    if learner.step == 0:
        log.write({"step": 0, **validate(learner, config, "val", log)}, config)
    while learner.step < config.steps and learner.empty_steps < EMPTY_STEPS:
        step, began = learner.step + 1, time.time()
        bar = Bar(f"step {step}")
        trajectories = roll_out(learner, config, groups, bar)
        rolled = time.time()
        batch = make_batch(trajectories).to(learner.policy.device)
        kept, chosen = choose_groups(learner, batch, config)
        metrics = {"step": step, **describe(trajectories), **chosen}
        metrics |= diagnose(learner, config, step, trajectories, log.history)
        learner.empty_steps = 0 if kept.any() else learner.empty_steps + 1
        if kept.any():
            rows = kept[batch.group_ids].nonzero()[:, 0]
            scale = starpo.loss_scale(kept, config.loss_scaling)
            metrics |= update(learner, batch.take(rows), config, step, scale, bar)
        bar.close()
        learner.step = step
        metrics |= {"seconds": time.time() - began, "rollout_seconds": rolled - began,
                    "tokens_per_second":
                        metrics["response_tokens"] * len(trajectories) / (rolled - began)}
        last = step == config.steps or learner.empty_steps >= EMPTY_STEPS
        if step % config.val_every == 0 or last:
            metrics |= validate(learner, config, "val", log)
        log.write(metrics, config)
        for warning in warnings_of(log.history):
            say(f"warning   {warning}")
        if "gradient/all/groups" in metrics:
            plot_gradients(metrics, folder / f"gradients-{step}.png")
        if step % config.save_every == 0 or last:
            save_checkpoint(folder, learner)
    if learner.empty_steps >= EMPTY_STEPS:
        say(f"stopped: in {EMPTY_STEPS} steps in a row the filter ({config.filter} of "
            f"{config.filter_metric}) kept no group, so there is nothing to learn from. Is the "
            f"task solved, or never solved? Read {folder}/trajectories.jsonl.")
    final = {"step": learner.step, **validate(learner, config, "test", log),
             "elapsed": time.time() - start}
    log.write(final, config)
    say(f"done      {folder}; measure it again with: make eval RUN={folder.name}")
    return final


def build(config, checkpoint_of, say):
    """Policy, frame, critic, reference and optimizers; from a checkpoint if there is one."""
    on_one_core = config.model == "tiny" and choose(config.model, config.device)[1].type == "cpu"
    torch.set_num_threads(config.threads or (1 if on_one_core else os.cpu_count()))
    checkpoint = checkpoint_of and find_checkpoint(checkpoint_of)
    policy = build_policy(config, checkpoint)
    frame = ChatFrame(policy.tokenizer, config.response_format)
    check_context(frame, config)
    if not checkpoint:
        warm_start(policy, frame, ",".join(env_names(config)), warmup_steps(config),
                   env_options(config), budgets(config), say)
    learner = Learner(policy, frame, AdamW(policy.model.parameters(), config.lr),
                      kl_reward_coef=config.kl_reward_coef)
    if config.advantages in WITH_CRITIC:
        learner.critic = Critic(policy)
        learner.critic_optimizer = AdamW(learner.critic.parameters(), config.critic_lr)
    if config.kl_coef > 0 or config.kl_reward_coef > 0:
        learner.reference = copy.deepcopy(policy.model).requires_grad_(False)
    if checkpoint:
        load_trainer_state(checkpoint, learner)
        say(f"resumed   after step {learner.step}")
    say(forecast(learner, config))
    return learner


def build_policy(config, checkpoint=None):
    """The policy of a run: fresh (tiny is built for the words of its environments) or from a
    checkpoint folder."""
    _, device, _ = choose(config.model, config.device)
    if checkpoint:
        return dataclasses.replace(load_policy(str(checkpoint), device, stored_dtype=True),
                                   name=config.model)
    samples = [env for split in SPLITS
               for env in build_groups(config, split, len(env_names(config)), 1).envs]
    return load_policy(config.model, device, samples, response_format=config.response_format)


def check_context(frame, config):
    """Refuse a context that a first prompt already fills, before a run folder is made for it."""
    for split in SPLITS:
        groups = build_groups(config, split, config.val_size, 1)
        observations = groups.reset(TRAIN_SEED if split == "train" else 0)
        for env, name, observation in zip(groups.envs, groups.names, observations):
            first_prompt(frame, env, name, observation, config.max_context)


def roll_out(learner, config, groups, bar):
    """Fresh instances, played: round r of run seed s plays seeds that no other round or run plays.

    With `resample` (DAPO, Yu et al. 2025, section 3.2) further rounds follow until `num_groups`
    groups have some spread of return, and at most so many.
    """
    trajectories, informative = [], 0
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    for attempt in range(1 + config.resample):
        first_seed = (TRAIN_SEED + config.seed * TRAIN_SEED_STRIDE
                      + learner.rounds * config.num_groups)
        played = collect(learner.policy, learner.frame, groups, first_seed, sampling, config.seed,
                         config.max_new_tokens, config.max_context, config.max_rows, bar.sampled,
                         config.context, config.window,
                         StateReward(config.grounding_reward, config.worldmodeling_reward))
        learner.rounds += 1
        spread = starpo.group_scores(torch.tensor([t.episode_return for t in played]),
                                     torch.tensor([t.group_id for t in played]))
        informative += int((spread > starpo.ZERO).sum())
        for t in played:
            t.group_id += attempt * config.num_groups
        trajectories += played
        if informative >= config.num_groups:
            break
    return trajectories


def choose_groups(learner, batch, config):
    """Which groups are trained on: (kept (P,) bool, metrics). At most `num_groups`, the first."""
    spread = starpo.group_scores(batch.episode_returns, batch.group_ids, "std", batch.episode_ids)
    what, statistic = FILTER_METRICS[config.filter_metric]
    x = batch.episode_returns
    if what != "returns":
        x = lengths = starpo.episode_sums(batch.response_mask.sum(dim=1).float(),
                                          batch.episode_ids)
    if what == "entropy":
        entropies = _in_micro_batches(batch, config, lambda part: token_logprobs(
            learner.policy.model, part.tokens, part.response_mask, config.temperature)[1])
        x = starpo.episode_sums(entropies.sum(dim=1), batch.episode_ids) / lengths
    scores = starpo.group_scores(x, batch.group_ids, statistic, batch.episode_ids)
    kept = starpo.filter_groups(scores, config.filter_value, config.filter, config.filter_select,
                                config.filter_include_zero)
    kept &= kept.cumsum(0) <= config.num_groups
    metrics = {"reward_std": float(spread.mean()), "groups_kept": int(kept.sum()),
               "groups_without_spread": int((spread <= starpo.ZERO).sum())}
    if config.resample:
        metrics["rollouts"] = len(spread) // config.num_groups
    return kept, metrics


def describe(trajectories):
    """What happened in the episodes, before any filter. Mixtures also get every metric per
    environment."""
    def means(chosen, prefix=""):
        n = len(chosen)
        stats = {"success": sum(t.success for t in chosen) / n,
                 "episode_return": sum(t.episode_return for t in chosen) / n,
                 "turns": sum(len(t.turns) for t in chosen) / n,
                 "response_tokens": sum(t.response_tokens for t in chosen) / n,
                 "context": sum(t.stop is StopReason.CONTEXT for t in chosen) / n,
                 "env_errors": sum(t.stop is StopReason.ENV_ERROR for t in chosen)}
        # What not every environment of a mixture reports is told for those that do.
        reported = [set().union(*(t.metrics for t in chosen if t.env == env))
                    for env in {t.env for t in chosen}]
        for name in sorted(set.intersection(*reported) - {"success"}):
            stats[name] = sum(t.metrics.get(name, 0.0) for t in chosen) / n
        return {prefix + name: value for name, value in stats.items()}

    metrics, names = means(trajectories), sorted({t.env for t in trajectories})
    for name in names if len(names) > 1 else ():
        metrics |= means([t for t in trajectories if t.env == name], f"{name}/")
    return metrics


def diagnose(learner, config, step, trajectories, history):
    """How varied the replies are, every step; how much they depend on the prompt, now and then."""
    if not learner.frame.thinks:
        return {}
    metrics = reply_metrics(learner.frame, trajectories)
    if due(step, config.diagnose_every):
        metrics |= collapse_metrics(learner.policy, learner.frame, trajectories, learner.ema,
                                    hash_seed(config.seed, step), config.diagnose_samples,
                                    config.temperature, config.token_budget)
        first = next((line for line in history if "first_turn/mi" in line), metrics)
        metrics["regime"] = regime(first, metrics)
    return metrics


def due(step, every):
    """Whether something that is done at the first step and every so many is done now; 0: never."""
    return every > 0 and (step == 1 or step % every == 0)


# ==================================================================================================
# One update


def update(learner, batch, config, step, scale=1.0, bar=None):
    """Advantages, then one optimizer step per mini-batch of rows. Returns metrics.

    Means over tokens or rows are over the mini-batch; micro-batches only bound memory and keep the
    caches warm. `scale` multiplies the policy loss.
    """
    progress = 1 - (1 - config.lr_final) * (step - 1) / max(1, config.steps - 1)
    learner.optimizer.set_lr(config.lr * progress)
    if learner.critic:
        learner.critic_optimizer.set_lr(config.critic_lr * progress)
    metrics = prepare(learner, batch, config, scale)
    if config.kl_target:
        learner.kl_reward_coef = starpo.adapt_kl_coef(
            learner.kl_reward_coef, metrics["kl_reward"], config.kl_target,
            len(batch.episode_ids.unique()), config.kl_horizon)
    if due(step, config.gradients_every):
        metrics |= analyse_gradients(learner, batch, config)
    sums, norms = {}, []
    for epoch in range(config.epochs):
        shuffle = torch.Generator().manual_seed(hash_seed(config.seed, step, epoch))
        order = torch.randperm(len(batch), generator=shuffle).to(batch.tokens.device)
        for index in order.split(config.mini_batch):
            mini = weigh(batch.take(index), config)
            for rows in micro_batches(mini.lengths, config.token_budget):
                shares = backward(learner, mini.take(rows), config, first=not norms)
                for name, value in shares.items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                if bar:
                    bar.trained(len(rows))
            norms.append([float(learner.optimizer.step(config.max_grad_norm))])
            if learner.critic:
                norms[-1].append(float(learner.critic_optimizer.step(config.max_grad_norm)))
    # Of the first mini-batch only: later ones have been moved by their updates.
    gap = sums.pop("logprob_gap")
    metrics |= {name: value / len(norms) for name, value in sums.items()} | {"logprob_gap": gap}
    metrics["grad_norm"] = sum(n[0] for n in norms) / len(norms)
    metrics["updates_skipped"] = sum(not math.isfinite(n[0]) for n in norms)
    if metrics["updates_skipped"] == len(norms):
        raise RuntimeError(f"no gradient of step {step} was finite: the policy has diverged. Is "
                           f"the learning rate too large? See the last lines of metrics.jsonl.")
    if learner.critic:
        metrics["critic_grad_norm"] = sum(n[1] for n in norms) / len(norms)
    return metrics


@torch.no_grad()
def prepare(learner, batch, config, scale=1.0):
    """Fill in what the losses compare with: old and reference logprobs, advantages, and for the
    critic values and returns. Returns metrics."""
    predictable = batch.attention_mask.clone()
    predictable[:, 0] = False
    batch.loss_mask = predictable if config.loss_mask == "all" else batch.response_mask
    steps = predictable if config.advantage_mask == "all" else batch.response_mask

    def logprobs_of(model):
        return _in_micro_batches(batch, config, lambda part: token_logprobs(
            model, part.tokens, part.loss_mask, config.temperature)[0])

    exact = next(learner.policy.model.parameters()).dtype == torch.float32
    batch.old_logprobs = (batch.sample_logprobs if exact and config.loss_mask == "response" else
                          logprobs_of(learner.policy.model))
    if learner.reference is not None:
        batch.ref_logprobs = logprobs_of(learner.reference)
    scores, rewards, metrics = credit(learner, batch, config)
    if learner.critic:
        batch.values = _in_micro_batches(
            batch, config, lambda part: learner.critic(part.tokens, part.response_mask),
            response_mask=steps)
    batch.advantages = estimate(batch, config, scores, rewards, steps) * scale
    if learner.critic:
        target = batch.returns[batch.value_mask]
        residual = target - batch.values[batch.value_mask]
        metrics["explained_variance"] = 1 - float(residual.var() / (target.var() + 1e-8))
    return metrics


def credit(learner, batch, config):
    """What is paid and where: scores of the rows' episodes (B,), rewards on tokens (B, T), metrics.

    The environment's rewards with their format penalties and the punishment of overlong replies,
    normalised, and last the KL, which is each token's own.
    """
    episode, metrics = batch.episode_ids, {}
    turn_rewards = batch.rewards
    scores = batch.episode_returns
    if config.overlong:
        penalty = starpo.overlong_penalty(batch.turn_ids, config.max_new_tokens, config.overlong)
        turn_rewards = turn_rewards + penalty
        scores = scores + starpo.episode_sums(penalty.sum(dim=1), episode)
        metrics["overlong_penalty"] = float(penalty.sum() / len(episode.unique()))
    ids = batch.group_ids if config.reward_norm_over == "group" else torch.zeros_like(episode)
    scores = starpo.normalise_rewards(scores, ids, config.reward_norm, episode)
    if config.credit == "episode":
        rewards = starpo.last_token_rewards(scores, batch.response_mask)
    elif config.context == "full":
        rewards = turn_rewards
    else:
        rewards = starpo.last_token_rewards(
            starpo.turn_returns(turn_rewards.sum(dim=1), episode, batch.turn_ids.amax(dim=1),
                                config.gamma_turn), batch.response_mask)
    if config.kl_reward_coef:
        kl = starpo.kl_estimate(batch.old_logprobs, batch.ref_logprobs, "k1") * batch.response_mask
        rewards = rewards - learner.kl_reward_coef * kl
        scores = scores - learner.kl_reward_coef * starpo.episode_sums(kl.sum(dim=1), episode)
        metrics |= {"kl_reward": float(kl.sum() / batch.response_mask.sum()),
                    "kl_reward_coef": learner.kl_reward_coef}
    return scores, rewards, metrics


def estimate(batch, config, scores, rewards, steps):
    """Advantages (B, T) by the estimator of the Config; with a critic also its `returns` and
    `value_mask`."""
    compared = scores, batch.group_ids, batch.response_mask
    if config.advantages == "grpo":
        advantages = starpo.group_advantages(*compared, config.norm_by_std, batch.episode_ids)
    elif config.advantages == "rloo":
        advantages = starpo.rloo_advantages(*compared, batch.episode_ids)
    elif config.advantages == "reinforce_pp_baseline":
        advantages = starpo.reinforce_pp_baseline_advantages(*compared, batch.episode_ids)
    elif config.advantages == "reinforce":
        advantages = starpo.reinforce_advantages(rewards, batch.response_mask, config.gamma)
    elif config.advantages == "reinforce_pp":
        advantages = starpo.reinforce_pp_advantages(rewards, batch.response_mask, config.gamma)
    else:
        batch.value_mask, given = steps, (rewards, batch.values, steps)
        if config.advantages == "gae":
            advantages, batch.returns = starpo.masked_gae(*given, config.gamma, config.lam)
        elif config.advantages == "bi_level_gae":
            advantages, batch.returns = starpo.bi_level_gae(
                *given, batch.turn_ids, config.gamma, config.lam, config.gamma_turn)
        else:
            advantages, batch.returns = starpo.turn_gae(
                *given, batch.turn_ids, config.lam, config.gamma_turn)
            batch.value_mask = starpo.turn_ends(batch.turn_ids, steps)
        advantages = starpo.whiten(advantages, steps, batch.value_mask)
    if config.soft_reweight:
        advantages = starpo.soft_reweight(advantages, batch.episode_returns, batch.group_ids,
                                          batch.episode_ids)
    if config.length_weight:
        lengths = starpo.episode_sums(batch.response_mask.sum(dim=1), batch.episode_ids)
        advantages = starpo.length_weight(advantages, lengths, batch.episode_ids)
    return torch.zeros_like(advantages) if config.zero_task else advantages


def weigh(mini, config):
    """The mini-batch with what each of its tokens counts in the losses and in mean metrics."""
    mini.loss_weights = starpo.loss_weights(mini.loss_mask, config.aggregation, config.max_context)
    mini.mean_weights = starpo.loss_weights(mini.response_mask)
    if mini.value_mask is not None:
        mini.value_weights = starpo.loss_weights(mini.value_mask, config.aggregation,
                                                 config.max_context)
    return mini


@torch.no_grad()
def _in_micro_batches(batch, config, function, **fields):
    """function(part) -> (b, t) for every micro-batch, put together to (B, T).

    fields: what the parts have in place of the batch's own
    """
    batch = dataclasses.replace(batch, **fields)
    result = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    for rows in micro_batches(batch.lengths, config.token_budget):
        part = function(batch.take(rows))
        result[rows, :part.shape[1]] = part
    return result


def backward(learner, part, config, first=False):
    """Backpropagate one micro-batch of a weighed mini-batch.

    returns: {metric: this micro-batch's share of the mini-batch's mean}
    """
    parts, shares = losses(learner, part, config)
    sum(parts.values()).backward()
    if learner.critic:
        values = learner.critic(part.tokens, part.value_mask)
        shares["value_loss"] = starpo.aggregate(
            starpo.value_loss(values, part.values, part.returns, config.value_clip),
            part.value_weights)
        shares["value_loss"].backward()
    if not first:
        del shares["logprob_gap"]
    return {name: value.detach() for name, value in shares.items()}


def losses(learner, part, config):
    """The parts of what is minimised {name: share}, and what is measured beside {metric: share}."""
    logprobs, entropy = token_logprobs(learner.policy.model, part.tokens, part.loss_mask,
                                       config.temperature)
    loss, clipped = starpo.policy_loss(
        logprobs, part.old_logprobs, part.advantages, config.clip_low, config.clip_high,
        config.dual_clip, part.loss_mask if config.ratio == "sequence" else None)
    parts = {"task": starpo.aggregate(loss, part.loss_weights)}
    if config.entropy_coef:
        parts["entropy"] = -config.entropy_coef * starpo.aggregate(entropy, part.loss_weights)
    shares = {"policy_loss": parts["task"],
              "entropy": starpo.aggregate(entropy, part.mean_weights)}
    if config.kl_coef:
        kl = starpo.kl_loss(logprobs, part.ref_logprobs, config.kl_estimator)
        parts["kl"] = config.kl_coef * starpo.aggregate(kl, part.loss_weights)
        shares["kl_ref"] = starpo.aggregate(kl, part.mean_weights)
    with torch.no_grad():
        shares |= {"clip_fraction": starpo.aggregate(clipped.float(), part.mean_weights),
                   "approx_kl": starpo.aggregate(
                       starpo.kl_estimate(part.old_logprobs, logprobs), part.mean_weights),
                   "logprob_gap": starpo.aggregate(
                       (logprobs - part.sample_logprobs).abs(), part.mean_weights)}
    return parts, shares


def analyse_gradients(learner, batch, config):
    """Gradient norms of each part of the objective by the reward spread of the groups."""
    weighed = weigh(dataclasses.replace(batch), config)
    # Sums over tokens, as if this were the token mean of whatever part of the batch is asked for.
    weighed.loss_weights = weighed.loss_weights * int(batch.loss_mask.sum())

    def components(rows):
        part = weighed.take(rows)
        return losses(learner, part, config)[0], int(part.loss_mask.sum())

    def parts(rows):
        return (rows[i] for i in micro_batches(batch.lengths[rows], config.token_budget))

    _, ids = batch.group_ids.unique(return_inverse=True)
    spread = starpo.group_scores(batch.episode_returns, ids, "std", batch.episode_ids)
    return gradient_metrics(learner.policy.model.parameters(), components, spread, ids, parts)


def micro_batches(lengths, token_budget):
    """Row indices, sorted by length and cut so that rows * longest <= token_budget; at least one
    row each."""
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        rows = max(1, token_budget // int(lengths[order[start]]))
        yield order[start:start + rows]
        start += rows


def hash_seed(*parts):
    return zlib.crc32(repr(parts).encode())


# ==================================================================================================
# Measuring


def validate(learner, config, split, log=None):
    """Success on `val_size` fixed instances of a split that training never plays, sampled and
    greedy.

    returns: {"val/success", "val/success_greedy", "val/episode_return", "val/valid", ...}; in a
        mixture also "val/ENV/success" and "val/ENV/success_greedy"
    """
    groups, metrics = build_groups(config, split, config.val_size, 1), {}
    for suffix, played in play_held_out(learner.policy, learner.frame, groups, config).items():
        stats = describe(played)
        wanted = [n for n in stats
                  if n.rpartition("/")[2] in ("success", "episode_return", "valid", "grounding",
                                              "worldmodeling")]
        metrics |= {f"{split}/{name}{suffix}": stats[name] for name in wanted}
        if log and not suffix:
            log.trajectories(learner.step, split, played[:4])
    return metrics


def play_held_out(policy, frame, groups, config):
    """{"": trajectories sampled at val_temperature, "_greedy": greedy ones}, the same noise every
    time."""
    bar = Bar(f"validation on {groups.split}")
    played = {suffix: collect(policy, frame, groups, 0, Sampling(temperature), 0,
                              config.max_new_tokens, config.max_context, config.max_rows,
                              bar.sampled, config.context, config.window)
              for suffix, temperature in (("", config.val_temperature), ("_greedy", 0.0))}
    bar.close()
    return played


def forecast(learner, config):
    """One line: where the memory will go, from the sizes of things; activations are a rule of
    thumb."""
    model = learner.policy.model
    c, n = model.config.get_text_config(), learner.policy.num_parameters
    width = next(model.parameters()).element_size()
    trained = 1 + (learner.critic is not None)
    weights = n * width * (trained + (learner.reference is not None))
    # Adam's moments, gradients, masters.
    state = n * (8 + width + (4 if width < 4 else 0)) * trained
    layers, heads, head_dim = kv_shape(model)
    rows = min(config.max_rows, config.num_groups * config.group_size)
    cache = 2 * layers * rows * config.max_context * heads * head_dim * width
    per_token = c.num_hidden_layers * (16 * c.hidden_size + 4 * c.intermediate_size) * width
    activations = trained * per_token * config.token_budget
    gib = {"weights": weights, "optimizer": state, "KV slots (at most)": cache,
           "activations": activations}
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in gib.items())
    return f"memory    about {sum(gib.values()) / 2**30:.2f} GiB: {parts}"


class Bar:
    """The progress inside a step: tokens sampled, then rows trained on. Gone when the step
    is done."""

    def __init__(self, title):
        self.title, self.unit = title, "tokens sampled"
        self.bar = tqdm(desc=title, unit="", leave=False, disable=None)

    def sampled(self, tokens):
        self._advance(tokens, "tokens sampled")

    def trained(self, rows):
        self._advance(rows, "rows trained on")

    def _advance(self, amount, unit):
        if unit != self.unit:
            self.unit = unit
            self.bar.reset()
        self.bar.set_postfix_str(unit, refresh=False)
        self.bar.update(amount)

    def close(self):
        self.bar.close()


class Log:
    """metrics.jsonl, trajectories.jsonl and the console line, all with the same names."""

    def __init__(self, folder, step):
        self.folder = folder
        # A resumed run forgets what came after its checkpoint.
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            path = folder / name
            lines = path.read_text().splitlines() if path.exists() else []
            lines = [line for line in lines if _before(step, line)]
            write_whole(path, "".join(line + "\n" for line in lines))
            if name == "metrics.jsonl":
                self.history = [json.loads(line) for line in lines]

    def write(self, metrics, config):
        """One line to metrics.jsonl and one to the console."""
        # JSON has no nan and no infinity.
        metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                   for k, v in metrics.items()}
        rounded = {k: round(v, 6) if isinstance(v, float) and abs(v) > 1e-3 else v
                   for k, v in metrics.items()}
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(rounded) + "\n")
        self.history.append(rounded)
        tqdm.write(console_line(metrics, config))
        sys.stdout.flush()

    def trajectories(self, step, split, played):
        """The conversations as chat messages, one JSON object a line."""
        with open(self.folder / "trajectories.jsonl", "a") as file:
            for t in played:
                file.write(json.dumps({"step": step, "split": split, "env": t.env, "seed": t.seed,
                                       "success": t.success, "stop": t.stop.value,
                                       "turn_rewards": t.turn_rewards,
                                       "messages": t.messages()}) + "\n")


def _before(step, line):
    """Whether a line belongs to the run up to its checkpoint at `step`; its final test does not."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:  # the last line of a killed run may be cut off
        return False
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    final = entry.get("split") == "test" or any(name.startswith("test/") for name in entry)
    return entry["step"] <= step and not final


def console_line(metrics, config):
    """One aligned line; the parts that this step did not produce are left out."""
    def part(name, label, form):
        return f"{label} {metrics[name]:{form}}" if name in metrics else ""

    val = [f"{split} {metrics[f'{split}/success']:.3f} "
           f"greedy {metrics[f'{split}/success_greedy']:.3f}"
           for split in ("val", "test") if f"{split}/success" in metrics]
    kept = (f"kept {metrics['groups_kept']:2d}/{config.num_groups}" if "groups_kept" in metrics
            else "")
    parts = [f"step {metrics['step']:4d}/{config.steps}", part("success", "success", ".3f"),
             part("episode_return", "return", "6.3f"), part("valid", "valid", ".2f"), kept,
             part("entropy", "entropy", ".3f"), part("kl_ref", "kl_ref", ".4f"),
             part("grad_norm", "grad", "6.3f"), part("logprob_gap", "gap", ".0e"),
             part("tokens_per_second", "tok/s", "6.0f"), part("seconds", "sec", "5.2f"), *val,
             metrics.get("regime", "")]
    return " | ".join(p for p in parts if p)


# ==================================================================================================
# A run on disk


def write_whole(path, text):
    """Write beside and rename, so that a kill leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def save_checkpoint(folder, learner):
    """A plain Hugging Face folder plus trainer state: written beside, then renamed into place.

    A kill at any instant leaves a whole checkpoint: the manifest is written last, the old
    checkpoint stays until the new one has it, and a kill between the two renames is made good by
    the next reader.
    """
    current, new, old = (folder / name
                         for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
    # Finish the renames of a save that was killed.
    if not current.exists() and (new / "manifest.json").exists():
        new.rename(current)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    learner.policy.model.save_pretrained(new)
    learner.policy.tokenizer.save_pretrained(new)
    critic = learner.critic and {"model": learner.critic.state_dict(),
                                 "optimizer": learner.critic_optimizer.state_dict()}
    reference = learner.reference and learner.reference.state_dict()
    torch.save({**{name: getattr(learner, name) for name in COUNTERS},
                "optimizer": learner.optimizer.state_dict(),
                "critic": critic, "reference": reference}, new / "trainer.pt")
    files = {p.name: [p.stat().st_size, zlib.crc32(p.read_bytes())] for p in sorted(new.iterdir())}
    write_whole(new / "manifest.json", json.dumps({"step": learner.step, "files": files}, indent=1))
    if current.exists():
        current.rename(old)
    new.rename(current)
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder):
    """The newest whole checkpoint of a run, each file compared with its size and CRC in the
    manifest.

    raises: ValueError if there is none, or it is damaged
    """
    # Without `checkpoint`, a save was killed between its two renames, and `checkpoint.new` is
    # whole.
    for name in ("checkpoint", "checkpoint.new"):
        if (folder / name / "manifest.json").exists():
            break
    else:
        raise ValueError(f"{folder} has no checkpoint: it was stopped before its first one. Delete "
                         f"it and start again.")
    path = folder / name
    damaged = (f"checkpoint {path} is damaged: {{}} is not what was written. Restore it, or "
               f"delete {folder} and start again.")
    try:
        files = dict(json.loads((path / "manifest.json").read_text())["files"])
        expected = {file: (int(size), int(crc)) for file, (size, crc) in files.items()}
    except (ValueError, TypeError, KeyError):
        raise ValueError(damaged.format("manifest.json")) from None
    for file in {"config.json", "model.safetensors", "trainer.pt", *expected}:
        data = (path / file).read_bytes() if (path / file).is_file() else b""
        if (len(data), zlib.crc32(data)) != expected.get(file):
            raise ValueError(damaged.format(file))
    return path


def load_trainer_state(checkpoint, learner):
    """Optimizers, critic, reference and counters, in place. The policy's weights are loaded
    already."""
    state = torch.load(checkpoint / "trainer.pt", map_location=learner.policy.device,
                       weights_only=True)
    for name in COUNTERS:
        setattr(learner, name, state[name])
    learner.optimizer.load_state_dict(state["optimizer"])
    if learner.critic:
        learner.critic.load_state_dict(state["critic"]["model"])
        learner.critic_optimizer.load_state_dict(state["critic"]["optimizer"])
    if learner.reference is not None:
        learner.reference.load_state_dict(state["reference"])


def main(argv=None):
    """The command: train, or say in one sentence why not."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config, resume, changed, why = parse(argv if argv is not None else sys.argv[1:])
        differs = ", ".join(f"{k}={v}" for k, v in changed.items()) or "nothing"
        print(f"minragen  {config.env} with {config.algo}, seed {config.seed}; {why}"
              f"{backends(config)}")
        print(f"settings  differ from the preset of {config.env}, {config.algo}, {config.model}, "
              f"{config.response_format} in: {differs}")
        train(config, resume)
    except (ValueError, ImportError, RuntimeError, OSError) as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("\nstopped. If the run has a checkpoint, --run NAME --resume goes on from it.")


if __name__ == "__main__":
    main()
