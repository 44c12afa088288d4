"""One step of StarPO as an outline: collect, filter, advantages, update; and the loop around it.

    python -m minragen.train --env frozenlake            (or: make train ENV=frozenlake)
    python -m minragen.train --run my-run --resume       (continue a stopped run)

Reading order: `train` (when to validate, save and stop), `train_step` and `update` (one step of
StarPO), then their parts in the order in which they run. The options are in config.py; run/start.py
puts a run together. docs/metrics.md explains every metric.

Axes: B rows, T tokens, P groups, G members, E episodes, K turns.
"""

import contextlib
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch

from minragen import starpo
from minragen.chat import ChatFrame
from minragen.config import TRAIN_SEED_STRIDE
from minragen.models import AdamW, Critic, Policy
from minragen.rollout import Rules, collect
from minragen.support.metrics import episode_metrics, held_out_metrics, waiting_metrics
from minragen.trajectory import make_batch

# Training seeds begin at TRAIN_SEED + (the run's seed) * TRAIN_SEED_STRIDE, validation's at 0.
TRAIN_SEED = 2**41
EMPTY_STEPS = 5  # a run ends after this many steps in a row whose filter kept no group
MOST_SKIPPED = 5  # a run fails after this many updates in a row that are not finite


class World:
    """How processes that train one policy exchange values: here one, in run/distributed.py many."""

    rank, size = 0, 1

    def gather(self, value):
        """The values of all processes, by rank."""
        return [value]

    def sum(self, x):
        """Sum x over all processes, in place. Returns x."""
        return x

    def sum_gradients(self, parameters):
        """Add the gradients of all processes, in place."""


class Callbacks:
    """What a run reports, keeps and is asked. This one only prints; run/log.py writes files."""

    def say(self, line):
        """Print a line."""
        print(line)

    def progress(self, title):
        """A context that yields a function: call it with the number of new tokens or rows."""
        return contextlib.nullcontext(lambda count: None)

    def diagnose(self, learner, step, played, rows, batch):
        """More metrics, measured before the update. rows: indices into make_batch(played) that the
        filter kept; batch: those rows with their targets, None without rows."""
        return {}

    def write(self, metrics):
        """Report a step."""
        print(metrics)

    def episodes(self, step, split, trajectories):
        """Keep some episodes."""

    def early_stop(self, metrics):
        """Why training should end after the step with these metrics; "" if it should not."""
        return ""

    def stop_requested(self):
        """Whether the user asked the run to stop."""
        return False

    def save(self, learner, best):
        """Save the learner. best: whether its validation is the best so far."""


QUIET = Callbacks()  # of a single `train_step`, which calls only `progress` and `diagnose`


@dataclass
class Learner:
    """Everything that training changes, and the reference that it must not."""

    policy: Policy
    frame: ChatFrame
    optimizer: AdamW
    critic: Critic | None = None
    critic_optimizer: AdamW | None = None
    reference: Policy | None = None  # the policy before RL, or a teacher: the KL is measured to it
    step: int = 0  # finished steps
    validation_due: bool = True  # a validation is still owed
    best_success: float = -1.0  # of the validations after the first step
    ended: str = ""  # why training ends before the last step
    rounds: int = 0  # how often P new groups were played: once a step, more often if resampled
    ema: dict = field(default_factory=dict)  # moving averages of the diagnostics
    empty_steps: int = 0  # consecutive steps whose filter kept nothing
    skipped: int = 0  # consecutive updates whose gradient was not finite
    world: World = World()
    collect: Callable = collect  # plays episodes: rollout.py's, or fast/scheduler.py's
    rollout_context: Callable = contextlib.nullcontext  # in more/stale.py: with older weights

    def note_success(self, metrics):
        """Note the success in these metrics. Returns whether it is the best so far."""
        before, now = self.best_success, metrics.get("val/success", math.nan)
        self.best_success = max(before, now)  # `before` if now is nan
        return now > before

    def optimizers(self):
        """[(metric of the gradient norm, optimizer), ...]"""
        critic = [("critic_grad_norm", self.critic_optimizer)] if self.critic else []
        return [("grad_norm", self.optimizer), *critic]


