"""Mutants: wrong lines that the tests must notice, each tried by itself on a copy of the project.

    .venv/bin/python tests/mutants.py                # the table below
    .venv/bin/python tests/mutants.py --only train   # only files whose name holds `train`
    .venv/bin/python tests/mutants.py --sample       # 150 generic mutants instead

A row is (text, wrong text, what is then wrong). Its text stands exactly once in its file; a row
whose text is gone is an error, so the table has to move with the code. The sample is drawn from all
mutants that cosmic-ray makes of the package, with the tree's hash as seed. Results:
lab/results/mutants.json. A run that was interrupted goes on where it was.

First coverage.py records which tests execute which lines. A row tries the test that noticed it in
the last run, then those that execute its line; if all of them pass, in the end all tests of
`make test`, or the file of tests/long that LATER names. A generic mutant tries a minute of the
tests that execute its line.
Every mutant runs in a forked process that has imported torch and transformers already. It dies when
a test fails, when nothing can be collected, or when the tests take longer than TIME_LIMIT, or than
a minute and five times their usual time.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parent.parent
COPIED = ("minragen", "tests", "docs", "lab", "runs", "README.md", "Makefile",
          "CONTRIBUTING.md", "pyproject.toml", "requirements.lock", "requirements-test.lock",
          ".gitignore")
RESULT = ROOT / "lab" / "results" / "mutants.json"
PROGRESS = ROOT / "runs" / "mutants.jsonl"  # outcomes so far, each with the trees that it is of
# Rows by somebody who had read neither the tests nor the table, drawn before any test ran on them.
STRANGERS = ROOT / "lab" / "results" / "strangers.json"
TIME_LIMIT = 600.0  # seconds of wall-clock time for the tests of one mutant
SPECIFICATION = ("tests", "--ignore=tests/long")  # what `make test` runs
MEMORY_LIMIT = 16 * 2**30  # bytes of address space, so that a runaway mutant is stopped early
SAMPLE, SAMPLE_SECONDS = 150, 60.0  # generic mutants; tests of each
LEAST_SHARE = 0.85  # of the generic sample that must die
PRELOADED = ("torch", "transformers", "transformers.models.llama.modeling_llama", "gymnasium",
             "matplotlib.figure", "hypothesis", "jinja2", "pytest", "safetensors.torch",
             "scipy.stats")
# Files whose tests are skipped without a package.
NEEDS = {"more/lora.py": "peft", "environments/openenv.py": "openenv", "look/serve.py": "openenv",
         "environments/reasoning_gym.py": "reasoning_gym"}
# Tables -> the file whose import reads them: its tests are those of the table's rows.
READ_BY = {"data/presets.toml": "config.py"}
# Rows that `make test` cannot notice -> the tests of `make test-all` that do.
LATER = dict.fromkeys((
    "rollout.py: the host waits twice a token", "rollout.py: the host waits for its uploads",
    "cache.py: the host waits when rows leave", "cache.py: lengths stay on the host"),
    ("tests/long/test_accelerator.py",)) | {
        "run/command.py: a killed process is not named": ("tests/long/test_launch.py",)}
MUTANTS = {
    "nano.py": [
        ("(groups - mean) / (std + 1e-6)", "(groups - mean)", "advantages are not divided by std"),
        ("groups.mean(dim=1, keepdim=True), groups", "groups.mean(), groups",
         "the baseline is the mean of all groups"),
        ("1 - CLIP, 1 + CLIP", "1 - CLIP, 1 + 2 * CLIP", "the clip is another than train's"),
        ("(logits / temperature)", "logits", "validation is at temperature 1"),
        ("held-out success {held_out_success(policy, frame):.3f}\", flush=True)\n    for",
         "\", flush=True)\n    for", "success before RL is not shown"),
        ('frame.between(token, observation)', 'frame.between(None, observation)',
         "a reply that ended itself is ended twice"),
        ('collect(policy, frame, "val", 0', 'collect(policy, frame, "train", 0',
         "success is measured on what was trained on"),
        (", sampled=True, logprob", ", sampled=token not in frame.end_ids, logprob",
         "the end of a turn is not trained"),
    ],
    "train.py": [
        ("clipped &= part.advantages.abs() > starpo.ROUNDING",
         "clipped &= part.advantages.abs() > 0",
         "tokens without an advantage count as clipped"),
        ("batch.take(rows),", "batch,", "dropped groups are trained on"),
        ("scores + starpo", "scores - starpo", "overlong replies are paid"),
        ('= "group" else', '= "batch" else', "BRPO normalises over groups"),
        ('what == "lengths"', "False", "the filter by length looks at returns"),
        (" / tokens, batch.episode_ids)\n             / starpo.episode_sums("
         "torch.ones_like(tokens)", ", batch.episode_ids)\n             / starpo.episode_sums("
         "tokens", "long turns outweigh short ones in the filter's entropy"),
        ("-config.entropy_coef *", "config.entropy_coef *", "entropy is punished"),
        ("= config.kl_coef", "= -config.kl_coef", "leaving the reference is rewarded"),
        ("mask, config.aggregation, config.max_context", "mask", "aggregation is never applied"),
        ("config.clip_low, config.clip_high", "config.clip_low, config.clip_low",
         "clip_high is never applied"),
        ("*inputs, config.dual_clip,", "*inputs, 0.0,", "dual_clip is never applied"),
        ('config.ratio == "detached"', "False", "CISPO is PPO"),
        ("starpo.loss_weights(mini.predicted_mask)", "weights(mini.predicted_mask | "
         "mini.loss_mask)", "ECHO predicts replies, too"),
        ("config.echo_coef * shares", "-config.echo_coef * shares", "ECHO unlearns observations"),
        ("(~batch.void).nonzero()", "batch.void.nonzero()", "only void episodes are trained on"),
        ("batch.advantages * starpo.truncated", "starpo.truncated",
         "stale samples lose their advantages"),
        (' and not config.stale\n', "\n", "PPO's ratio of stale samples starts at older weights"),
        ("    with learner.playing(), log.progress(", "    with log.progress(",
         "stale runs play with the newest weights"),
        ('part.loss_mask if config.ratio == "sequence" else None', "None",
         "ratio=sequence is never applied"),
        ("starpo.loss_scale(kept, config.loss_scaling)", "1.0", "loss_scaling is never applied"),
        ("config.soft_reweight", "False", "soft_reweight is never applied"),
        ("config.length_weight", "False", "length_weight is never applied"),
        ("config.zero_task", "False", "zero_task is never applied"),
        ("part.loss_mask, config.temperature)[", "part.loss_mask)[",
         "old and reference logprobs are at temperature 1"),
        ("response_mask, config.temperature", "response_mask",
         "the filter's entropy is at temperature 1"),
        ("critic_lr * decay", "critic_lr", "the critic's rate does not decay"),
        ("step, epoch)", "step)", "every epoch has the same shuffle"),
        ("target - batch", "batch", "explained_variance is of the values"),
        ("part.old_logprobs, logprobs", "logprobs, part.old_logprobs", "approx_kl is reversed"),
        ("rewards - learner", "rewards + learner", "a KL in the reward is paid to tokens"),
        ("batch.episode_ids.unique()", "batch", "the KL controller counts rows, not trajectories"),
        ("<= config.num_groups", "<= len(kept)",
         "resampling trains on more than num_groups groups"),
        ("len(steps) ", "1 ", "metrics are summed over optimizer steps"),
        ("config.value_clip", "1e9", "value_clip is never applied"),
        ("tensor_split(count", "split(config.mini_batch",
         "the last mini-batch may be small, and its rows then count several times"),
        ("batch.scores,", "batch.episode_returns,", "soft_reweight weighs by raw returns"),
        ("min(1, (step - 1) / max(1, last - 1)", "(step - 1) / max(1, last - 1",
         "the learning rate falls below its final value"),
        (".rounds += attempt + 1", ".rounds = 1", "rounds share instances"),
        ("learner.skipped = 0 if finite else", "learner.skipped =",
         "a good update is a skipped one"),
        ("TRAIN_SEED + config", "config", "training plays validation's seeds"),
        (") >= config.", ") > config.", "resampling plays a round too many"),
        ("if not t.error]  # by environments that did not fail", "]",
         "episodes whose environment failed are trained on"),
        ("mini.take(rows", "add_loss_weights(mini.take(rows), config",
         "each micro-batch is averaged by itself"),
        ("key=lambda t: (t.group_id, t.member))", "key=lambda t: t.member)",
         "episodes are not in the order of one process"),
        ("learner.critic(part.tokens, part.step_mask)",
         "learner.critic(part.tokens, part.response_mask)",
         "the values of observations are 0 where they are time steps"),
        ("sampled / max(rollout_seconds, 1e-9)}", "sampled / (time.time() - began)}",
         "tokens_per_second is of the whole step"),
        ("t.response_tokens for t in trajectories", "t.response_tokens for t in played",
         "tokens of failed episodes are missing in tokens_per_second"),
        ('exact and config.loss_mask == "response"', "exact",
         "observations in the loss are compared with logprobs of 0"),
        ("1 + trajectories[-1].group_id // config.num_groups", "learner.rounds",
         "rollouts are counted over the whole run"),
        ("filtered | log.diagnose(",
         "filtered | describe(\n            [t for t in played if kept[t.group_id]] or "
         "played) | log.diagnose(",
         "metrics are described after the filter"),
        ("sums.update({name: share.detach()", "sums = Counter({name: share.detach()",
         "the logged loss is that of the last micro-batch"),
        ("log.diagnose(step, played)", "log.diagnose(step, trajectories)",
         "episodes whose environment failed are diagnosed"),
        ("        sums.update(part)", "        sums = Counter(part)",
         "metrics are those of the last process"),
        ("    learner.policy.begin_rollout()\n", "    pass\n",
         "images are kept until the memory is full"),
        ("part.loss_mask | part.predicted_mask,\n                                        "
         "config.temperature)", "part.loss_mask | part.predicted_mask)",
         "the learner's logprobs are at temperature 1"),
        ("max(1, budget),\n"
         "                                        learner.world.rank, learner.world.size)",
         "max(1, budget))",
         "every process computes all rows, whose gradients count several times"),
        ("learner.world.gather(learner.gradients(learner, mini, config, progress))",
         "[learner.gradients(learner, mini, config, progress)]",
         "metrics are one process's share of the mini-batch"),
    ],
    "rollout.py": [
        ("    return collect(policy, frame, groups, first_seed, rules, progress)",
         "    return collect(policy, frame, groups, 0, rules, progress)",
         "whatever is evaluated begins at the first instance"),
        ("setdefault((t.group_id, state)", "setdefault(state",
         "GiGPO compares turns of different groups"),
        ("len(self.ids) == self.cap", "len(self.ids) > self.cap",
         "a reply is a token longer than allowed"),
        ("(rules.temperature or 1.0)", "1.0", "sampling ignores the temperature"),
        ("TopPLogitsWarper(rules.top_p", "TopPLogitsWarper(1 - rules.top_p",
         "top-p keeps the mass that it should cut"),
        ("turn_rewards[turn]", "turn_rewards[-1]", "every turn gets the last reward"),
        ("tensor([e for _, _, e in rows]", "arange(len(rows)",
         "every turn counts as an episode in the windowed contexts"),
        ("[t for t in trajectories if not t.error]", "trajectories",
         "an episode that could not begin is played"),
        ("MASS = 2**38", "MASS = 2**18", "tokens below four millionths are never drawn"),
        ("row.cached = len(t.tokens) - 1", "row.cached = len(t.tokens)",
         "the last sampled id never enters the cache"),
        ("self.rules.token_budget // max(map(len, fresh), default=1)", "len(fresh) or 1",
         "prompts and observations ignore the token budget"),
        ("enumerate(self.sampling) if row.stop is None]", "enumerate(self.sampling)]",
         "tokens that were sampled after a reply's end are kept"),
        (".unique(return_inverse=True)[1]", "",
         "a group whose episodes all failed is still a group"),
        ("[tokens.int(), logprobs.view(torch.int32)]).cpu()",
         "[tokens.int().cpu(), logprobs.view(torch.int32).cpu()])", "the host waits twice a token"),
        ("x.to(self.policy.device, non_blocking=True)", "x.to(self.policy.device)",
         "the host waits for its uploads"),
        ("        if rules.top_k > 0:\n"
         "            kept = TopKLogitsWarper(rules.top_k)(None, kept)\n"
         "        if rules.top_p < 1:\n"
         "            kept = TopPLogitsWarper(rules.top_p)(None, kept)\n",
         "        if rules.top_p < 1:\n"
         "            kept = TopPLogitsWarper(rules.top_p)(None, kept)\n"
         "        if rules.top_k > 0:\n"
         "            kept = TopKLogitsWarper(rules.top_k)(None, kept)\n",
         "top_p is taken before top_k"),
        ("(logits.float() / (rules.temperature or 1.0)).log_softmax(dim=-1)",
         "(logits / (rules.temperature or 1.0)).log_softmax(dim=-1).float()",
         "the sampler computes in bfloat16"),
        ("max(longest + self.rules.max_new_tokens, padded))",
         "longest + self.rules.max_new_tokens)", "padding is written beyond the slots"),
        ("        self.noise = self.noise[1:]\n", "",
         "every token of a reply draws the same random number"),
        ("[earlier, noise], dim=1)", "[noise, earlier], dim=1)",
         "rows that are fed while others sample get the noise of these"),
        ("max(1, self.rules.feed_share * rows))", "1)", "rows are fed one by one"),
        ("self._take_results(wait)", "self._take_results(not self.sampling)",
         "a row that is ready is kept waiting by those in flight"),
        ("self.ready.sort(key=lambda row: row.slot)", "pass",
         "the order of results changes the digits of a run"),
        ("if not (self.together and live):", "if not live:",
         "environments that wait get a reply when the last one has ended"),
        ("self.slots.swap(gaps, [order[i] for i in gaps])", "pass",
         "rows change places without their slots"),
        ("if not t.stop and self.frame",
         "if not (t.stop or row.stop is StopReason.CONTEXT) and self.frame",
         "in the windowed contexts a reply cut off at the context ends the episode"),
        ("tokens = self.noise[:, index], tokens", "tokens = self.noise[:, :len(index)], tokens",
         "rows get the noise of others when some leave"),
        ("    policy.begin_rollout()\n", "    pass\n", "validation keeps the images of training"),
    ],
    "starpo.py": [
        ("scores = (scores / unit).round() * unit", "pass",
         "equal spreads do not tie, by their last bit"),
        ("std <= ROUNDING * torch.zeros_like", "std <= 0 * torch.zeros_like",
         "returns that differ by rounding count as fully as a success"),
        ("distance / mean.where(mean > 0, 1.0)[group_ids]", "distance", "MaxRL is Dr. GRPO"),
        ("state_ids[at], turns,", "turn_ids[at], turns,", "GiGPO compares turns of equal number"),
        ("turn_ids[at], gamma)", "turn_ids[at], 1.0)", "step_gamma is never applied"),
        ("turn_ids >= 0, by_std,\n", "turn_ids >= 0, True,\n",
         "GiGPO divides whole episodes by their std in any case"),
        ("(logprobs - old_logprobs).detach()", "logprobs - old_logprobs",
         "CISPO's weight has a gradient"),
        (".exp().clamp(max=cap)", ".exp()", "importance weights are not truncated"),
        (".where(response_mask, 1.0)\n", "\n", "tokens that were not sampled have weights"),
        ("= (old_logprobs - sample_logprobs)", "= (sample_logprobs - old_logprobs)",
         "tokens that have become likelier count less"),
        ("response_mask, c.norm_by_std", "response_mask, True", "norm_by_std is never applied"),
        ("gamma, c.lam, c.gamma_turn),", "gamma, c.lam, 1.0),", "gamma_turn is never applied"),
        ("(value - eps) * ranked.abs().sum()", "value * ranked.abs().sum() - eps",
         "the eps of top_p is absolute, so rewards on a small scale are filtered away"),
        ('(value * ranked[0] if select == "largest" else ranked[0] / value)', "value * ranked[0]",
         "min_p of the smallest keeps nothing but the best"),
        ("group_ids, v * once)", "group_ids, v)",
         "an episode of three rows counts three times in its group"),
        (") / (size - 1).clamp(min", ") / size.clamp(min",
         "the std of a group is that of a population, not of a sample"),
        ("ends * bool(", "bool(", "the overlong penalty is charged on every token of the reply"),
        ("ones_like(rewards).masked_fill(response_mask", "full_like(rewards",
         "observation tokens consume a discount step of REINFORCE"),
        ("(torch.ones_like(r) * gamma * lam).masked_fill(~response_mask, 1.0)",
         "torch.ones_like(r) * gamma * lam", "observation tokens consume a step of GAE"),
        (".masked_fill(ends, 0.0)", "", "bi-level GAE counts the later turns twice"),
        ("where(advantages < 0, torch.minimum(loss, ceiling), loss", "minimum(loss, floor",
         "the dual clip also bounds tokens with a good advantage"),
        ("True) / count", "True) / log_ratio.shape[1]",
         "the sequence ratio is a mean over the padded row"),
        ("mask.any(dim=1).sum().clamp(min=1", "torch.tensor(len(mask)",
         "rows without tokens count in the mean over sequences"),
        ("torch.where(weights > 0, x, 0.0)", "x", "nan outside the mask reaches the loss"),
        ("return torch.expm1(d) - d", "return (torch.expm1(d) - d).clamp(max=10)",
         "the KL lets go of a token that has become rare"),
        ("c: (*bi_level_gae(\n"
         "        b.token_rewards, b.values", "c: (*bi_level_gae(\n"
         "        b.token_rewards, 0 * b.values", "bi-level GAE ignores the critic"),
        ("c: (*turn_gae(\n"
         "        b.token_rewards, b.values", "c: (*turn_gae(\n"
         "        b.token_rewards, 0 * b.values", "turn-wise GAE ignores the critic"),
    ],
    "checks.py": [
        (': c.advantages in ("gae", "bi_level_gae"),', ': estimator_kind(c) == "critic",',
         "advantage_mask all is accepted where it changes nothing"),
        (', c.filter_include_zero)\n     != ("top_p", 1.0, "reward_std", False)',
         ')\n     != ("top_p", 1.0, "reward_std")', "dynamic sampling keeps groups without std"),
        ("and not has_effect(config)", "and False", "options that change nothing are accepted"),
    ],
    "chat.py": [
        ('"".join(parts[:count])', '"".join(parts)', "no part of a format ends before the last"),
        (r'replace("><", r">\s*<")', 'replace("><", "><")',
         "a blank between two tags makes a reply invalid"),
        ("<0x(?!3E)..>", "<0x..>", "the byte of a closing bracket ends no tag"),
        ("lambda tags: f\"< {tags[0][1:]}\"", "lambda tags: tags[0]",
         "a demonstration ends where its thought quotes a tag"),
        (r'1 + self._ends[before].pattern.count(r">\s*<")', "1",
         "two tags with many blanks between them end no part"),
        ("while self._characters > REMEMBERED", "while not self._known",
         "the ids of long observations are never forgotten"),
        ("groups.envs[row].alias or groups.names[g]", "groups.names[g]",
         "an environment behind an address is named by its address"),
        ("groups.seeds[g],", "groups.seeds[0],",
         "all episodes seem to be of the first instance"),
        ("self.end_of_turn, tokenizer", "tokenizer",
         "the template's own end of turn does not end a reply"),
        ("eos_token_id, *end_ids", "eos_token_id", "the ends of the generation config are ignored"),
        ("ids[len(line):] if ids[:len(line)] == line else self", "self",
         "SentencePiece puts a blank before every turn and reply"),
        ("len(ids) < rules.max_context", "len(ids) <= rules.max_context",
         "an observation may fill the context"),
        ("ids), False, -1", "ids), True, -1", "observations count as sampled"),
        ("sum(self.turn_rewards)", "self.turn_rewards[-1]",
         "the return of an episode is its last reward"),
        ('valid", "effective", "grounding", "worldmodeling', "effective",
         "`valid` and F1 are summed over turns"),
        ("StopReason.TERMINATED if terminated else", "StopReason.TERMINATED if t.turns else",
         "an episode that is cut off has reached an end"),
        ('self.success or info.get("success", 0) > 0', 'info.get("success", 0) > 0',
         "only the last turn's success counts"),
        ("{before}{plain(observation)}", "{before}{observation}",
         "special tokens in the first observation open turns"),
    ],
    "models.py": [
        ("linear(hidden.float(), layer.weight.float(), bias)", "layer(hidden).float()",
         "float32_logits rounds the logits to bfloat16 first"),
        ("torch.tanh(logits / cap) * cap if cap else logits", "logits",
         "the soft cap of the logits is ignored"),
        ('(getattr(config, "logit_scale", None) or 1)', "1", "Cohere's logits are not scaled"),
        ("hidden).float() / (temperature or 1.0)\n"
         "        log_p = logits.log_softmax(dim=-1)", "hidden) / (temperature or 1.0)\n"
         "        log_p = logits.log_softmax(dim=-1).float()",
         "the learner's logprobs are computed in bfloat16"),
        ("        nn.init.zeros_(self.head.weight)\n", "",
         "the first advantages are the noise of an untrained critic"),
        ("module.parameters() if not p.requires_grad}", "()}", "frozen weights are copied"),
    ],
    "cache.py": [
        ("old[:, :, :filled].index_select(0, index)", "old[:len(index), :, :filled]",
         "keys stay in their slots when rows leave"),
        ("positions.minimum(slots.lengths[rows, None] - 1)", "positions",
         "padding asks for positions that the model lacks"),
        ("] > queries[", "] >= queries[", "a sliding window is a key too wide"),
        ("hidden[:, :-1][mask[:, 1:]]", "hidden[mask]",
         "other decoders' logprobs are read at the token and not before it"),
        ("index.to(made.device, non_blocking=True)", "index.to(made.device)",
         "the host waits when rows leave"),
        ("made.bounds = torch.cat([slots.bounds[index]", "made.bounds = torch.cat([0 * index",
         "slots are copied without their ends"),
        ("self.lengths = torch.zeros(rows, dtype=torch.int64, device=self.device)",
         "self.lengths = torch.zeros(rows, dtype=torch.int64)", "lengths stay on the host"),
        ("x[to] = x[of]", "x[to[:len(a)]] = x[of[:len(a)]]",
         "a finished row loses its keys to the one that takes its place"),
        ("] = [x.new_zeros(", "] = [x.new_empty(", "slots begin with what was in the memory"),
        ("            x.new_zeros(", "            x.new_empty(",
         "copied slots end with what was in the memory"),
        ("visible = keys[:, None, None] <= positions[:, None, :, None]",
         "visible = keys[:, None, None] <= positions.amax(1)[:, None, None, None]",
         "a query sees the tokens after it"),
    ],
    "envs.py": [
        ("Observation(str.__str__(shown), image_of(shown)", "Observation(shown, image_of(shown)",
         "methods of an observation run outside of its turn"),
        ("number(x) for name, x in dict.items(info)", "x for name, x in dict.items(info)",
         "a metric that is no number ends the run"),
        ("[group], options", "[group] + member, options",
         "the members of a group play different instances"),
        ('zlib.crc32(instance.encode(errors="replace")', "hash(instance",
         "the split of an instance depends on the process"),
        ("= len(outcomes)", "= len(pieces)",
         "bad and surplus pieces use up the actions of the episode"),
        ("member + 1,", "member,",
         "member 0 slips by the numbers that drew its instance at the second attempt"),
        ("self.split:", "self.split or attempt > 2:",
         "after a few draws an instance of another split is taken"),
        ("self.budget.max_actions_per_turn > 1 and not self.multi_action", "False",
         "an environment of single actions plans for more than it may play"),
        ("seed = int(self.np_random.integers(2**31))", "seed = 0",
         "without a seed every reset draws the same instance"),
        ("options or {}, dict(mixture)", "options or {}, self.names",
         "a process refuses the options of an environment that another process plays"),
        ("{reward:.4g}", "{reward:.2g}", "the reward that is shown is rounded to two digits"),
        ("self.budget.max_turns > 1 and self._live:", "self.budget.max_turns > 1:",
         "a finished episode says that turns are left"),
        ("any(o.success for o in outcomes)", "bool(outcomes) and outcomes[-1].success",
         "only the last action of a turn can succeed"),
        ("group_size)[share]]", "group_size)]", "each process plays all episodes"),
        ("divmod(row, group_size) for row", "divmod(row, num_groups)[::-1] for row",
         "members and groups are mixed up"),
        ("self.turns_left == 0 or self.actions_left == 0", "self.turns_left == 0",
         "an episode without actions left goes on"),
        ("not -LARGEST < x < LARGEST", "False", "a reward that is no number is trained on"),
        ('and not getattr(x, "ndim", 0)', "", "an array is taken as a number"),
        ("str.__str__(env.state)),\n                    ", "env.state),\n                    ",
         "a state that is no text ends the run"),
        ("Failure(f\"{name}: {said}\")", "Failure(said)", "a failure does not tell its kind"),
        ("except BaseException as error:\n            if",
         "except Exception as error:\n            if",
         "a panic of an extension ends the run"),
        ('if name.partition("/")[0] not in RUN_METRICS and re', "if re",
         "an environment's metric takes a name of ours"),
        ('self.state.replace(IMAGE, "< image>")', "self.state",
         "data can mark images"),
        ("self.envs[row] = make(**self._given[self.names[group]])", "pass",
         "an environment that raised is used again in the state in which it broke"),
    ],
    "config.py": [
        ('entropy", "std")}', 'entropy", "mean")}', "entropy_std is the mean"),
        ('opt("k2", "estimator', 'opt("k3", "estimator', "one rare token is the whole update"),
        (" | of_model", "", "the preset of pretrained models is not applied"),
        ('given | {"env_arg": (*kept, *options)}', "given",
         "a given environment option switches all of the preset's off"),
        ("for name in (o, env + dot + o)}", "for name in (env + dot + o,)}",
         "an option for all environments of a mixture loses to the presets of single ones"),
        ("(option, *DATA)", "(option,)", "tiny's options shape the data of the user"),
        ("key not in BUDGETS and ", "", "a mixture gets the budget of one environment"),
        ("config.num_groups * (1 + config.resample)", "config.num_groups",
         "neighbouring run seeds share instances if they resample"),
        ("clip_high: float = opt(0.28", "clip_high: float = opt(0.2",
         "by default nothing is clipped higher"),
        ("entropy_coef: float = opt(0.001", "entropy_coef: float = opt(0.01",
         "the default entropy bonus is ten times as large"),
        ("max_grad_norm: float = opt(1.0", "max_grad_norm: float = opt(10.0",
         "gradients are not clipped as in the stored runs"),
        ("val_temperature: float = opt(0.5", "val_temperature: float = opt(1.0",
         "validation is not sampled as in the stored runs"),
        ("return [*config.env_arg, *budgets, *config.layer]", "return [*config.env_arg]",
         "runs of different budgets are compared"),
    ],
    "data/presets.toml": [
        ("filter_value = 0.25", "filter_value = 0.75",
         "StarPO-S keeps three quarters of the groups"),
        ("steps = 110\nwarmup_steps = 1600", "steps = 110\nwarmup_steps = 800",
         "the preset has half of the demonstrations of the stored runs"),
        ("lr_final = 0.1", "lr_final = 1.0", "the presets' learning rates do not decay"),
    ],
    "eval.py": [
        ("config), args.split, args", 'config), "val", args', "--split is ignored"),
        ("if args.temperature is not None:", "if args.temperature:",
         "--temperature 0 samples at the run's temperature"),
        ("of_set(config, args.set) if args.set else config", "config", "--set is ignored"),
        ('rpartition(".")[0] in ("", env)', 'rpartition(".")[0] == env',
         "an option without the environment's name is ignored"),
        ("config.max_new_tokens,\n                        config.val_temperature",
         "config.max_new_tokens,\n                        0.5",
         "a server samples at its own temperature"),
        ("runs.RUNS / run, say, only)", "runs.RUNS / run, say)",
         "the last checkpoint is measured as the best"),
        ("groups, rules_of(config)", "groups, rules_of(type(config)())",
         "a run with a window is measured without"),
    ],
    "more/stale.py": [
        ("[-self.steps - 1:]", "[-self.steps:]", "samples are a step too fresh"),
        ("            self.model.load_state_dict(now, strict=False)", "            pass",
         "older weights are trained"),
    ],
    "more/echo.py": [
        ("key=length) - 1)", "key=length))", "ECHO predicts the token after a state"),
        ('f"\\n{observation}".find(f"\\n{state}")', "0", "ECHO predicts the reward line"),
    ],
    "more/api.py": [
        ("                DEADLINE, self", "                1e6, self",
         "a server that drips its headers is read for ever"),
        ("self.max_new_tokens, self.example)", "self.max_new_tokens)",
         "a server is not shown the example"),
    ],
    "run/reproduce.py": [
        (', run=again, log="")', ", run=again)", "a reproduced run writes to W&B once more"),
        ("    check(config)  # imports a user's algorithm\n", "",
         "a run with an algorithm of a user is not reproduced"),
        (' and (key in new or not key.startswith("val/"))', "",
         "a run that was given more steps is not reproduced"),
        ('(key in new or not key.startswith("val/"))', 'not key.startswith("val/")',
         "another validation counts as reproduced"),
        ("(line.keys() | new.keys())", "line.keys()",
         "a metric that is measured at more steps counts as reproduced"),
        ("sys.exit(1 if difference else 0)", "sys.exit(0)", "scripts take any run for reproduced"),
    ],
    "look/diagnostics.py": [
        ("world.sum(scores)", "scores", "each process knows the scores of its own prompts alone"),
        ("list(left)[rng.integers(len(left))]", "rng.choice([t for t in left for _ in left[t]])",
         "long episodes outweigh short ones in the draw"),
        ("own.bincount(minlength=scores.shape[1]).double() / len(own",
         "torch.full((scores.shape[1],), 1 / scores.shape[1]).double(",
         "every prompt weighs the same in the mutual information"),
        ("  or value(", "  and value(",
         "a collapse needs little information and retrieval at chance"),
        ("min(REARM + 1, len(steps))", "2",
         "a warning is given again without a silence of twenty steps"),
        ("steps[-WINDOW:]))", "steps[-1:]))", "a single spike warns"),
        ("max(first[metric], NO_ENTROPY)", "first[metric]", "a rise from almost no entropy warns"),
        ('first["reward_std"] and gain <= 0', 'first["reward_std"]',
         "a group that agrees since it has learnt warns"),
        ('rise["entropy"] > MORE_ENTROPY and gain < RISEN', 'rise["entropy"] > MORE_ENTROPY',
         "entropy that rises with success warns"),
        ("rise[VARIED] > MORE_VARIED and gain < RISEN", "rise[VARIED] > MORE_VARIED",
         "reasoning that varies more as success rises warns"),
        ('if true and now["success"] < SOLVED', "if true", "a solved run warns"),
        ('if line.get("groups_kept")]', 'if line["step"]]',
         "steps without an update count for the early stop"),
        ('of_each or names', '{"val/success"}',
         "a solved environment hides one that collapses"),
        ("longest, device=device).expand(n, longest), positions",
         "longest + q, device=device).expand(n, -1)",
         "windows are counted in slots and not in positions"),
        (".clamp(max=max_positions(model) - 1)", "",
         "a reasoning behind a long prompt asks for positions that the model lacks"),
        ("temperature,\n                                      token_budget, world)",
         "temperature, world=world)",
         "the diagnostics have a token budget of their own"),
        ("(steps[:WINDOW], steps", "(steps, steps", "now is compared with the whole run"),
        ("if len(steps) < 2 * WINDOW:", "if len(steps) < WINDOW:",
         "now is compared with itself, too"),
        ("(steps[:WINDOW], steps", "(steps[-2 * WINDOW:-WINDOW], steps",
         "a warning compares with the steps just before: a slow fall is silent"),
        ("learner.ema, hash_seed(config.seed, step),", "learner.ema, hash_seed(config.seed),",
         "every diagnosis draws the same rows"),
        ("config.diagnose_samples, config.temperature,", "config.diagnose_samples, 1.0,",
         "diagnoses are at temperature 1"),
        ("            config.diagnose_samples,", "            64,", "diagnose_samples is ignored"),
        ("trajectories, learner.ema, hash", "trajectories, {}, hash",
         "the moving averages begin again at each diagnosis"),
        ('in history if "first', 'in history[::-1] if "first',
         "the regime is compared with the previous measurement"),
        ("log_p = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1)[:, first.to(\n"
         "            slots.device)]",
         "log_p = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1).cpu()[:, first]",
         "whole logits go to the host"),
        ("reply[:end_of_thought(frame, reply)]", "reply[:end_of_thought(frame, reply) + 1]",
         "reasoning contains the tokens that the closing tag touches"),
        ("), *original]", ")]", "longrope runs beyond its original length"),
    ],
    "run/runs.py": [
        ('kl_reward_coef", "ema', "ema", "resume forgets the adapted KL coefficient"),
        ('kl_reward_coef", "ema")', 'kl_reward_coef")', "resume forgets the moving averages"),
        ("checksum(path) != expected.get(file)",
         "checksum(path)[0] != expected.get(file, [0])[0]", "a flipped bit in a checkpoint passes"),
        ('model.load_state_dict(load(checkpoint.parent / name, "cpu"))', "pass",
         "resume takes the trained policy as reference"),
        ("config = dataclasses.replace(config, decay_steps=stored.steps)", "pass",
         "steps added to a run raise its learning rate again"),
        ('".old", ".best")]', '".old")]', "the best checkpoint is never taken"),
        ("problems or not only and", "problems and",
         "a checkpoint other than the last is taken without a word"),
        ('", "steps", "', '", "temperature", "steps", "', "resume may change the temperature"),
        ('max_context", "steps"', 'steps",', "resume may shrink the context"),
        ('", "steps"):', '",):', "resume may take steps back"),
        ("RUN_NAME.fullmatch(run) and ", "", "a page is written outside of runs/"),
        ("(config.env, config.algo, *config.layer)", "(config.env, *config.layer)",
         "an algorithm of a stored run may be code in runs/"),
        ("stat.S_ISLNK(found.st_mode)", "False", "a link in a run leads a figure elsewhere"),
        (r'rf"(^|,)\s*', 'rf"^', "the second environment of a stored mixture may be code in runs/"),
        ("dataclasses.replace(read_config(folder), run=run", "read_config(folder",
         "a renamed run is looked for under its old name"),
        ("folder.exists() and not resume", "False", "a run overwrites another"),
        ("    for path in paths:\n        flush(path)\n", "",
         "a manifest names files that a power cut takes"),
        ("    flush(new)\n", "", "a whole checkpoint loses its manifest in a power cut"),
        ("        flush(folder)\n", "", "a power cut takes a checkpoint's name back"),
        ("            flush(part)\n", "", "a power cut leaves an empty config.json"),
        ('            flush(new / "frozen.part")\n', "",
         "a power cut leaves an empty reference.pt"),
        ('".new", ".old", ".best")]\n    problems', '".old", ".new", ".best")]\n    problems',
         "after a kill between two renames the older checkpoint is taken"),
    ],
    "look/faults.py": [
        ("with contextlib.suppress(OSError):\n            self._stream.write(text)",
         "with contextlib.suppress():\n            self._stream.write(text)",
         "a console that is full ends the run"),
        ("with contextlib.suppress(OSError):\n            self._stream.flush()",
         "with contextlib.suppress():\n            self._stream.flush()",
         "a terminal that has gone ends the run"),
        (r're.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)', "text",
         "texts from elsewhere control the terminal"),
        ('printable(f"{self.sentence}', 'str(f"{self.sentence}',
         "a refusal that quotes a file controls the terminal"),
        ('printable(f"error', 'str(f"error', "wrong options control the terminal"),
        ("(AssertionError, TimeoutError)", "AssertionError",
         "a step over the time limit does not name the line that it was in"),
        (' == dis.opmap["RAISE_VARARGS"]', " >= 0", "a bug of ours looks like a refusal"),
        ("(own or not installed)", "own", "an exception at the import of a file has no line"),
        ("(theirs or [place", "([place", "an exception of the user's code shows a line of ours"),
        ("limit=-MOST", "limit=MOST", "a long traceback lacks the line that raised"),
    ],
    "run/bundled.py": [
        ("(steps - step) / steps", "1.0", "the learning rate of the warm-up never falls"),
        ('f" {groups.envs[row].describe()}"', 'parts[row]["observation"]',
         "a demonstration predicts the state before its answer"),
        ("default_rng([VERSION, step])", "default_rng([VERSION])",
         "every step of the warm-up has the same noise"),
        ("step % distinct, DEMO", "step, DEMO", "Lean's demonstrations are not repeated"),
        ("-logprobs.sum() / total", "-logprobs.sum() / int(part.response_mask.sum())",
         "each part of a demonstrated batch is averaged by itself"),
        ("part.tokens, part.response_mask)", "part.tokens, part.attention_mask)",
         "the warm-up imitates observations, too"),
        ("max_grad_norm=1.0", "max_grad_norm=1e9", "the warm-up does not clip"),
        (", weight_decay=0.0)", ")", "the warm-up decays the weights"),
        ("policy.model.load_state_dict(state, strict=False)", "pass",
         "bundled weights are said to be loaded and are not"),
        ("max_new_tokens=max_new_tokens, image_store", "image_store",
         "demonstrations announce another length of replies than the run"),
        ("policy.tokenizer, response_format,", "policy.tokenizer,",
         "demonstrations are in another format than the run"),
        ("UNTRAINED[name](envs, response_format)", "UNTRAINED[name](envs)",
         "the tags of the response format are many tokens"),
    ],
    "more/lora.py": [
        ("lora_alpha=2 * rank", "lora_alpha=rank", "alpha is r"),
        ("policy.base = twin(policy.model.requires_grad_(False))",
         "policy.base = policy.model.requires_grad_(False)", "the reference has adapters"),
        ("torch.manual_seed(seed)", "torch.seed()", "each process has its own adapters"),
        ("| state)", "| state, strict=False)", "adapters that are missing stay random"),
        ("state[weight] + layer", "state[weight] - layer", "adapters are merged with a wrong sign"),
        (".detach().cpu()", ".detach() / 2", "half of the adapters is merged"),
        ("policy.model.base_model)", "policy.model)", "a vision tower gets adapters, too"),
        ("named_parameters(remove_duplicate=False)", "named_parameters()",
         "weights that are tied to frozen ones are stored as trained"),
    ],
    "more/vision.py": [
        ("self.size - 1 - self.numbers(ids)[1]", "0 * self.numbers(ids)[1]",
         "no token of an image sees a later one of it, which Gemma 3's do"),
        ("found[which, features]", "found[which, features.flip(0)]", "features are out of order"),
        ("found[which, features]", "found[which.flip(0), features]", "images are exchanged"),
        ("found[which, features]", "found[which, features].detach()", "the tower is not trained"),
        ('modality="image").requires_grad_(False)', 'modality="image").requires_grad_(True)',
         "freeze_vision freezes nothing"),
        ("image.tobytes()", "image[:1].tobytes()", "images of equal first rows are one"),
        ('"token_type_ids" in inspect.signature(whole.forward).parameters', "False",
         "Gemma 3's images are causal in rollout, learning and proof alike"),
        ("digest[:6]", "digest[:2]", "an image's number has 16 bits, so some images are one"),
        ("repr(image.shape).encode() + ", "", "images of the same bytes in other shapes are one"),
        ("Image.fromarray(image)]", "Image.fromarray(image[:, ::-1])]",
         "the model sees mirrored images"),
        ("Image.fromarray(image).save", "Image.fromarray(image[::-1]).save",
         "stored images are upside down"),
        ("for image in seen if", "for image in seen[::-1] if",
         "the stored images of an episode are in reversed order"),
        ("self.size = None  # F", "self.size = self.__dict__.get('size')",
         "images of another size are refused although all earlier ones are forgotten"),
        ("image_store.add_images_of(trajectories)", "pass",
         "images of other processes are unknown"),
        ("if isinstance(forward, partial):", "if False:", "the critic's tower is not trained"),
    ],
    "more/loggers.py": [
        ("for metrics in history:", "for metrics in ():", "a resumed logger lacks earlier steps"),
        ("del writers[name]", "pass", "a broken logger warns at every step"),
        ('home.glob("offline-run-*")', "()", "a killed W&B run has its steps twice"),
        ('shutil.rmtree(folder / "tensorboard", ignore_errors=True)', "pass",
         "a killed TensorBoard run has its steps twice"),
        ("        writer.flush()\n", "", "TensorBoard shows a step minutes later"),
        ("isinstance(value, int | float)", "isinstance(value, float)", "counts are not shown"),
        ("        path.unlink()", "        pass", "a run with W&B cannot be resumed"),
    ],
    "run/distributed.py": [
        ("        dist.all_reduce(flat)", "        pass",
         "every process steps on the gradient of its own rows"),
        ("        dist.all_reduce(x)", "        pass",
         "values and old logprobs of other processes' rows are 0"),
        ("        fail(error)\n\n\ndef end", "        pass\n\n\ndef end",
         "a busy process does not notice that another has died"),
        ("    sys.stdout.flush()\n", "", "what was said before an error is lost in a file"),
        ("return partial(print, flush=True) if rank() == 0 else lambda line: None", "return print",
         "every process prints"),
        ('new_group(backend="gloo", timeout=PATIENCE)', 'new_group(backend="gloo")',
         "the watch gives up after gloo's half an hour"),
        ('else "gloo", timeout=PATIENCE)', 'else "gloo")',
         "a rollout of more than half an hour ends the run"),
        ('int(os.environ["LOCAL_RANK"])', "rank()", "the second machine has no such GPU"),
        ("    if rank() > 0:\n        dist.barrier()\n    yield\n"
         "    if rank() == 0 and world_size() > 1:\n        dist.barrier()", "    yield",
         "all processes write the same cache at once"),
    ],
    "environments/bandit.py": [
        ('f"{self.safe} {self.risky}" if', "self.render() if",
         "a mixed pair is in one split in one order and in another in the other"),
        (r"Two arms: (\S+)", r"and (\S+)\.", "the shallow player takes the second arm"),
        ('" or ".join(self.actions)', "self.solve()[0]", "the note tells which arm is better"),
    ],
    "environments/board.py": [
        ("> r) - (row <", "< r) - (row >", "above and below are exchanged"),
        ("cells.swapaxes(1, 2).reshape(", "cells.reshape(", "the pixels of an image are shuffled"),
        ('if "image" in VIEWS[self.options["view"]] else None', 'or None',
         "a view without an image has one"),
        ("* 8 // size", "% 8", "larger tiles are the small one, again and again"),
        ('["Down"] * (row - r)', '["Down"] * (row - r - 1)', "a straight way stops a row early"),
        ("cell[1] + steps * MOVES", "cell[1] - steps * MOVES", "Left is right and Right is left"),
    ],
    "environments/countdown.py": [
        ("target == claim", "target", "an equation with a wrong right side counts as solved"),
        ("left), op, evaluate(right", "right), op, evaluate(left", "8 - 3 is read as 3 - 8"),
        ("int(value)) if value in self.TARGETS",
         "value) if type(value) is int and value in self.TARGETS",
         "no target is reached through fractions"),
        ("if both := [value for value in needed if value in made]", "if both := made",
         "the note stops at the largest number"),
        ("yield join_terms(b, op, a)", "yield join_terms(a, op, b)",
         "the solver only subtracts later parts from earlier ones"),
        ('product("+-"', 'product("+"', "the shallow player only adds"),
    ],
    "environments/data.py": [
        ("if right is False", "if not right", "records without a reference solution are left out"),
        ("step * i for i", "i for i", "of a large file the wrong records are left out"),
        ("if len(failed) == count:", "if False:", "a file without a right solution is used"),
        ("(os.path.getmtime(path), os.path.getsize(path)", "os.path.getsize(path",
         "a file that is changed to the same length is not read again"),
        ("if i not in failed", "", "records whose reference solution fails are not left out"),
        ("pause *= 2", "pause += 0", "a line is printed for each record of a slow file"),
        ("        for path in paths), *paths)", "        for path in paths[:1]), *paths)",
         "a change of the second of two files is not noticed"),
    ],
    "environments/deepcoder.py": [
        ("        with sandbox.PARSING:", "        if True:",
         "two threads parse at the same time, which CPython 3.11 cannot"),
        ("max(0.0, passed / total - self.best)", "passed / total - self.best",
         "a worse try costs, and a better one after it is paid again"),
        ("all(passed[n] < tests // 2 for n in right)", "True",
         "a one-line program may pass all hidden tests"),
        ("max(1, tests // 4)", "tests", "a constant may pass all hidden tests"),
        ("rng.permutation(edges)[:3]", "rng.permutation(edges)[:0]", "edge cases are not tested"),
        ("order[::-1] if i not in hidden]", "order]", "an example may be a hidden test"),
        ('.split()).replace("{k}", str(k))', ".split())", "the task does not tell its parameter"),
        ("len(texts) != 1", "not texts", "the names in a pickled call are taken for tests"),
        (r"(?:```|\Z)", "```", "a program that was cut off is no program"),
        ("tests[1:] or tests", "tests", "the assertion that the task of MBPP shows is graded"),
        ("{*words}\n", "{'time'}\n", "no reference solution is found to fail"),
        ('"unsupported" in words}', "False}", "the metric never counts"),
        ('"time" not in words', "True", "a verdict by bad luck is kept"),
        ('f"def body():\\n{candidate}"', "problem.preamble", "a comment is a function's body"),
        ("len(problem.hidden), code,", "code,",
         "the verdict on eight of a record's tests is kept for all of them"),
        ("code, examples, seconds,", "code, seconds,",
         "a program that was judged in a last turn gets no feedback in an earlier one"),
        ('f"{task.solution} {public} {hidden}"', "task.solution",
         "a program gets the verdict on other hidden tests of its task"),
        ("problem.check, seconds)", "problem.check)", "a test program ignores the option seconds"),
        ("effective=gain > 0", "effective=True", "a program that gains nothing is effective"),
    ],
    "environments/frozenlake.py": [
        ("slip / 2 else 1", "slip else 1", "the player slips to one side only"),
        ("self._move(self.player, a)) != self.player", "self._move(self.player, a)) is not None",
         "a step into the border is a safe move"),
        ('straight(cells["Player"][0]', 'straight(cells["Start"][0]',
         "the shallow player walks from the start in every turn"),
    ],
    "environments/gymnasium_text.py": [
        ("self._text if self.by_text else str(self._seed)", "self._text",
         "a game that hides a word has one split"),
        ("max_episode_steps=-1", "max_episode_steps=None", "TimeLimit ends wider budgets"),
        ("terminated and reward > 0", "reward > 0", "a reward on the way is a success"),
    ],
    "environments/layers.py": [
        ("self.dynamics.spawn(1)", "[self.dynamics]", "a layer's luck shifts the environment's"),
        ("filter(None, [self.env.system_prompt, self.rule])", "[self.env.system_prompt]",
         "the model is not told what a layer does"),
        ("if self._match(name) == name]", "]", "search[query] takes another action's place"),
        (" for name in self.names() if name != action]", " for name in self.names()]",
         "the asked action may replace itself, so that slips are rarer"),
        ("        self.hidden = False\n", "        pass\n", "a first observation may be hidden"),
        ('not in ("", NOTHING_NEW)', '!= ""', "what was hidden is remembered"),
        ("return None if self.hidden else self.env.image()", "return self.env.image()",
         "a hidden state shows its image"),
    ],
    "environments/lean.py": [
        ("if verdict.proved and tactics else verdict", "if False else verdict",
         "a goal is proved by the axioms of another theorem"),
        ('if "sorryAx" not in', 'if False and "sorryAx" not in',
         "the axioms that are read may be of another theorem than the goal"),
        ('re.findall(r"\\w+", tactic', "tactic.split(",
         "a command that touches a sign is let through to Lean"),
        (" and m.line in by", "", "a half-finished nested proof is accepted, as in RAGEN"),
        ("(ArithmeticError, AttributeError", "(AttributeError",
         "a server's line number of 1e999 is no RuntimeError"),
        ("not re.fullmatch(SOUND, axioms)", "False", "a proof may use any axiom"),
        ("status != signal.SIGKILL", "True",
         "a proof is wrong because something else killed Lean"),
        ("status.isdecimal() else signal.SIGKILL", "status.isdecimal() else 0",
         "a proof is wrong because something else killed the process that waits for Lean"),
        ('limit + (name == "CPU")', "limit",
         "the limit on CPU time looks like a kill from outside"),
        ("prelude, options, 1))",
         'vars(check).get("last", prelude), options, 1)); '
         'call("lean_mark_persistent", state); check.last = field(state)',
         "a script sees what the one before it declares"),
        ("REPL command timed", "timed",
         "a proof is wrong because the server could not load Mathlib in time"),
        ("OTHER and self._post(self.OTHER)", "OTHER",
         "a proof is wrong because the server is broken"),
        (" or words & {*AUTOMATION} - {*known}", "",
         "`exact (by simp)` proves where simp is refused"),
        ("if fits and plan not in tried", "if fits",
         "the shallow player repeats a tactic that did not help"),
        ("seconds <= 15):", "seconds <= 300):",
         "a proof that takes too long may be an error of the environment"),
        ('Verdict(False, error="Lean ran out of time or memory.")',
         'self._cache.setdefault(script, Verdict(False, error="Lean ran out of time or memory."))',
         "a verdict that a busy machine caused is kept"),
        ("max(1, round(3 * self.seconds))", "30", "a Kimina server is not told the limit"),
        ("= lean_checker(server, seconds)", "= lean_checker(server, 10.0)",
         "the option seconds is ignored"),
        ("raise type(problem)(", "raise RuntimeError(",
         "a Kimina server that is gone is not waited for"),
        ("raise type(problem)(", 'raise sys.modules["minragen.envs"].ServerGone(',
         "a Kimina server that refuses is waited for"),
        ('cost, before = self.options["step_cost"]', 'cost, before = self.defaults["step_cost"]',
         "the option step_cost is ignored"),
    ],
    "environments/metamathqa.py": [
        ("if self.problem.largest <= largest:", "if self.problem.gold <= largest:",
         "only the result has to be below `largest`"),
        ("max(gold, *numbers))", "max(numbers))", "a result may be above `largest`"),
        ("for _ in range(DRAWS):", "while True:",
         "a template whose numbers are never small enough is drawn for ever"),
        ("or not LEFT_SIDE.fullmatch(left.strip()) or", "or", "18 = 20 is read as 20"),
        ("substitute(text, BARE_NUMBER)",
         'substitute(text, [row for row in BARE_NUMBER if "([^*]+)" not in row[0]])',
         "a result in bold is no result"),
        ("again * (self.budget.max_actions > 1)", "again",
         "a task of one attempt promises something for the second"),
        ("order = [guess, *(", "order = [*(", "the shallow player ignores the words"),
        ('"data", "distractors", "largest"', '"data"',
         "options that a user's data silences are accepted"),
        ("or question).lower()", "or question)",
         "one question in other letters may belong to another split"),
    ],
    "environments/openenv.py": [
        ("if self.ours or answer.strip():", "if True:", "a reply without an answer is played"),
        ("reward=envs.FORMAT_PENALTY", "reward=0.0", "an answer that is refused costs nothing"),
        ("if self._client._ws is not self._session:", "if False:", "another session pays"),
        ("result.metadata if self.ours else {}", "result.metadata or {}",
         "what a server says of itself are metrics"),
        ("done and not truncated, truncated", "done, truncated", "a truncated end is terminal"),
        ('f"{self.split} {seed}"', 'f"{seed}"', "splits share their seeds"),
        ('b"origin" in headers or ', "", "web pages may play"),
        ('scope.get("method", "GET") != "GET"', "False", "a POST is read whatever its length"),
        ("ServerGone if gone else RuntimeError", "RuntimeError",
         "a server that is gone is not waited for"),
    ],
    "environments/reasoning_gym.py": [
        ("if self.evaluates and not is_harmless", "if False and not is_harmless",
         "programs in answers run"),
        ("float(score >= 1)) - self.worth", "float(score > 0)) - self.worth",
         "any score is paid in full"),
        (r"(?!\s*([\w.]|", r"(?!\s*([\d.]|", "hexadecimal powers are computed"),
        ("np.random.set_state(states[1])", "pass", "a data set changes the global generator"),
    ],
    "environments/sandbox.py": [
        ("sorted(want, key=place)", "list(want)", "an expected set is compared in its order"),
        ("== counted[-1]", "> 0", "a row whose last test asserts nothing is judged"),
        ("truths.pop(0, None)", "pass",
         "an assertion that never calls the submission counts as passed"),
        ('(failure == "time")', "bool(failure)",
         "a test program that raises counts as one that ran out of time"),
        (' and "time" not in [r.word for r in results]', "",
         "an endless loop costs a limit for every test"),
        ("and len(got) == len(want) and all(map", "and all(map",
         "a list passes that is a part of the expected"),
        ("given)]] or [", "given)]] + [", "calls share the time limit of their process"),
        ("oom_kills() != kills", "True",
         "a program escapes its wrong verdict by having itself killed"),
        ("names[0] in sys.stdlib_module_names", "True",
         "a module that does not exist counts as unsupported"),
        ('{"seed": 0}}', '"system"}', "a verdict of Monty does not repeat"),
        ("sandbox = None\n            raise", "raise", "a sandbox that has failed is lent again"),
        ('split("\\n", len(want)', "splitlines(", "a million empty lines occupy the judge"),
        ("CLOCK * cpu)", "CLOCK * 2)", "ten seconds of CPU time have six of the clock"),
    ],
    "environments/sandbox_worker.py": [
        ('len(parts) > 512 and kind != "tuple"', "False", "keys that collide occupy the judge"),
        ('return "killed"', 'return "died"', "a program killed for its CPU time has died"),
        ("os.setsid()", "pass", "kill(0) reaches the worker"),
        ('f"{root}{STDLIB}/site-packages", f"{root}{STDLIB}/dist-packages"', "",
         "a submission reads the packages installed beside the standard library"),
    ],
    "environments/limits.py": [
        ("ended.set_exception(error)", "ended.set_result(None)",
         "a request that fails in time returns None"),
    ],
    "look/serve.py": [
        ("self.cycle.more_body or self.cycle.response_complete", "True",
         "an answer may take no longer than a request"),
        ("self.cycle.more_body or", "", "a body that drips keeps a connection for ever"),
        (" or self.cycle.response_complete", "", "half of a second request is never sent away"),
        ("        self.limit.cancel()\n", "", "the second request has the first one's time"),
        ("len(self.connections) > MAX_CONNECTIONS", "False",
         "connections take all file descriptors"),
    ],
    "environments/search.py": [
        ("in_time(deadline - time.monotonic(), read_bounded, request, deadline)",
         "read_bounded(request, deadline)", "a server that drips its headers is read for ever"),
        ("        self.limit.cancel()\n        query", "        query",
         "an answer may take no longer than its request"),
        ("wait = max(pause, int(asked))", "wait = min(pause, int(asked))",
         "a busy server is asked again before the time that it names"),
        ("log(1 + (self", "log((self", "a word that most texts contain lowers their score"),
        ("redirects.redirect_request = lambda *_: None", "pass",
         "a server may send a request, with its key, to another address"),
        ("code >= 500 or", "code > 500 or",
         "a retriever in trouble (status 500) is not asked again"),
        ("(ArithmeticError, MemoryError, ", "(", "a chunk of 2**64 bytes is no RuntimeError"),
        ("ServerGone if retry else RuntimeError", "RuntimeError",
         "a retriever that is gone is not waited for"),
        ("ServerGone if retry else RuntimeError", "ServerGone",
         "a retriever that refuses is waited for"),
    ],
    "environments/searchqa.py": [
        ("question.about)", "question.text)",
         "held-out questions are about people of the training split"),
        ('dealt.get(words["value"], -1)', "-1",
         "somebody may live in the town of birth: guessing a town answers the question"),
        ("in rng.permutation([*facts]).tolist()", "in facts",
         "the facts of every article stand in the same order: a fixed place has the answer"),
        ('proof, title, kind = f"{fact.sentence}, so "', 'proof, title, kind = ""',
         "the note does not quote the passage that it concludes from"),
        ('em if self.options["reward"] == "em" else paid if paid >= 0.3 else 0.0', "paid",
         "any common word is rewarded"),
        ("return f1, min(f1, precision)", "return f1, f1", "a list of names pays"),
        ('2 * (not o["data"])', "2", "hops is accepted with data, whose questions have none"),
        ('" ".join(_bare(text))', "text",
         "one question in other letters may belong to another split"),
        ('o["url"], o["timeout"]', 'o["url"]', "the option timeout is ignored"),
    ],
    "environments/sokoban.py": [
        ("len(self.boxes & self.targets) - home", "max(0, len(self.boxes & self.targets) - home)",
         "pushing a box off its target costs nothing"),
        ("way[1:first - 1][:2]", "way[1:first][:2]",
         "the note names the cell to push from a second time"),
        ("if moved(player, step) != box}", "if step}",
         "the shallow player pushes the box that it wants to walk around"),
        ('away == self.options["boxes"] or (away and attempt >= 20)', "away",
         "boxes begin on targets although there is room"),
        ('n * self.options["pulls"] + 1', "n * 4 + 1", "the option pulls is ignored"),
        ('>= self.options["walls"]', ">= 0.2", "the option walls is ignored"),
        ("in self.targets] or pulls", "in self.targets]", "no box is pulled twice"),
        ("int(rng.random() * len(starts))", "0", "the player begins at the top"),
        ('f"box {places} out of reach" if lost else "solved"', '"solved"',
         "the note says that a lost room is solved"),
    ],
    "environments/sudoku.py": [
        (" and cell not in self.paid", "", "a cell pays every time that it is changed back"),
        ("self.board == self.solution", "0 not in self.board",
         "a full grid with a mistake counts as solved"),
        ("!= self.hardest", "< self.hardest", "medium puzzles may need search"),
        ("if any(alone)", "if all(alone)", "hard puzzles need hidden singles only"),
        ("- {self.solution[cell]}", "- {*range(self.solution[cell] + 1)}",
         "hard puzzles have several solutions"),
        ("if self.hardest and self.blanks < blanks", "if self.blanks > blanks",
         "a small budget makes a puzzle of another difficulty"),
        ("(untried or options)[:1]", "options[:1]", "the shallow player repeats a refused move"),
        ('against}" * feedback', 'against}"', "every view tells why a number is refused"),
        ("turn == self._turns - 1", "turn < self._turns", "refusals of all turns are shown again"),
        ("_plan()[:min(self.budget.max_actions_per_turn, self.actions_left)]", "_plan()",
         "the note tells the moves of all turns"),
        ('{"correct": first}', '{"correct": right}', "a cell that is changed back counts twice"),
    ],
    "environments/theorems.py": [
        ("        masked(text))\n", "        text)\n",
         "a comment that names a theorem states the goal"),
        (r' or re.search(r"\baxiom\b", code)', "", "a record may state its goal as an axiom"),
        (" + text\n", "\n", "a variable that is only declared keeps its name in the shape"),
        ('choice.replace("_", found[1] or "_")', "choice",
         "the argument of a pattern is lost"),
        ("return distinct([draw_theorem", "return tuple([draw_theorem",
         "a theorem is drawn twice under other names"),
        ("given(f\"{atoms.pop()} → {goal}\")", "given(f\"{premise} → {goal}\")",
         "a drawn theorem has two proofs, and no fact leads nowhere"),
        ("else rng.permutation([provable, False])", "else [provable] * 2",
         "both sides of a disjunction can be proved"),
        ("rng.integers(1, 3)", "0", "no fact of a theorem leads astray"),
        ("rng.integers(1, 4)", "0", "every fact of a goal is needed"),
    ],
    "environments/webshop.py": [
        (' and self.page == "search"', "", "a search works on every page"),
        ("p, chosen={}", "p", "options chosen for one item are still chosen on the next"),
        ("(self._goal_key())", "(self.instance())",
         "the same goal with another price cap may belong to another split"),
        ("most < fewest", "False", "a budget without a purchase is accepted"),
        ("@cached_until_changed", "@lru_cache(maxsize=8)",
         "a changed file of products is not read again"),
        (" if getattr(self.item, page)", "", "an item links to pages without text"),
        ("[a][1] if rng.random() < PARAPHRASED else", "[a][1] if True else",
         "goals never use the words of the pages"),
        ("[int(rng.random() < PARAPHRASED)]", "[0]", "a goal never paraphrases the kind"),
        ("said[a][0] for a", "a for a", "plain goals use the words of the titles"),
        ('"[ {text} ]" if self.plain', '"[ {text} ]" if True',
         "natural brackets have spaces inside"),
        ("brands[kinds.index(kind)::len(kinds)]", "brands",
         "a product of another kind and the same brand counts as the kind that was wanted"),
        ("p.features[:1]) for p", "p.features) for p",
         "a search finds what only an item's pages tell"),
        ("if not named or not signs", "if not signs",
         "the note says that a title without a wanted attribute looks right"),
        ("product.price <= self.goal.cap else", "True else",
         "the note says that what is too dear looks right"),
        (" or not self._perfect(self.item)", "",
         "the note says that an item without a wanted attribute looks right"),
    ],
    "fast/graphs.py": [
        ("counts[n:] = tokens, counts, 0", "counts[n:] = tokens, counts, 1",
         "a decode step lengthens the slots of rows that do not sample"),
        ("        slots.bounds[:n] += 1\n", "",
         "after a graph the bounds of lengths are too small"),
        ('hasattr(model, "image_store") or ', "",
         "a step that looks for images is captured, which fails on a GPU"),
        ('"dynamic", "longrope"', '"longrope",', "rotary frequencies of dynamic rope are captured"),
    ],
    "fast/llama.py": [
        ("torch.cat([-other, one]", "torch.cat([other, -one]", "positions rotate backwards"),
        ("_norm(norm, states) if norm else states", "states",
         "Qwen3's norms of heads are left out"),
        ("angles = x[wanted], normed[wanted], [angle[wanted]",
         "angles = x[wanted], normed[wanted], [angle[:len(wanted)]",
         "the last layer rotates queries by the positions of others"),
        ("layer.gradient_checkpointing and torch.is_grad_enabled()", "False",
         "--activation-checkpointing keeps everything in Llama's family"),
        ("norm.variance_epsilon", "1e-6", "the epsilon of the norms is fixed"),
        ('"Qwen2Model", "Qwen3Model"', '"Qwen2Model"', "Qwen3 is computed in whole rows"),
        ("x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1)",
         "x.repeat(1, queries.shape[1] // x.shape[1], 1, 1)",
         "on an accelerator query heads get the key heads of others"),
    ],
    "run/memory.py": [
        ("sum(8 * p.numel()", "sum(4 * p.numel()", "one of Adam's two moments is forgotten"),
        ("if p.itemsize < 4", "if p.itemsize < 2", "float32 masters are not counted"),
        ("max(rows, config.val_size)", "rows", "the rows of validation are not counted"),
        ("max(rows, config.val_size) // processes", "max(rows, config.val_size) // 1",
         "each of several processes counts all rows"),
        ("kept += n.images * n.image_layers * n.image_kept", "pass",
         "a vision tower keeps nothing for its gradients"),
        ("trained * number * (8", "number * (8", "a frozen tower keeps its results"),
        ("if config.activation_checkpointing:", "if False:",
         "activation checkpointing changes no forecast"),
        ("- 1) + n.in_loss) * layer", "- 1) + n.in_loss) * n.width * n.hidden",
         "of a layer only its input is counted"),
        ("+ max(0, again - logits)", "", "the layer that is computed again is not counted"),
        ("sum(numbers) + max(numbers)", "0", "gradients are not counted"),
        ("8 * min(packed", "1 * min(packed", "the logits of the diagnostics are not counted"),
        ("n.context + config.max_new_tokens", "n.context",
         "the slots of a turn of unknown length are not counted"),
        ('1 if config.loss_mask == "all" else replies', "replies",
         "observations in the loss have no logits"),
        ('"images": n.rows * n.turns', '"images": n.rows',
         "only the images of one turn are counted"),
        ("        learner.critic, learner.reference and learner.reference.model])]",
         "        learner.critic])]",
         "the reference is not counted"),
        ("layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)", "pass",
         "--activation-checkpointing keeps everything outside Llama's family"),
        ("        optimizer.clear()\n", "        pass\n",
         "gradients of the pass that ran out of memory count twice"),
    ],
    "look/report.py": [
        ("best = max(run.validated", "best = min(run.validated",
         "the best validation is the worst"),
        ("validated[1:][-1:]", "validated[1:][:1]", "the second validation is told as the last"),
        ("regimes[-1]", "regimes[0]", "the regime is that of the first measurement"),
        ("LOW_ENTROPY * both[0][0]", "LOW_ENTROPY * both[0][-1]",
         "the map's limit of entropy moves with the run"),
        ("LOW_MI * both[1][0]", "LOW_MI * both[1][-1]",
         "the map's limit of information moves with the run"),
        ('"x": x.tolist(), "y": y.tolist()', '"x": x[::-1].tolist(), "y": y[::-1].tolist()',
         "the map does not tell where a run begins"),
        ('not any(k.startswith("test/") for k in x)', "True",
         "the test is a step of the curves"),
        ('[self.tested] if self.tested.get("test/success") is not None else []',
         "[self.tested] * bool(self.tested)", "a run whose test failed everywhere has no page"),
        ("shape.keys() - OPTIONAL <= line.keys()", "line", "lines without a step are drawn"),
        (") <= room", ") > 0", "a page has no bound"),
        ("autoescape=True", "autoescape=False", "what a model wrote is HTML"),
        ("return not low <= 0 <= high", "return low > 0", "a fall counts as no change"),
        ("if low <= 0 <= high:", "if low <= -1:", "noise is told as a rise or a fall"),
        ("'rose' if low > 0 else 'fell'", "'rose'", "a fall is told as a rise"),
        ("if step > max(changed, default=-1)", "", "the whole run is told as a plateau"),
        ("min(r[3] for r in rates)", "sum(r[3] for r in rates)",
         "seeds that play the same instances count as independent"),
        ("0.75 * run.history[-1]", "0 * run.history[-1]",
         "failures at the beginning are told as those of the end"),
        ("*difference(first[:3], now[:3])", "*difference(now[:3], first[:3])",
         "the interval of a difference has the wrong sign"),
        ("if same == {", "if same >= {", "players of other options are shown beside mixed runs"),
        ("max(shallow)", "min(shallow)", "the worse shallow player is shown as the best"),
        ("values[k - w:k + w + 1]", "values[k:k + w + 1]", "smoothed curves run ahead"),
        ("min(high, usual_high + reach)", "high", "an outlier squeezes a curve"),
        ('(told["content"], next(images, None)) != (observation, shown)',
         "next(images, None) != shown",
         "boards of another instance stand beside a conversation"),
        ('(told["content"], next(images, None)) != (observation, shown)',
         'told["content"] != observation',
         "boards of another instance stand in for the images that were stored"),
    ],
    "run/start.py": [
        ("any(len(text) > 1 for text", "any(len(text) > 9 for text",
         "members that begin differently are not told"),
        ('of["train"][:LEAST_ALIKE] == of["val"]', 'of["train"][:LEAST_ALIKE] == of["test"]',
         "training is compared with the test"),
        ("min(map(len, of.values())) >= LEAST_ALIKE", "True",
         "a few instances that begin alike by chance are told"),
        (".casefold().split()", ".split()", "a tokenizer that writes small letters is refused"),
        ("teacher_of(config, policy) if config.teacher else ", "", "a teacher is never asked"),
        ("teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab()", "False",
         "a teacher scores the ids of other tokens"),
        ("config))).error:", "config))) and False:",
         "a run begins although its environment cannot"),
        ("policy, policy.model.generation_config.eos_token_id", "policy, None",
         "training does not know the model's own ends of a turn"),
        ("config.threads or (", "(", "--threads is ignored"),
        ("policy.tokenizer, config.response_format", 'policy.tokenizer, "free_think"',
         "a run in another format is measured in the usual one"),
        ("slice(world.rank, None, world.size)", "slice(None)", "every process plays all groups"),
        ("config.group_size < world.size", "config.group_size < 1",
         "a process may have no episode"),
        ("prove(policy, config.max_context)", "prove(policy, 64)",
         "the model is proved for 64 tokens only"),
        ("config.response_format,\n        config.max_new_tokens, config.warmup",
         '"free_think",\n        config.max_new_tokens, config.warmup',
         "the warm-up writes another format than training"),
        ("config.max_new_tokens, config.warmup", "64, config.warmup",
         "the warm-up is told another limit than training"),
        ("            memory.checkpoint_activations(learner.critic)", "            pass",
         "the critic keeps everything under --activation-checkpointing"),
    ],
    "more/windows.py": [
        ("window + 1)", "window)", "a window shows a turn too many"),
        ("(rules.max_new_tokens if window > 1 else 1)", "1",
         "a window leaves no room for a whole reply"),
        ("sequence = t.sequences[k]", "sequence = t.sequences[-1]",
         "a window shows the last reply in place of earlier ones"),
        ("if window > 1 else 1)", "if window > 1 else 0)", "a prompt may fill the context"),
        ("between(reply[-1], following)", "between(None, following)",
         "a window ends a turn twice"),
        (" or 'nothing valid'", "", "a window tells nothing of an invalid answer"),
        ("t.turns[k].reply.answer", "t.turns[-1].reply.answer",
         "a window tells the last answer in place of earlier ones"),
    ],
    "more/described.py": [
        ('paid * bool(info["valid"])', "paid", "descriptions are paid beside invalid actions"),
    ],
    "run/proof.py": [
        ("not gap <= tolerance:  # nan too", "False:",
         "a model whose cached turns differ from a full pass is accepted"),
        ("window + PROOF_TOKENS", "PROOF_TOKENS", "the proof stays within the window"),
        ("max(sum(gaps) / len(gaps), float(learner))", "sum(gaps) / len(gaps)",
         "the learner's pass is not proved"),
        ("tokens[1, :length // 2] = tokens[0, :length // 2]", "pass",
         "no rows of the proof share a beginning"),
        ("max_context > most", "False", "conversations run beyond the model's positions"),
        ("gap.abs().mean(dim=-1)", "gap.mean(dim=-1)",
         "errors of both signs cancel in the proof of cached turns"),
        ("(ours[mask] - theirs).abs()", "(ours[mask] - theirs)",
         "the proof of the learner accepts logprobs that are too low"),
        ("model.dtype: ROUNDED_TOLERANCE, torch", "torch", "the policy's own dtype is not proved"),
        ("torch.float32: TOLERANCE}", "torch.float32: ROUNDED_TOLERANCE}",
         "float32 is proved to 0.3 nats only"),
    ],
    "fast/prefix_tree.py": [
        ("sorted(range(len(rows)), key=rows.__getitem__)", "list(range(len(rows)))",
         "only rows that are neighbours by chance share their beginning"),
        ("[path[p - 1] for path", "[path[max(0, p - 2)] for path",
         "a logprob is read a token too early"),
        ("nodes, own = 0, len(rows[row])", "nodes = 0",
         "the first row of a micro-batch counts only what it does not share"),
        ("        if min(int((end - own / 2) / ends[-1] * size), size - 1) != rank:",
         "        if min(int(end / ends[-1] * size), size - 1) != 0:",
         "all processes compute the same rows"),
        ("tree.tokens, tree.positions, tree.attend", "tree.tokens, tree.positions * 0, tree.attend",
         "the learner forgets where tokens stand"),
        ("self._tensor(order).argsort()", "self._tensor(order)",
         "results of attention reach other nodes than those that asked"),
        ("1 + max(positions[-1] for", "max(positions[-1] for",
         "the last query does not see itself"),
        ("size), size - 1) != rank", "size), size - 1) < rank",
         "the shares of several processes overlap"),
    ],
    "run/groups.py": [
        ('if paid and config.reward == "success"', 'if config.reward == "success"',
         "validation pays for success alone, too"),
        ("float(info.get(\"success\", 0) > 0), terminated", "1.0, terminated",
         "every turn is paid as a success"),
        ("share, config.layer)", "share)", "a run plays without its layers"),
        ("calls = _Calls(self)", "calls = self._sent", "threads take each other's results"),
        ("contextlib.suppress(RuntimeError)", "contextlib.suppress()",
         "a thread that cannot start ends the run"),
        (">= MOST_LATE", "> 2**30", "steps that hang take any number of threads"),
        ("self.groups._broken.add(call.row)", "pass",
         "a step that comes back late changes the next episode"),
        ("return max(env.budget", "return min(env.budget",
         "the shortest episode of a mixture bounds its window"),
        ("if paid else (0.0, 0.0)", "if True else (0.0, 0.0)", "validation has the state reward"),
        ("math.ceil(len",
         "max(1.0, len",
         "replies that each keep to their limit exceed that of a step where a core has two of "
         "them"),
        ("config.window > most_turns(groups)", "False",
         "a window longer than the episode is accepted"),
    ],
    "fast/policies.py": [
        ("    if attention:\n",
         "    if attention and not llama.supports(policy.model.base_model):\n",
         "--attention is ignored"),
        ("        model.set_attn_implementation(attention)\n", "        pass\n",
         "--attention is forgotten"),
        ("config._attn_implementation, usual",
         "config._attn_implementation, config._attn_implementation",
         "the sampler gets the learner's attention"),
        ("graphs.append if ours else append", "graphs.append if ours else cache.append",
         "the sampler of models unlike Llama gets the learner's attention"),
    ],
    "run/load.py": [
        ('if spelt.strip().lower() != "a"', "if False",
         "a tokenizer that reads nothing is trained on"),
        ('unexpected", "mismatched', "mismatched",
         "weights that the model does not know are accepted"),
        ('missing", "unexpected', "unexpected", "weights that the files lack stay random"),
        ("if beyond:", "if False:", "the tokenizer writes tokens that the model lacks"),
        ("token not in str(tokenizer.chat_template)", "True",
         "the template may write special tokens beyond the vocabulary"),
        (' or not hasattr(text, "max_position_embeddings")', "",
         "models without position_ids are loaded"),
        ('{"trust_remote_code": False}', "{}", "the Python of a model's folder may be run"),
        ('"auto" if stored_dtype else ', "",
         "a float32 checkpoint is loaded as bfloat16 on a GPU"),
        ("AutoProcessor.from_pretrained(source, **NO_CODE)",
         "AutoProcessor.from_pretrained(source, trust_remote_code=True)",
         "Python that a folder's processor_config.json names is run"),
    ],
    "run/log.py": [
        ('metrics.get("step") == 0 and metrics', "metrics",
         "the first validation that is warned of is not the first"),
        ("            self.saved = self.learner.step\n", "", "the last line denies a checkpoint"),
        ("                runs.flush(self.folder / name)\n", "",
         "a checkpoint is ahead of the log"),
        ("if self.pending:", "if False:", "a step that a server leaves in its validation is lost"),
        ("step and not final", "step", "the final test stays in the log when a run goes on"),
        (" + failed[:SAMPLE]", "", "failures are not written"),
        ('if when == ENDED or f"({fault.place})" not in known', "if True",
         "errors.txt grows with every failed episode"),
        ("if self.unwritten[name]:\n", "if False:\n",
         "a checkpoint is ahead of a log that a full disk refused"),
        ("os.truncate(path, size)", "pass", "half a line stays after a full disk"),
        ("self.unwritten[name] += ", "self.unwritten[name] = ",
         "of the lines that a full disk refused the last step's alone are written later"),
        ("played[SAMPLE // 2:][-SAMPLE // 2:]", "played[-SAMPLE // 2:]",
         "episodes of small groups are written twice"),
        ("key=lambda t: -t.episode_return)", "key=lambda t: t.member)",
         "members are written whatever they earned"),
        ("groups[step % len(groups)]", "groups[0]", "the same group is written at every step"),
        (' and abs(v) > 1e-3', "", "a gap of 1e-8 is logged as 0"),
        ('entry.get("split") == "test" or ', "", "episodes of an earlier final test stay"),
        ('self.history = [json.loads(line) for line in kept["metrics.jsonl"]]', "pass",
         "a resumed run forgets its best validation"),
        ("requests[-1] > requests[0] + 1", "len(requests) > 1",
         "torchrun, which repeats a Ctrl-C, ends a run without its checkpoint"),
        ("or last or best or asked):", "or last or best):",
         "a run that is asked to stop does not save its step"),
        ("keep_advantages(played,", "keep_advantages(trajectories,",
         "after a failed episode the stored advantages are those of others"),
        ("diagnostics.warnings_of(self.history)", "()", "warnings are never printed"),
        ("any(self.learner.world.gather(bool(self.requests)))", "bool(self.requests)",
         "one of two processes misses a request to stop"),
        ("self.writes, self.history = learner.world.rank == 0, []",
         "self.writes, self.history = True, []",
         "every process writes"),
        ("trajectories[::max(1, len(trajectories) // SAMPLE)]", "trajectories[:SAMPLE]",
         "of a mixture the first environment alone is written"),
    ],
    "look/play.py": [
        ("groups, False, first)", "groups, False, 0)", "the same instances are shown for ever"),
    ],
    "look/evaluate.py": [
        ('if not any(t.metrics.get("valid") for t in first)',
         'if not all(t.metrics.get("valid") for t in first)',
         "a model is warned of whose replies are not all valid"),
        ("len(trajectories), len(trajectories))", "len(trajectories), 2 * len(trajectories))",
         "the interval is of twice as many episodes"),
        ("(*again[row], *(ts[row] for ts in played.values()))", "again[row]",
         "an episode whose environment failed counts as one lost"),
        ("for row in mine], samples))", "for row in range(len(mine))], samples))",
         "pass@k is of other instances after a failure or in a mixture"),
        ("split, size, samples), False", '"val", size, samples), False',
         "pass@k is of the validation split"),
        ("describe([first[row] for row in mine])", "describe(first)",
         "F1 is of all environments and of failed instances"),
        ("first, again = next(iter(played.values()))", "first, again = [*played.values()][-1]",
         "F1 and chats are of the greedy episodes"),
        ("2 * config.max_context", "config.max_context",
         "conversations on larger boards are cut off"),
        ('"train", DEMONSTRATIONS', "split, DEMONSTRATIONS",
         "the nearest demonstration is one of the evaluated instances"),
    ],
    "look/players.py": [
        ("enumerate(groups.reset(0))", "enumerate(groups.reset(1))",
         "baselines play other instances"),
        ("in t.messages()), t.observation]",
         "in t.messages()[:-1]), t.observation, *(turn.text for turn in t.turns[-1:])]",
         "scripted players see answers after their observations"),
        ("scores / norms", "scores", "the nearest demonstration is the longest one"),
        ("+= math.log(len(scores) / len(where))", "+= 1",
         "words of every prompt count as much as rare ones"),
    ],
    "noise.py": [
        (", torch.tensor(members)", "", "members of a group draw equal noise"),
        ("(0 if appends else len(t.turns) * rules.max_context)", "0",
         "turns with equal prompts draw equal noise"),
    ],
    "metrics.py": [
        ("[t for t in chosen if not t.error]", "list(chosen)",
         "episodes whose environment failed are in the metrics"),
        ('f"{metric_name(name)}/")', 'f"{name}/")',
         "metrics of a server's environment take the place of the test's"),
        ('name.rpartition("/")[2] in HELD_OUT', "name in HELD_OUT",
         "validation of a mixture has the mean alone"),
        ("[t.metrics.get(name, 0.0) for", "[t.metrics[name] for",
         "an episode that lacks a metric of its environment stops the run"),
    ],
    "options.py": [
        ("float(value) if want is float and type(value) is int else value", "value",
         "a whole number is refused where a fraction may stand"),
        ("items() if name not in NOT_OF_ALGO", "items()",
         "an algorithm of a user may choose the environment"),
    ],
    "formats.py": [
        ("if max_new_tokens else []", "if False else []", "the prompt tells no limit"),
    ],
    "template.py": [
        ("special or re", "special and re", "only special added tokens are control tokens"),
        ("while self", "if self", "a control token inside another one stays"),
        ("repr(DATE.strftime(found[2]))", "found[0]", "today's date stands in the prompt"),
        ("(False, False), (True, True), (False, True)", "(True, True)",
         "a template without a system role is refused"),
        ("if lost or tokenizer.decode(pieces) != tokenizer.decode(at_once)", "if lost",
         "a tokenizer that writes a blank before every turn is accepted"),
        ("{*ids, *tags}", "{*ids}",
         "turns that are marked by plain text can be opened by an observation"),
        ("shown.startswith(asked) or asked.startswith(shown)", "True",
         "a finished reply may open otherwise than the generation prompt"),
        ('opened = asked if "think>" in more else asked + more', "opened = asked",
         "the blank before a finished reply is left out of the prompt"),
        ("enable_thinking=thinks)", "enable_thinking=True)",
         "templates are asked for thoughts that the format does not have"),
    ],
    "look/intervals.py": [
        ('method="wilson"', 'method="exact"', "the interval is another one, and wider"),
        ("math.hypot(q - q_low, p_high - p)", "math.hypot(q_high - q, p - p_low)",
         "an interval of a difference takes the wrong bounds"),
    ],
    "run/command.py": [
        ("    Console.take_over()", "    pass", "a process that was spawned prints control codes"),
        ("error.exit_code < 0", "error.exit_code > 0", "a killed process is not named"),
        ("cores * (1 - idle / total)", "cores * idle / total",
         "idle cores are taken for busy ones"),
    ],
}


class Job(NamedTuple):
    """A mutant: a file, the text that it gets, and the tests to try on it, the likeliest first."""

    file: str
    what: str
    source: str
    lines: range = range(0)  # numbers of the lines that are wrong
    likely: tuple = ()  # the test that noticed it in the last run
    tests: tuple = ()  # ids
    files: tuple = ()  # words of pytest: all tests of these
    limit: float = TIME_LIMIT  # seconds of `tests`

    @property
    def name(self):
        return f"{self.file}: {self.what}"


class Coverage:
    """Which tests of SPECIFICATION execute a line, as coverage.py records it, and their seconds."""

    def __init__(self, folder):
        """Run them without a mutant. Raises RuntimeError if one fails: every mutant would die."""
        from coverage import CoverageData

        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", str(os.cpu_count()), "--dist", "loadscope",
             *SPECIFICATION, "--cov=minragen", "--cov-context=test", "--cov-report=",
             f"--junitxml={folder}/junit.xml"], cwd=ROOT, check=False, capture_output=True,
            text=True, env=os.environ | {"COVERAGE_FILE": f"{folder}/coverage"})
        if done.returncode:
            raise RuntimeError(f"without a mutant the tests fail:\n{done.stdout[-4000:]}")
        self.data, self.seconds = CoverageData(f"{folder}/coverage"), Counter()
        self.data.read()
        for case in ElementTree.parse(f"{folder}/junit.xml").iter("testcase"):
            *folders, module = case.get("classname").partition(".Test")[0].split(".")
            classes = case.get("classname").split(".")[len(folders) + 1:]
            test = "::".join(["/".join([*folders, f"{module}.py"]), *classes, case.get("name")])
            self.seconds[test] += float(case.get("time"))

    def tests_of(self, job):
        """The tests that execute one of the job's lines, the quickest first, those of the file's
        own test file as if they took a fifth. Lines that the import executes are nobody's: then
        the tests that execute any line of the file.

        A fixture is executed in the first test that takes it, so all tests of that file count.
        """
        file = READ_BY.get(job.file, job.file)
        contexts = self.data.contexts_by_lineno(str(ROOT / "minragen" / file))
        found = {c for line in job.lines for c in contexts.get(line, ()) if c}
        found = found or {c for line in contexts.values() for c in line if c}
        tests = {c.rpartition("|")[0] for c in found}
        files = {c.partition("::")[0] for c in found if c.endswith("|setup")}
        own = f"test_{Path(file).stem}.py"
        return tuple(sorted(
            (t for t in self.seconds if t in tests or t.partition("::")[0] in files),
            key=lambda t: self.seconds[t] * (0.2 if own in t else 1)))

    def a_minute_of(self, tests):
        """The first of them, SAMPLE_SECONDS long."""
        sums = itertools.accumulate(self.seconds[test] for test in tests)
        return tuple(test for test, end in zip(tests, sums) if end < SAMPLE_SECONDS)


class Chosen:
    """A plugin of pytest: these tests alone, in this order, or all tests if there are none. Writes
    the first that fails into a file."""

    def __init__(self, tests, file):
        self.file, self.places = file, {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self.places:
            items[:] = sorted((item for item in items if item.nodeid in self.places),
                              key=lambda item: self.places[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.file.write_text(report.nodeid)


def run_mutant(job):
    """Run a job's tests on a copy of the project.

    returns: (outcome, test that noticed it, seconds), outcome one of "killed", "survived",
        "killed (time)"
    """
    folder, began = Path(tempfile.mkdtemp(prefix="mutant-")), time.monotonic()
    try:
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name,
                                ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        (folder / "minragen" / job.file).write_text(job.source)
        noticed, code = folder / "noticed", 0
        for tests in (job.likely, job.tests):  # the first of one file alone, which is quick to read
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            if code == 0 and files:
                code = _run_tests(folder, files, Chosen(tests, noticed), job.limit)
        if code == 0 and job.files:
            code = _run_tests(folder, job.files, Chosen((), noticed))
        # Above 1 not even the collection came to its end.
        outcome = {0: "survived", None: "killed (time)"}.get(code, "killed")
        return (outcome, noticed.read_text() if noticed.exists() else "",
                time.monotonic() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_tests(folder, words, plugin, limit=TIME_LIMIT):
    """The exit code of pytest on the copy, in a forked process; None if it took too long."""
    pid = os.fork()
    if pid:
        return _wait(pid, time.monotonic() + limit)
    code = 3
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores Ctrl-C
        # A mutant must not leave wrong weights where real runs look for them.
        os.environ["MINRAGEN_CACHE"] = str(folder / "cache")
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        with contextlib.suppress(SystemExit):
            code = int(pytest.main(["-x", "-q", "--no-header", "--assert=plain", *words,
                                    "-p", "no:cacheprovider", "--rootdir", str(folder)], [plugin]))
            code *= code != pytest.ExitCode.NO_TESTS_COLLECTED  # no test has noticed anything
    finally:
        os._exit(code)


def _wait(pid, deadline):
    """The exit code of a child, or None if it had to be killed at the deadline."""
    code = None
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # with whatever the tests have left running
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return 1 if code is not None and code < 0 else code  # a crash is noticed, too


def generic_mutants(file):
    """All mutants that cosmic-ray makes of a file: [(line, operator, source), ...].

    The sources are functions without arguments: thousands of mutants, of which few are looked at.
    """
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / "minragen" / file).read_text()
    nodes, found = list(ast_nodes(get_ast(source))), []
    for name in operator_names():
        if "Variable" in name:  # these two need arguments
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for (line, _), _ in operator.mutation_positions(node):
                found.append((line, name.partition("/")[2], lambda operator=operator,
                              n=occurrence: mutate_code(source, operator, n)))
                occurrence += 1
    return found


def table(only=""):
    """The rows as Jobs.

    raises: ValueError for a row whose text does not stand exactly once in its file
    """
    jobs, strangers = [], json.loads(STRANGERS.read_text())
    for file in {**MUTANTS, **{row["file"]: () for row in strangers}}:
        rows = [*MUTANTS.get(file, ()), *((row["text"], row["wrong"], row["what"])
                                          for row in strangers if row["file"] == file)]
        source = (ROOT / "minragen" / file).read_text()
        for text, wrong, what in rows if only in file and tested(file) else ():
            if source.count(text) != 1:
                raise ValueError(f"{file} has {source.count(text)} times, expected once: {text!r}")
            first = source[:source.index(text)].count("\n") + 1
            lines = () if file in READ_BY else statement(source, first, first + text.count("\n"))
            jobs.append(Job(file, what, source.replace(text, wrong), lines))
    return jobs


@functools.cache
def parsed(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]


def statement(source, first, last):
    """The numbers of the lines of the innermost statement that begins at or before line `first`,
    up to `last` at least; of a compound one the lines before its body."""
    around = [node for node in parsed(source) if node.lineno <= first <= node.end_lineno]
    node = max(around, key=lambda node: node.lineno, default=None)
    if node is None:  # a decorator
        return range(first, last + 1)
    body = getattr(node, "body", None)
    return range(node.lineno, max(last, body[0].lineno - 1 if body else node.end_lineno) + 1)


def tested(file):
    return file not in NEEDS or importlib.util.find_spec(NEEDS[file]) is not None


def sample(seed):
    """SAMPLE of all the mutants that cosmic-ray makes of the package, as Jobs."""
    files = [str(path.relative_to(ROOT / "minragen"))
             for path in sorted((ROOT / "minragen").rglob("[!_]*.py"))]
    found = [(file, *mutant) for file in filter(tested, files) for mutant in generic_mutants(file)]
    jobs = []
    for file, line, operator, make in random.Random(seed).sample(found, SAMPLE):
        before, source = (ROOT / "minragen" / file).read_text(), make()
        old, new = next((a.strip(), b.strip()) for a, b in zip(
            before.splitlines(), source.splitlines()) if a != b)
        jobs.append(Job(file, f"line {line}, {operator}: {old} -> {new}", source,
                        statement(before, line, line)))
    return jobs


def run(jobs, processes, trees):
    """Try all jobs, `processes` at a time, but for those that PROGRESS has for these trees. Prints
    each. Returns {file: what is wrong: (outcome, test that noticed it)}."""
    lines = PROGRESS.read_text().splitlines() if PROGRESS.exists() else ()
    known = {line["name"]: (line["outcome"], line["noticed"])
             for line in map(json.loads, lines) if line["trees"] == trees}

    def attempt(job):
        outcome, noticed, seconds = run_mutant(job)
        print(f"{outcome:13} {seconds:6.1f} s  {job.name}  {noticed}", flush=True)
        if outcome != "survived":
            with PROGRESS.open("a") as file:
                file.write(json.dumps(dict(trees=trees, name=job.name, outcome=outcome,
                                           noticed=noticed)) + "\n")
        return job.name, (outcome, noticed)

    with ThreadPoolExecutor(processes) as pool:
        return {job.name: known[job.name] for job in jobs if job.name in known} | dict(
            pool.map(attempt, (job for job in jobs if job.name not in known)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only files whose name holds this")
    parser.add_argument("--sample", action="store_true", help="generic mutants, not the table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="mutants at a time [cores]")
    args = parser.parse_args()
    began = time.monotonic()

    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()

    if git("status", "--porcelain", "minragen", "tests"):
        sys.exit("error: minragen/ or tests/ differ from the commit that the result would name.")
    trees = {name: git("rev-parse", f"HEAD:{name}") for name in ("minragen", "tests")}
    jobs = [job for job in sample(trees["minragen"]) if args.only in job.file] if (
        args.sample) else table(args.only)
    result = json.loads(RESULT.read_text())
    noticed = result.get("noticed_by", {})
    with tempfile.TemporaryDirectory() as folder:
        coverage = Coverage(folder)
        jobs = [job._replace(files=LATER[job.name]) if job.name in LATER else job._replace(
            tests=coverage.tests_of(job),
            likely=tuple({noticed.get(job.name)} & coverage.seconds.keys())) for job in jobs]
    jobs = [job._replace(limit=min(TIME_LIMIT, 60 + 5 * sum(map(
        coverage.seconds.__getitem__, job.tests)))) for job in jobs]
    if args.sample:
        jobs = [job._replace(tests=coverage.a_minute_of(job.tests)) for job in jobs]
    # The copies bring their own modules; what they all import is imported once, here.
    sys.path[:] = [p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "tests"))]
    for name in PRELOADED:
        importlib.import_module(name)
    found = run(jobs, args.jobs, trees)
    if not args.sample:
        left = [job._replace(likely=(), tests=(), files=SPECIFICATION)
                for job in jobs if found[job.name][0] == "survived" and not job.files]
        found |= run(left, args.jobs, trees)
    survivors = [name for name, (outcome, _) in found.items() if outcome == "survived"]
    minutes = round((time.monotonic() - began) / 60)
    share = 1 - len(survivors) / max(1, len(found))
    print(f"{len(found)} mutants, {share:.1%} killed, {minutes} minutes, survivors: "
          f"{survivors or 'none'}")
    new = {"trees": trees, "minutes": minutes, "mutants": len(found), "survivors": survivors}
    if args.sample:
        result["sample"] = new
    else:
        later = [name for name, (_, test) in found.items() if "long/" in test]
        result |= new | {"later": later, "noticed_by": {
            name: test for name, (_, test) in found.items()}}
    if not args.only:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(share < (LEAST_SHARE if args.sample else 1))


if __name__ == "__main__":
    main()