def train(learner, groups, config, callbacks):
    """Train for `config.steps` steps, or until there is a reason to end before. Returns the metrics
    of the test, None if the user stopped the run. groups: {split: EnvGroups}"""
    began = time.time()
    if learner.validation_due:  # before step 1, or still owed by a resumed run
        metrics = {"step": learner.step, **validate(learner, groups["val"], config, callbacks)}
        learner.validation_due = False
        callbacks.write(metrics)
        if learner.step:
            callbacks.save(learner, learner.note_success(metrics))
            if callbacks.stop_requested():
                return None
    while learner.step < config.steps and not learner.ended:
        metrics, trajectories = train_step(learner, groups["train"], config, callbacks)
        callbacks.episodes(learner.step, "train", trajectories)
        try:
            learner.ended = nothing_to_learn(learner, config) or callbacks.early_stop(metrics)
            last = learner.step == config.steps or bool(learner.ended)
            learner.validation_due = last or learner.step % config.val_every == 0
            if learner.validation_due and not callbacks.stop_requested():
                metrics |= validate(learner, groups["val"], config, callbacks)
                learner.validation_due = False
        finally:  # also after an error
            callbacks.write(metrics)
        best, stopping = learner.note_success(metrics), callbacks.stop_requested()
        if learner.step % config.save_every == 0 or last or best or stopping:
            callbacks.save(learner, best)
        if stopping:
            return None
    if learner.ended:
        callbacks.say(f"stopped: {learner.ended} Read trajectories.jsonl.")
    final = {"step": learner.step, **validate(learner, groups["test"], config, callbacks),
             "elapsed": time.time() - began}
    callbacks.write(final)
    return final


def nothing_to_learn(learner, config):
    """Why training ends after EMPTY_STEPS steps without an update; "" if it goes on. Raises
    FloatingPointError after MOST_SKIPPED updates without a finite gradient."""
    if learner.skipped >= MOST_SKIPPED:
        raise FloatingPointError(
            f"{learner.skipped} updates in a row had a gradient that is not finite: the policy has "
            f"diverged. Is the learning rate too large? See the last lines of metrics.jsonl.")
    return "" if learner.empty_steps < EMPTY_STEPS else (
        f"in {EMPTY_STEPS} steps in a row the filter ({config.filter}) kept no group, or every "
        f"environment failed, so there is nothing to learn from. Is the task solved, or never "
        f"solved? If few replies are valid, raise --warmup-steps.")


def train_step(learner, groups, config, callbacks=QUIET):
    """One step of StarPO. Returns its metrics and its trajectories."""
    step, began = learner.step + 1, time.time()
    trajectories = roll_out(learner, groups, config, callbacks)  # play P*G episodes
    rollout_seconds = time.time() - began
    played = [t for t in trajectories if not t.error]  # episodes whose environment did not fail
    metrics = {"step": step, **episode_metrics(trajectories), **waiting_metrics(trajectories)}
    batch = None  # what is trained on
    if played:
        everything = make_batch(played).to(learner.policy.device)  # ragged lists -> (B, T)
        kept, more = choose_groups(learner, everything, config)  # which groups teach something
        metrics |= more
        rows = kept[everything.group_ids].nonzero()[:, 0]
        if len(rows):
            batch, more = compute_targets(learner, everything.take(rows), config)
            metrics |= more
        metrics |= callbacks.diagnose(learner, step, played, rows, batch)
    if batch:
        metrics |= update(learner, batch, config, step, callbacks)
    learner.empty_steps = 0 if batch else learner.empty_steps + 1
    if config.resample:
        metrics["rollouts"] = len(trajectories) // (config.num_groups * config.group_size)
    learner.step = step
    sampled = sum(t.response_tokens for t in trajectories)
    return metrics | {"seconds": time.time() - began, "rollout_seconds": rollout_seconds,
                      "tokens_per_second": sampled / max(rollout_seconds, 1e-9)}, trajectories


def update(learner, batch, config, step, callbacks=QUIET):
    """Take one optimizer step per mini-batch of a batch with targets. Returns metrics."""
    set_learning_rates(learner, config, step)
    per_step, skipped = [], 0  # means of each optimizer step
    with callbacks.progress(f"step {step}: rows trained on") as progress:
        for mini in mini_batches(batch, config, step):  # in epochs x mini-batches
            means = Counter()
            for shares in learner.world.gather(backward(learner, mini, config, progress)):
                means.update(shares)  # adds them; a process may lack some names
            for name, optimizer in learner.optimizers():
                learner.world.sum_gradients(optimizer.masters)
                means[name] = float(optimizer.step(config.max_grad_norm))
            finite = all(math.isfinite(means[name]) for name, _ in learner.optimizers())
            learner.skipped = 0 if finite else learner.skipped + 1
            skipped += not finite
            per_step.append(means)
    metrics = {name: sum(means[name] for means in per_step) / len(per_step) for name in per_step[0]}
    return metrics | {"updates_skipped": skipped,
                      "logprob_gap": per_step[0]["logprob_gap"]}  # before the policy has moved


# ---- Which episodes ------------------------------------------------------------------------------
def roll_out(learner, groups, config, callbacks=QUIET):
    """Play P*G episodes of fresh seeds: no other step and no run with another seed plays them.
    While fewer than `num_groups` groups have a positive reward std, play P*G more, at most
    `resample` times (DAPO, Yu et al. 2025, section 3.2)."""
    trajectories = []
    learner.policy.begin_rollout()
    title = f"step {learner.step + 1}: tokens sampled"
    with learner.rollout_context(), callbacks.progress(title) as progress:
        for attempt in range(1 + config.resample):
            first_seed = (TRAIN_SEED + config.seed * TRAIN_SEED_STRIDE
                          + (learner.rounds + attempt) * config.num_groups)
            fresh = in_order(learner.world, learner.collect(
                learner.policy, learner.frame, groups, first_seed, rules_of(config), progress))
            for t in fresh:
                t.group_id += attempt * config.num_groups
            trajectories += fresh
            played = [t for t in trajectories if not t.error]
            if played and informative_groups(played) >= config.num_groups:
                break  # enough; else again, at most `resample` times
    learner.rounds += attempt + 1  # not before: if a server is lost, the step is played again
    learner.policy.end_rollout(trajectories)
    return trajectories


def in_order(world, trajectories):
    """The trajectories of all processes, group-major, as one process would have played them."""
    return sorted((t for part in world.gather(trajectories) for t in part),
                  key=lambda t: (t.group_id, t.member))


def informative_groups(trajectories):
    """How many groups have a positive reward std."""
    returns, groups = zip(*((t.episode_return, t.group_id) for t in trajectories))
    return int((starpo.group_std(torch.tensor(returns), torch.tensor(groups)) > starpo.ZERO).sum())


def rules_of(config):
    """How training holds conversations: the options of the same names."""
    return Rules(**{f.name: getattr(config, f.name) for f in fields(Rules)})


def choose_groups(learner, batch, config):
    """Which groups are trained on, at most the first `num_groups`: kept (P,) bool, and metrics."""
    reward_std = starpo.group_std(*map(batch.by_episode, (batch.episode_returns, batch.group_ids)))
    kept = starpo.filter_groups(reward_std, config.filter_value, config.filter)
    kept &= kept.cumsum(0) <= config.num_groups
    # Rounding may differ between machines; the choice must not.
    kept = learner.world.gather(kept.cpu())[0].to(kept.device)
    return kept, {"reward_std": float(reward_std.mean()), "groups_kept": int(kept.sum()),
                  "groups_zero_std": int((reward_std <= starpo.ZERO).sum())}


# ---- What the losses need: old logprobs, rewards, advantages -------------------------------------
@torch.no_grad()
def compute_targets(learner, batch, config):
    """The batch with logprobs, values, rewards and advantages; and metrics.

    In float32, old_logprobs are the sample_logprobs: recomputing them would give the same up to
    rounding (`logprob_gap`). They are recomputed in bfloat16 and with `--stale` (other weights).
    """
    def logprobs_of(policy):
        return in_micro_batches(learner, batch, config, lambda part: policy.logprobs(
            part.tokens, part.response_mask, config.temperature)[0])

    exact = next(learner.policy.model.parameters()).dtype == torch.float32 and not config.stale
    batch = replace(
        batch, old_logprobs=batch.sample_logprobs if exact else logprobs_of(learner.policy),
        ref_logprobs=logprobs_of(learner.reference) if learner.reference else None)
    scores, rewards, metrics = token_rewards(batch, config)
    batch = replace(batch, scores=scores, token_rewards=rewards)
    if learner.critic:
        batch = replace(batch, values=in_micro_batches(
            learner, batch, config, lambda part: learner.critic(part.tokens, part.response_mask)))
    batch = compute_advantages(batch, config)
    if config.tis_cap:  # scales the policy loss, which is proportional to the advantage
        batch = replace(batch, advantages=batch.advantages * starpo.truncated_weights(
            batch.old_logprobs, batch.sample_logprobs, config.tis_cap, batch.response_mask))
    if learner.critic:
        target = batch.value_targets[batch.value_mask]
        residual = target - batch.values[batch.value_mask]
        metrics["explained_variance"] = 1 - float(residual.var() / (target.var() + 1e-8))
    return batch, metrics


def token_rewards(batch, config):
    """scores (B,), token_rewards (B, T) of a Batch, and metrics. GRPO and its like read scores
    alone (GiGPO also the environment's rewards by turn).

    1. The overlong penalty is added to the environment's rewards.
    2. scores: their sums by episode.
    3. token_rewards. Credit "episode": the score, on the row's last sampled token. Credit "turn":
       the rewards, on a turn's last token; in windowed contexts, whose rows are turns, the
       return from that turn on.
    4. The KL is subtracted: from token_rewards token by token, from scores its sum.
    """
    rewards, scores, metrics = batch.rewards, batch.episode_returns, {}
    if config.overlong:
        penalty = starpo.overlong_penalty(batch.turn_ids, config.max_new_tokens, config.overlong)
        rewards = rewards + penalty
        scores = scores + batch.episode_sums(penalty.sum(dim=1))
        metrics["overlong_penalty"] = float(penalty.sum() / len(batch.episode_ids.unique()))
    if config.credit == "episode":
        rewards = starpo.last_token_rewards(scores, batch.response_mask)
    elif config.context != "full":
        of_turns = batch.turn_totals(rewards)  # (E, K)
        returns = starpo.returns_to_go(of_turns, torch.ones_like(of_turns).bool(),
                                       config.gamma_turn)
        last = starpo.turn_ends(batch.turn_ids, batch.response_mask)
        rewards = batch.turns_to_tokens(returns) * last
    if config.kl_reward_coef:
        kl = starpo.kl_estimate(batch.old_logprobs, batch.ref_logprobs, "k1") * batch.response_mask
        rewards = rewards - config.kl_reward_coef * kl
        scores = scores - config.kl_reward_coef * batch.episode_sums(kl.sum(dim=1))
        metrics["kl_reward"] = float(kl.sum() / batch.response_mask.sum())
    return scores, rewards, metrics


def compute_advantages(batch, config):
    """Add the estimator's advantages; with a critic they are whitened, and its targets added."""
    kind, estimate = starpo.ESTIMATORS[config.advantages]
    if kind == "critic":
        advantages, returns, value_mask = estimate(batch, config)
        advantages = starpo.whiten(advantages, batch.response_mask, value_mask)
        return replace(batch, advantages=advantages, value_targets=returns, value_mask=value_mask)
    advantages = estimate(batch, config)
    shapes = batch.by_episode(batch.scores).shape, batch.tokens.shape
    if not torch.is_tensor(advantages) or advantages.shape not in shapes:
        found = getattr(advantages, "shape", advantages)
        raise ValueError(f"advantages {config.advantages}: got {found}, expected a tensor (E,), "
                         "one an episode, or (B, T).")
    per_episode = advantages.ndim == 1
    return replace(batch, advantages=batch.to_tokens(advantages) if per_episode else advantages)


@torch.no_grad()
def in_micro_batches(learner, batch, config, function):
    """(B, T), put together from function(micro-batch) -> (b, t)."""
    result = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    for rows in parts_of(batch, learner, config):
        part = function(batch.take(rows))
        result[rows, :part.shape[1]] = part
    return learner.world.sum(result)


def parts_of(batch, learner, config):
    """The rows of each micro-batch that this process computes."""
    return learner.policy.micro_batches(batch.tokens, batch.lengths, config.token_budget,
                                        learner.world.rank, learner.world.size)


# ---- The update ----------------------------------------------------------------------------------
def set_learning_rates(learner, config, step):
    """Each rate falls linearly, over all steps, to `lr_final` times its first value."""
    decay = 1 - (1 - config.lr_final) * (step - 1) / max(1, config.steps - 1)
    learner.optimizer.set_lr(config.lr * decay)
    if learner.critic:
        learner.critic_optimizer.set_lr(config.critic_lr * decay)


def mini_batches(batch, config, step):
    """The mini-batches of all epochs: random rows, with each token's weights in the losses. Sizes
    differ by at most one row, so no row weighs much more than another."""
    count = math.ceil(len(batch) / config.mini_batch)
    for epoch in range(config.epochs):
        shuffle = torch.Generator().manual_seed(hash_seed(config.seed, step, epoch))
        order = torch.randperm(len(batch), generator=shuffle).to(batch.tokens.device)
        for index in order.tensor_split(count):
            yield add_loss_weights(batch.take(index), config)


def add_loss_weights(mini, config):
    """Add the weight of each token in the losses of a mini-batch and in its mean metrics."""
    weights = partial(starpo.loss_weights, mode=config.aggregation, horizon=config.max_context)
    return replace(
        mini, loss_weights=weights(mini.response_mask),
        mean_weights=starpo.loss_weights(mini.response_mask),
        value_weights=None if mini.value_mask is None else weights(mini.value_mask),
        predicted_weights=starpo.loss_weights(mini.predicted_mask))


def backward(learner, mini, config, progress=lambda rows: None):
    """Backpropagate this process's micro-batches. Returns {metric: its share of the mean}."""
    sums = Counter()
    for rows in parts_of(mini, learner, config):
        part = mini.take(rows)
        losses, shares = policy_losses(learner.policy, part, config)
        sum(losses.values()).backward()
        if learner.critic:
            values = learner.critic(part.tokens, part.value_mask)
            shares["value_loss"] = starpo.aggregate(
                starpo.value_loss(values, part.values, part.value_targets), part.value_weights)
            shares["value_loss"].backward()
        sums.update({name: share.detach() for name, share in shares.items()})
        progress(len(rows))
    return {name: float(share) for name, share in sums.items()}


def policy_losses(policy, part, config):
    """{term: loss} and {metric: value}: what this micro-batch adds to the mini-batch's."""
    loss_share = partial(starpo.aggregate, weights=part.loss_weights)
    metric_share = partial(starpo.aggregate, weights=part.mean_weights)
    mask = part.response_mask | part.predicted_mask  # the latter is all False without ECHO
    logprobs, entropy = policy.logprobs(part.tokens, mask, config.temperature)
    inputs = logprobs, part.old_logprobs, part.advantages, config.clip_low, config.clip_high
    if config.ratio == "detached":
        loss, clipped = starpo.cispo_loss(*inputs)
    else:
        loss, clipped = starpo.policy_loss(
            *inputs, config.dual_clip, part.response_mask if config.ratio == "sequence" else None)
    losses = {"task": loss_share(loss)}
    if config.entropy_coef:
        losses["entropy"] = -config.entropy_coef * loss_share(entropy)
    shares = {"policy_loss": losses["task"], "entropy": metric_share(entropy)}
    if config.kl_coef:
        kl = starpo.kl_estimate(logprobs, part.ref_logprobs, config.kl_estimator)
        losses["kl"] = config.kl_coef * loss_share(kl)
        shares["kl_ref"] = metric_share(kl)
    if config.echo_coef:
        shares["echo_loss"] = starpo.aggregate(-logprobs, part.predicted_weights)
        losses["echo"] = config.echo_coef * shares["echo_loss"]
    with torch.no_grad():
        clipped &= part.advantages.abs() > starpo.ROUNDING  # advantage 0: nothing to clip
        shares |= {"clip_fraction": metric_share(clipped.float()),
                   # KL(old || now): the tokens are samples of the old policy
                   "approx_kl": metric_share(starpo.kl_estimate(part.old_logprobs, logprobs)),
                   "logprob_gap": metric_share((logprobs - part.sample_logprobs).abs())}
    return losses, shares


# ---- Measuring -----------------------------------------------------------------------------------
def validate(learner, groups, config, callbacks):
    """Metrics of fixed instances of a split that training never plays."""
    rules = rules_of(config).held_out(config.val_temperature)
    learner.policy.begin_rollout()
    with callbacks.progress(f"validation on {groups.split}: tokens sampled") as progress:
        own = learner.collect(learner.policy, learner.frame, groups, 0, rules, progress)
    trajectories = in_order(learner.world, own)
    callbacks.episodes(learner.step, groups.split, trajectories)
    return held_out_metrics(groups.split, trajectories)


def hash_seed(*parts):
    return zlib.crc32(repr(parts).encode())


def main(argv=None):
    """The command."""
    from minragen.run import start

    start.main(argv)


if __name__ == "__main__":
    main()
