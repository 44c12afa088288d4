"""Mutants: wrong lines that the tests must notice, each tried by itself on a copy of the project.

    make mutants                                     # the table below, then a generic sample
    .venv/bin/python tests/mutants.py --only train   # only files whose name holds `train`

A row is (text, wrong text, what is then wrong). Its text stands exactly once in its file; a row
whose text is gone is an error, so the table has to move with the code. The sample is drawn from all
mutants that cosmic-ray makes of the package, with the commit's hash as seed. Results:
runs/readme-mutants.json.

Every mutant runs in a forked process that has imported torch and transformers already, which makes
hundreds of them affordable. It dies when a test fails, when nothing can be collected, or when the
tests take longer than TIME_LIMIT.
"""

import argparse
import contextlib
import importlib.util
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parent.parent
COPIED = ("minragen", "tests", "docs", "benchmarks", "runs", "README.md", "Makefile",
          "CONTRIBUTING.md",
          "pyproject.toml", "requirements.lock", "LOG.md", ".gitignore")
TIME_LIMIT = 300.0  # seconds of wall-clock time for the tests of one mutant
MEMORY_LIMIT = 16 * 2**30  # bytes of address space, so that a runaway mutant is stopped early
SAMPLE = 150
LEAST_SHARE = 0.85  # of the generic sample that must die
PRELOADED = ("torch", "transformers", "transformers.models.llama.modeling_llama", "gymnasium",
             "matplotlib.figure", "hypothesis", "pytest", "safetensors.torch")

CONTRACT = "test_env_contract.py test_bundled.py"
# The tests run on a generic mutant of a file, the likeliest to fail first.
TESTS = {
    "bundled.py": "test_bundled.py test_models.py",
    "chat.py": "test_chat.py test_rollout.py test_diagnostics.py environments/test_relations.py",
    "config.py": "test_config.py test_step.py test_train.py test_eval.py",
    "diagnostics.py": "test_diagnostics.py test_train.py test_eval.py", "eval.py": "test_eval.py",
    "envs.py": f"test_envs.py environments/test_frozenlake.py test_museum.py {CONTRACT}",
    "attention.py": "test_attention.py test_rollout.py test_models.py test_families.py "
                    "test_vision.py",
    "distributed.py": "test_distributed.py",
    "llama.py": "test_attention.py test_models.py test_families.py",
    "loggers.py": "test_loggers.py", "lora.py": "test_lora.py", "memory.py": "test_memory.py",
    "models.py": "test_models.py test_attention.py test_families.py test_museum.py test_rollout.py "
                 "test_step.py",
    "rollout.py": "test_rollout.py test_step.py environments/test_relations.py test_museum.py "
                  "test_families.py",
    "runs.py": "test_train.py test_config.py test_eval.py",
    "starpo.py": "test_starpo.py test_museum.py test_step.py",
    "train.py": "test_step.py test_train.py test_museum.py", "vision.py": "test_vision.py",
    **{f"environments/{name}.py": f"environments/test_{name}.py {CONTRACT}" for name in (
        "bandit", "frozenlake", "sokoban", "sudoku", "countdown", "metamathqa", "searchqa",
        "webshop", "deepcoder", "lean")},
    "environments/board.py": "environments/test_relations.py environments/test_frozenlake.py "
                             "environments/test_sokoban.py environments/test_images.py "
                             f"{CONTRACT}",
    "environments/data.py": "environments/test_countdown.py environments/test_metamathqa.py "
                            "environments/test_searchqa.py environments/test_lean.py",
    "environments/gymnasium_text.py": "test_envs.py",
    "environments/openenv.py": "environments/test_openenv.py",
    "environments/reasoning_gym.py": "environments/test_reasoning_gym.py",
    "environments/search.py": "environments/test_searchqa.py environments/test_webshop.py",
    "environments/theorems.py": "environments/test_lean.py",
    "environments/sandbox.py": "environments/test_sandbox.py environments/test_deepcoder.py",
    "environments/sandbox_worker.py": "environments/test_sandbox.py "
                                      "environments/test_deepcoder.py"}
# Files whose tests are skipped without a package: `make extras` has them all.
NEEDS = {"loggers.py": "wandb", "lora.py": "peft", "environments/openenv.py": "openenv",
         "environments/reasoning_gym.py": "reasoning_gym"}
MUTANTS = {
    ("vision.py", "test_vision.py"): [
        ("self.size - 1 - self.numbers(ids)[1]", "0 * self.numbers(ids)[1]",
         "no token of an image sees a later one of it, which Gemma 3's do"),
        ("found[which, features]", "found[which, features.flip(0)]", "features are out of order"),
        ("found[which, features]", "found[which.flip(0), features]", "images are exchanged"),
        ("found[which, features]", "found[which, features].detach()", "the tower is not trained"),
        ('modality="image").requires_grad_(False)', 'modality="image").requires_grad_(True)',
         "freeze_vision freezes nothing"),
        ("forward.args[-1] if", "None if", "the critic's tower is not trained"),
        ("image.tobytes()", "image[:1].tobytes()", "images of equal first rows are one"),
    ],
    ("train.py", "test_vision.py"): [
        ("image_store.forget()", "pass", "images are kept until the memory is full"),
        ("image_store.add_images_of(trajectories)", "pass",
         "images of other processes are unknown"),
    ],
    ("lora.py", "test_lora.py"): [
        ("lora_alpha=2 * rank", "lora_alpha=rank", "alpha is r"),
        ("policy.base = twin(policy.model.requires_grad_(False))",
         "policy.base = policy.model.requires_grad_(False)", "the reference has adapters"),
        ("torch.manual_seed(seed)", "torch.seed()", "each process has its own adapters"),
        ("module.parameters() if not p.requires_grad}", "()}", "frozen weights are copied"),
        ("| state)", "| state, strict=False)", "adapters that are missing stay random"),
        ("state[weight] + layer", "state[weight] - layer", "adapters are merged with a wrong sign"),
        (".detach().cpu()", ".detach() / 2", "half of the adapters is merged"),
    ],
    ("loggers.py", "test_loggers.py"): [
        ("for metrics in history:", "for metrics in ():", "a resumed logger lacks earlier steps"),
        ("del writers[name]", "pass", "a broken logger warns at every step"),
        ('home.glob("offline-run-*")', "()", "a killed W&B run has its steps twice"),
    ],
    ("environments/openenv.py", "environments/test_openenv.py"): [
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
    ("environments/reasoning_gym.py", "environments/test_reasoning_gym.py"): [
        ("if self.evaluates and not is_harmless", "if False and not is_harmless",
         "programs in answers run"),
        ("float(score >= 1)) - self.worth", "float(score > 0)) - self.worth",
         "any score is paid in full"),
        (r"(?!\s*([\w.]|", r"(?!\s*([\d.]|", "hexadecimal powers are computed"),
        ("np.random.set_state(states[1])", "pass", "a data set changes the global generator"),
    ],
    ("environments/gymnasium_text.py", "test_envs.py"): [
        ("self._text if self.by_text else str(self._seed)", "self._text",
         "a game that hides a word has one split"),
        ("max_episode_steps=-1", "max_episode_steps=None", "TimeLimit ends wider budgets"),
    ],
    ("train.py", "test_step.py"): [
        ("batch.take(rows),", "batch,", "dropped groups are trained on"),
        ("scores + starpo", "scores - starpo", "overlong replies are paid"),
        ('= "group" else', '= "batch" else', "BRPO normalises over groups"),
        ('!= "returns"', '== "entropy"', "the filter by length looks at returns"),
        ("-config.entropy_coef *", "config.entropy_coef *", "entropy is punished"),
        ("= config.kl_coef", "= -config.kl_coef", "leaving the reference is rewarded"),
        ("mask, config.aggregation, config.max_context", "mask", "aggregation is never applied"),
        ("config.clip_high,", "config.clip_low,", "clip_high is never applied"),
        ("config.dual_clip", "0.0", "dual_clip is never applied"),
        ('part.loss_mask if config.ratio == "sequence" else None', "None",
         "ratio=sequence is never applied"),
        ("starpo.loss_scale(kept, config.loss_scaling)", "1.0", "loss_scaling is never applied"),
        ("config.soft_reweight", "False", "soft_reweight is never applied"),
        ("config.length_weight", "False", "length_weight is never applied"),
        ("config.zero_task", "False", "zero_task is never applied"),
        ("(model, part.tokens, part.loss_mask, config.temperature)",
         "(model, part.tokens, part.loss_mask)", "the learner's logprobs are at temperature 1"),
        ("part.loss_mask, config.temperature)[", "part.loss_mask)[",
         "old and reference logprobs are at temperature 1"),
        ("response_mask, config.temperature", "response_mask",
         "the filter's entropy is at temperature 1"),
        ("critic_lr * decay", "critic_lr", "the critic's rate does not decay"),
        ("step, epoch)", "step)", "every epoch has the same shuffle"),
        ("| diagnose(learner",
         "| diagnostics.describe(\n            [t for t in played if kept[t.group_id]] or "
         "played) | diagnose(learner", "metrics are described after the filter"),
        ("target - batch", "batch", "explained_variance is of the values"),
        ("part.old_logprobs, logprobs", "logprobs, part.old_logprobs", "approx_kl is reversed"),
        ("rewards - learner", "rewards + learner", "a KL in the reward is paid to tokens"),
        ("batch.episode_ids.unique()", "batch", "the KL controller counts rows, not trajectories"),
        ("<= config.num_groups", "<= len(kept)",
         "resampling trains on more than num_groups groups"),
        ("len(steps) ", "1 ", "metrics are summed over optimizer steps"),
        ("config.value_clip", "1e9", "value_clip is never applied"),
        ("tensor_split(parts", "split(config.mini_batch",
         "the last mini-batch may be small, and its rows then count several times"),
        ("batch.scores,", "batch.episode_returns,", "soft_reweight weighs by raw returns"),
        ("min(1, (step - 1) / max(1, last - 1)", "(step - 1) / max(1, last - 1",
         "the learning rate falls below its final value"),
    ],
    ("starpo.py", "test_step.py"): [
        ("c.norm_by_std", "True", "norm_by_std is never applied"),
        ("gamma, c.lam, c.gamma_turn),", "gamma, c.lam, 1.0),", "gamma_turn is never applied"),
    ],
    ("diagnostics.py", "test_train.py"): [
        (" grounding_reward=0,", "", "validation has the state reward"),
        ('("_greedy", 0.0)', '("_greedy", config.val_temperature)', "greedy validation samples"),
        ("[t for t in chosen if not t.error]", "list(chosen)",
         "episodes whose environment failed are in the metrics"),
    ],
    ("train.py", "test_train.py"): [
        ("diagnostics.warnings_of(log.history", "(", "warnings are never printed"),
        ("in history if", "in history[::-1] if",
         "the regime is compared with the previous measurement"),
        (".rounds += attempt + 1", ".rounds = 1", "rounds share instances"),
        ("learner.skipped = 0 if finite else", "learner.skipped =",
         "a good update is a skipped one"),
        ("            optimizer.clear()\n", "            pass\n",
         "gradients of the pass that ran out of memory count twice"),
        ("TRAIN_SEED + config", "config", "training plays validation's seeds"),
        (") >= config.", ") > config.", "resampling plays a round too many"),
        ("if not t.error]  # the others' environments failed", "]",
         "episodes whose environment failed are trained on"),
        ("config))).error:", "config))) and False:",
         "a run begins although its environment cannot"),
    ],
    ("runs.py", "test_train.py"): [
        ('kl_reward_coef", "ema', "ema", "resume forgets the adapted KL coefficient"),
        ('kl_reward_coef", "ema")', 'kl_reward_coef")', "resume forgets the moving averages"),
        ("step and not final", "step", "the final test stays in the log when a run goes on"),
        ("checksum(path) != expected.get(file)",
         "checksum(path)[0] != expected.get(file, [0])[0]", "a flipped bit in a checkpoint passes"),
        ('first.load_state_dict(load(checkpoint.parent / "reference.pt", "cpu"))', "pass",
         "resume takes the trained policy as reference"),
        ("config = dataclasses.replace(config, decay_steps=stored.steps)", "pass",
         "steps added to a run raise its learning rate again"),
        (" + failed[:SAMPLE]", "", "failures are not written"),
    ],
    ("config.py", "test_config.py test_train.py test_step.py test_eval.py"): [
        ('entropy", "std")}', 'entropy", "mean")}', "entropy_std is the mean"),
        (" | MODELS.get(model, PRETRAINED)", "", "the preset of pretrained models is not applied"),
        ("not has_effect(config)", "False", "options that change nothing are accepted"),
        ('given | {"env_arg": (*kept, *options)}', "given",
         "a given environment option switches all of the preset's off"),
        ("for name in (o, env + dot + o)}", "for name in (env + dot + o,)}",
         "an option for all environments of a mixture loses to the presets of single ones"),
        ("(option, *DATA)", "(option,)", "tiny's options shape the data of the user"),
        ("elif key not in BUDGETS and", "elif", "a mixture gets the budget of one environment"),
    ],
    ("runs.py", "test_config.py test_train.py test_step.py test_eval.py"): [
        ('", "steps", "', '", "temperature", "steps", "', "resume may change the temperature"),
        ('max_context", "steps"', 'steps",', "resume may shrink the context"),
        ('", "steps"):', '",):', "resume may take steps back"),
        ("RUN_NAME.fullmatch(run) and ", "", "a page is written outside of runs/"),
        ("path.is_symlink()", "False", "a link in a run leads a figure elsewhere"),
        (r'rf"(^|,)\s*', 'rf"^', "the second environment of a stored mixture may be code in runs/"),
        ("dataclasses.replace(read_config(folder), run=run", "read_config(folder",
         "a renamed run is looked for under its old name"),
        ("folder.exists() and not resume", "False", "a run overwrites another"),
    ],
    ("eval.py", "test_eval.py"): [
        ("successes, n)", "successes, 2 * n)", "the interval is of twice as many episodes"),
        ("config, args.split, args", 'config, "val", args', "--split is ignored"),
        ("zip(groups.envs, groups.reset(0))", "zip(groups.envs, groups.reset(1))",
         "baselines play other instances"),
        ("texts[row] += answers[row], observation", "texts[row] += observation, answers[row]",
         "scripted players see answers after their observations"),
        ("scores / self.norms", "scores", "the nearest demonstration is the longest one"),
        ("+= math.log(len(scores) / len(where))", "+= 1",
         "words of every prompt count as much as rare ones"),
        ("None if t.error else ", "", "an episode whose environment failed counts as one lost"),
    ],
    ("rollout.py", "test_rollout.py test_step.py environments/test_relations.py test_museum.py"): [
        ("ids), False, -1", "ids), True, -1", "observations count as sampled"),
        ("sum(self.turn_rewards)", "self.turn_rewards[-1]",
         "the return of an episode is its last reward"),
        ('valid", "effective", "grounding", "worldmodeling', "effective",
         "`valid` and F1 are summed over turns"),
        ('begin + (0 if rules.context == "full" else turn * rules.max_context)', "begin",
         "turns with equal prompts draw equal noise"),
        ("ids) == draft.", "ids) > draft.", "a reply is a token longer than allowed"),
        ("framing) < rules.max_context", "framing) <= rules.max_context",
         "an observation may fill the context"),
        ("window + 1)", "window)", "a window shows a turn too many"),
        ("(rules.max_new_tokens if window > 1 else 1)", "1",
         "a window leaves no room for a whole reply"),
        ("(rules.temperature or 1.0)", "1.0", "sampling ignores the temperature"),
        ("TopPLogitsWarper(rules.top_p", "TopPLogitsWarper(1 - rules.top_p",
         "top-p keeps the mass that it should cut"),
        (", torch.tensor(members)", "", "members of a group draw equal noise"),
        ("turn_rewards[turn]", "turn_rewards[-1]", "every turn gets the last reward"),
        ("tensor([e for _, _, e in rows]", "arange(len(rows)",
         "every turn counts as an episode in the windowed contexts"),
        ('paid * bool(info["valid"])', "paid", "descriptions are paid beside invalid actions"),
    ],
    ("starpo.py", "test_starpo.py"): [
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
        ("where(advantages < 0, torch.minimum(loss, floor), loss", "minimum(loss, floor",
         "the dual clip also bounds tokens with a good advantage"),
        ("True) / count", "True) / log_ratio.shape[1]",
         "the sequence ratio is a mean over the padded row"),
        ("mask.any(dim=1).sum().clamp(min=1", "torch.tensor(len(mask)",
         "rows without tokens count in the mean over sequences"),
        ("torch.where(weights > 0, x, 0.0)", "x", "nan outside the mask reaches the loss"),
    ],
    ("diagnostics.py", "test_diagnostics.py"): [
        ('frame.find_tag(reply, "</think>") or 0', '(frame.find_tag(reply, "</think>") or -1) + 1',
         "reasoning contains the tokens that the closing tag touches"),
        ("list(left)[rng.integers(len(left))]", "rng.choice([t for t in left for _ in left[t]])",
         "long episodes outweigh short ones in the draw"),
        ("own.bincount(minlength=scores.shape[1]).double() / len(own",
         "torch.full((scores.shape[1],), 1 / scores.shape[1]).double(",
         "every prompt weighs the same in the mutual information"),
        ("  or value(", "  and value(",
         "a collapse needs little information and retrieval at chance"),
        ("min(REARM + 1, len(steps))", "2",
         "a warning is given again without a silence of twenty steps"),
        ("median(values[-RECENT:])", "fmean(values[-RECENT:])", "a single spike warns"),
        ("FLOOR.get(metric, 0)", "0", "a rise from almost no entropy warns"),
    ],
    ("models.py", "test_models.py test_families.py"): [
        ("torch.tanh(logits / cap) * cap if cap else logits", "logits",
         "the soft cap of the logits is ignored"),
        ('(getattr(config, "logit_scale", None) or 1)', "1", "Cohere's logits are not scaled"),
        ('unexpected", "mismatched', "mismatched",
         "weights that the model does not know are accepted"),
        ('missing", "unexpected', "unexpected", "weights that the files lack stay random"),
        ("if beyond:", "if False:", "the tokenizer writes tokens that the model lacks"),
        ("token not in str(tokenizer.chat_template)", "True",
         "the template may write special tokens beyond the vocabulary"),
        ("), *original]", ")]", "longrope runs beyond its original length"),
        (' or not hasattr(text, "max_position_embeddings")', "",
         "models without position_ids are loaded"),
    ],
    ("bundled.py", "test_bundled.py"): [
        ("(steps - step) / steps", "1.0", "the learning rate of the warm-up never falls"),
        ('f" {groups.envs[row].describe()}"', 'parts[row]["observation"]',
         "a demonstration predicts the state before its answer"),
    ],
    ("train.py", "test_museum.py"): [
        ("sums.update(", "sums = Counter(", "the logged loss is that of the last micro-batch"),
        ("mini.take(rows", "add_loss_weights(mini.take(rows), config",
         "each micro-batch is averaged by itself"),
    ],
    ("envs.py", "test_museum.py"): [
        ("[group], options", "[group] + member, options",
         "the members of a group play different instances"),
        ('zlib.crc32(instance.encode(errors="replace")', "hash(instance",
         "the split of an instance depends on the process"),
    ],
    ("envs.py", "test_envs.py"): [
        ("= len(outcomes)", "= len(pieces)",
         "bad and surplus pieces use up the actions of the episode"),
        ("member + 1,", "member,",
         "member 0 slips by the numbers that drew its instance at the second attempt"),
        ("self.split:", "self.split or attempt > 2:",
         "after a few draws an instance of another split is taken"),
        ("self._broken |= {*rows} - finished.keys()", "pass",
         "a step that comes back late changes the next episode"),
        ("self.budget.max_actions_per_turn > 1 and not self.multi_action", "False",
         "an environment of single actions plans for more than it may play"),
        ("math.ceil(len", "max(1.0, len",
         "replies that each keep to their limit exceed that of a step where a core has two of "
         "them"),
        ("unmarked(self.render_text())", "self.render_text()", "data can mark images"),
    ],
    ("environments/bandit.py", "environments/test_bandit.py"): [
        ('f"{self.safe} {self.risky}" if', "self.render() if",
         "a mixed pair is in one split in one order and in another in the other"),
    ],
    ("environments/frozenlake.py", "environments/test_frozenlake.py"): [
        ("slip / 2 else 1", "slip else 1", "the player slips to one side only"),
        ("self._move(self.player, a)) != self.player", "self._move(self.player, a)) is not None",
         "a step into the border is a safe move"),
        ('straight(cells["Player"][0]', 'straight(cells["Start"][0]',
         "the shallow player walks from the start in every turn"),
    ],
    ("environments/sokoban.py", "environments/test_sokoban.py"): [
        ("len(self.boxes & self.targets) - home", "max(0, len(self.boxes & self.targets) - home)",
         "pushing a box off its target costs nothing"),
        ("way[1:first - 1][:2]", "way[1:first][:2]",
         "the note names the cell to push from a second time"),
        ("if moved(player, step) != box}", "if step}",
         "the shallow player pushes the box that it wants to walk around"),
    ],
    ("environments/sudoku.py", "environments/test_sudoku.py"): [
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
    ],
    ("environments/countdown.py", "environments/test_countdown.py"): [
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
    ("environments/searchqa.py", "environments/test_searchqa.py"): [
        ("question.about)", "question.text)",
         "held-out questions are about people of the training split"),
        ('dealt.get(words["value"], -1)', "-1",
         "somebody may live in the town of birth: guessing a town answers the question"),
        ("in rng.permutation([*facts]).tolist()", "in facts",
         "the facts of every article stand in the same order: a fixed place has the answer"),
        ('proof, title, kind = f"{fact.sentence}, so "', 'proof, title, kind = ""',
         "the note does not quote the passage that it concludes from"),
        ('em if self.options["reward"] == "em" else f1 if f1 >= 0.3 else 0.0', "f1",
         "any common word is rewarded"),
        ('2 * (not o["data"])', "2", "hops is accepted with data, whose questions have none"),
    ],
    ("environments/search.py", "environments/test_searchqa.py"): [
        ("log(1 + (self", "log((self", "a word that most texts contain lowers their score"),
        ("redirects.redirect_request = lambda *_: None", "pass",
         "a server may send a request, with its key, to another address"),
        (".code >= 500", ".code > 500", "a retriever in trouble (status 500) is not asked again"),
        ("(ArithmeticError, MemoryError, ", "(", "a chunk of 2**64 bytes is no RuntimeError"),
    ],
    ("environments/webshop.py", "environments/test_webshop.py"): [
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
    ],
    ("environments/board.py", "environments/test_relations.py"): [
        ("> r) - (row <", "< r) - (row >", "above and below are exchanged"),
    ],
    ("environments/board.py", "environments/test_images.py"): [
        ("cells.swapaxes(1, 2).reshape(", "cells.reshape(", "the pixels of an image are shuffled"),
        ('if "image" in VIEWS[self.options["view"]] else None', 'or None',
         "a view without an image has one"),
        ("* 8 // size", "% 8", "larger tiles are the small one, again and again"),
    ],
    ("environments/deepcoder.py", "environments/test_deepcoder.py"): [
        ("max(0.0, passed / total - self.best)", "passed / total - self.best",
         "a worse try costs, and a better one after it is paid again"),
        ("all(passed[n] < tests // 2 for n in right)", "True",
         "a one-line program may pass all hidden tests"),
        ("max(1, tests // 4)", "tests", "a constant may pass all hidden tests"),
        ("rng.permutation(edges)[:3]", "rng.permutation(edges)[:0]", "edge cases are not tested"),
        ("order[::-1] if i not in hidden]", "order]", "an example may be a hidden test"),
        ('rules.replace("{k}", str(k))', "rules", "the task does not tell its parameter"),
        ("len(texts) != 1", "not texts", "the names in a pickled call are taken for tests"),
        (r"(?:```|\Z)", "```", "a program that was cut off is no program"),
        ("unsupported}", "False}", "the metric never counts"),
        ('"time" not in words', "True", "a verdict by bad luck is kept"),
        ('f"def body():\\n{candidate}"', "problem.preamble", "a comment is a function's body"),
    ],
    ("environments/lean.py", "environments/test_lean.py"): [
        ('re.findall(r"\\w+", tactic', "tactic.split(",
         "a command that touches a sign is let through to Lean"),
        (" and m.line in by", "", "a half-finished nested proof is accepted, as in RAGEN"),
        ("(ArithmeticError, AttributeError", "(AttributeError",
         "a server's line number of 1e999 is no RuntimeError"),
        ("not re.search(SOUND, axioms)", '"axioms" not in axioms', "a proof may use any axiom"),
        ("status == signal.SIGKILL", "False",
         "a proof is wrong because something else killed Lean"),
        ("running.returncode == -signal.SIGKILL", "False",
         "a proof is wrong because something else killed the Lean on PATH"),
        ('limit + (name == "CPU")', "limit",
         "the limit on CPU time looks like a kill from outside"),
        ("None if os.WIFSIGNALED(status) else json_rows", "json_rows",
         "what a stopped Lean has printed is judged"),
        ("REPL command timed", "timed",
         "a proof is wrong because the server could not load Mathlib in time"),
        ("OTHER and self._post(self.OTHER)", "OTHER",
         "a proof is wrong because the server is broken"),
        (" or words & {*AUTOMATION} - {*known}", "",
         "`exact (by simp)` proves where simp is refused"),
        ("if fits and plan not in tried", "if fits",
         "the shallow player repeats a tactic that did not help"),
    ],
    ("chat.py", "test_chat.py"): [
        ("if max_new_tokens else []", "if False else []", "the prompt tells no limit"),
        ("{before}{self._plain(observation)}", "{before}{observation}",
         "special tokens in the first observation open turns"),
        ("self.tokenizer.decode(pieces) != self.tokenizer.decode(at_once)", "False",
         "a tokenizer that writes a blank before every turn is accepted"),
        ("self.end_of_turn, tokenizer", "tokenizer",
         "the template's own end of turn does not end a reply"),
        ("eos_token_id, *end_ids", "eos_token_id", "the ends of the generation config are ignored"),
        ("special or re", "special and re", "only special added tokens are control tokens"),
        ("while self", "if self", "a control token inside another one stays"),
        ("(), *marks},", "()},",
         "turns that are marked by plain text can be opened by an observation"),
        ("repr(DATE.strftime(found[2]))", "found[0]", "today's date stands in the prompt"),
        ("shown.startswith(to_reply) or to_reply.startswith(shown)", "True",
         "a finished reply may open otherwise than the generation prompt"),
        ('to_reply += "" if "<think>" in more else more', "pass",
         "the blank before a finished reply is left out of the prompt"),
        ("=self.thinks)", "=True)",
         "templates are asked for thoughts that the format does not have"),
        ("(False, False), (True, True), (False, True)", "(True, True)",
         "a template without a system role is refused"),
        ("ids[len(line):] if ids[:len(line)] == line else self", "self",
         "SentencePiece puts a blank before every turn and reply"),
    ],
    ("rollout.py", "test_rollout.py"): [
        ("model.dtype: 0.3, torch", "torch", "the policy's own dtype is not proved"),
        ("3, torch.float32: 1e-4", "3", "float32 is proved to 0.3 nats only"),
        ("not gap <= tolerance:  # nan too", "False:",
         "a model whose cached turns differ from a full pass is accepted"),
        ("window + PROOF_TOKENS", "PROOF_TOKENS", "the proof stays within the window"),
        ("all(abs(x) < LARGEST for x in (reward, *info.values()))", "True",
         "a reward that is no number is trained on"),
        ("[t for t in trajectories if not t.error]", "trajectories",
         "an episode that could not begin is played"),
        ("MASS = 2**38", "MASS = 2**18", "tokens below four millionths are never drawn"),
        ("self.slots.set_lengths(self.cached)", "pass",
         "what was sampled after a reply's end stays in its slot"),
        ("draft.cached = min(len(draft.ids), fed)", "draft.cached = len(draft.ids)",
         "the last sampled id never enters the cache"),
        ("self.rules.token_budget // max(map(len, fresh))", "len(fresh)",
         "prompts and observations ignore the token budget"),
        ("min(room, BLOCK.get(logits.device.type, 8))", "BLOCK.get(logits.device.type, 8)",
         "a block runs beyond the longest reply that is allowed"),
        ("if draft.stop is None:\n                    self._add",
         "if True:\n                    self._add",
         "tokens that were sampled after a reply's end are kept"),
        ("max(sum(gaps) / len(gaps), float(learner))", "sum(gaps) / len(gaps)",
         "the learner's pass is not proved"),
        ("tokens[1, :length // 2] = tokens[0, :length // 2]", "pass",
         "no rows of the proof share a beginning"),
        ("groups.seeds[group], groups.numbers[group]", "groups.seeds[group], group",
         "each process numbers its groups from 0"),
        ("int(live[i]) for i in order[:n]", "1 for i in order[:n]",
         "a finished row goes on filling its slot"),
    ],
    ("rollout.py", "test_families.py"): [
        ("max_context > most", "False", "conversations run beyond the model's positions"),
    ],
    ("diagnostics.py", "test_families.py"): [
        ("longest, device=device).expand(n, longest), positions",
         "longest + q, device=device).expand(n, -1)",
         "windows are counted in slots and not in positions"),
        (".clamp(max=max_positions(model) - 1)", "",
         "a reasoning behind a long prompt asks for positions that the model lacks"),
    ],
    ("environments/lean.py", "test_env_contract.py"): [
        ("seconds <= 15):", "seconds <= 300):",
         "a proof that takes too long may be an error of the environment"),
    ],
    ("environments/data.py", "environments/test_metamathqa.py"): [
        ("(os.path.getmtime(path), os.path.getsize(path)", "os.path.getsize(path",
         "a file that is changed to the same length is not read again"),
    ],
    ("environments/sandbox.py", "environments/test_sandbox.py"): [
        ("truths.pop(0, None)", "pass",
         "an assertion that never calls the submission counts as passed"),
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
    ],
    ("environments/sandbox_worker.py", "environments/test_sandbox.py"): [
        ('len(parts) > 512 and kind != "tuple"', "False", "keys that collide occupy the judge"),
        ('return "killed"', 'return "died"', "a program killed for its CPU time has died"),
        ("os.setsid()", "pass", "kill(0) reaches the worker"),
        ('f"{root}{STDLIB}/site-packages", f"{root}{STDLIB}/dist-packages"', "",
         "a submission reads the packages installed beside the standard library"),
    ],
    ("rollout.py", "test_step.py"): [
        (".unique(return_inverse=True)[1]", "",
         "a group whose episodes all failed is still a group"),
    ],
    ("envs.py", "test_rollout.py"): [
        ("self.envs[row] = self._build[row]()", "pass",
         "an environment that raised is used again in the state in which it broke"),
    ],
    ("config.py", "test_config.py"): [
        ("and c.window <= most_turns(c)", "", "a window longer than the episode is accepted"),
        (': c.advantages in ("gae", "bi_level_gae"),', ': estimator_kind(c) == "critic",',
         "advantage_mask all is accepted where it changes nothing"),
    ],
    ("attention.py", "test_rollout.py"): [
        ("old[:, :, :filled].index_select(0, index)", "old[:len(index), :, :filled]",
         "keys stay in their slots when rows leave"),
        ("return keys[:, None, None] <= positions[:, None, :, None]",
         "return keys[:, None, None] <= positions.amax(1)[:, None, None, None]",
         "a query sees the tokens after it"),
        ("positions.minimum(slots.lengths[rows, None] - 1)", "positions",
         "padding asks for positions that the model lacks"),
    ],
    ("attention.py", "test_families.py"): [
        ("] > queries[", "] >= queries[", "a sliding window is a key too wide"),
        ("hidden[:, :-1][mask[:, 1:]]", "hidden[mask]",
         "other decoders' logprobs are read at the token and not before it"),
    ],
    ("attention.py", "test_attention.py"): [
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
    ],
    ("attention.py", "test_models.py"): [
        ("learner_attention = attention", 'learner_attention = ""', "--attention is forgotten"),
        (' and not getattr(decoder, "learner_attention", "")', "", "--attention is ignored"),
        ("config._attn_implementation = model.base_model.slots_attention", "pass",
         "the sampler gets the learner's attention"),
    ],
    ("llama.py", "test_attention.py"): [
        ("torch.cat([-other, one]", "torch.cat([other, -one]", "positions rotate backwards"),
        ("_norm(norm, states) if norm else states", "states",
         "Qwen3's norms of heads are left out"),
        ("angles = x[asked], normed[asked], [angle[asked]",
         "angles = x[asked], normed[asked], [angle[:len(asked)]",
         "the last layer rotates queries by the positions of others"),
    ],
    ("llama.py", "test_models.py"): [
        ("layer.gradient_checkpointing and torch.is_grad_enabled()", "False",
         "--activation-checkpointing keeps everything in Llama's family"),
    ],
    ("models.py", "test_models.py"): [
        ('{"trust_remote_code": False}', "{}", "the Python of a model's folder may be run"),
        ("layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)", "pass",
         "--activation-checkpointing keeps everything outside Llama's family"),
    ],
    ("rollout.py", "test_accelerator.py"): [
        ("BLOCK.get(logits.device.type, 8)", "BLOCK.get(logits.device.type, 4)",
         "the host waits twice in 8 tokens"),
        ("return [x.to(self.policy.device, non_blocking=True) for x in tensors]",
         "return [x.to(self.policy.device) for x in tensors]", "the host waits for its uploads"),
    ],
    ("diagnostics.py", "test_accelerator.py"): [
        ("log_p = logits.log_softmax(dim=-1)[:, first.to(slots.device)]",
         "log_p = logits.cpu().log_softmax(dim=-1)[:, first]", "whole logits go to the host"),
    ],
    ("attention.py", "test_accelerator.py"): [
        ("index = torch.tensor(index).to(self.device, non_blocking=True)",
         "index = torch.tensor(index, device=self.device)", "the host waits when rows leave"),
        ("self.lengths = self.bounds.to(self.device, copy=True, non_blocking=True)",
         "self.lengths = self.bounds.clone()", "lengths stay on the host"),
    ],
    ("memory.py", "test_memory.py"): [
        ("sum(8 * p.numel()", "sum(4 * p.numel()", "one of Adam's two moments is forgotten"),
        ("if p.itemsize < 4", "if p.itemsize < 2", "float32 masters are not counted"),
        ("max(groups * config.group_size, episodes)", "groups * config.group_size",
         "the rows of validation are not counted"),
        ("for total in (config.num_groups, config.val_size)",
         "* distributed.world_size() for total in (config.num_groups, config.val_size)",
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
    ],
    ("distributed.py", "test_distributed.py"): [
        ("            waiting.append(dist.all_reduce(parameter.grad, async_op=True))",
         "            pass", "every process steps on the gradient of its own rows"),
        ("        dist.all_reduce(x)", "        pass",
         "values and old logprobs of other processes' rows are 0"),
        ("        result.update(part)", "        result = Counter(part)",
         "metrics are those of the last process"),
        ("        fail(error)\n\n\ndef end", "        pass\n\n\ndef end",
         "a busy process does not notice that another has died"),
        ("    sys.stdout.flush()\n", "", "what was said before an error is lost in a file"),
        ("return print if rank() == 0 else lambda line: None", "return print",
         "every process prints"),
        ("failure.exitcode < 0", "failure.exitcode > 0", "a killed process is not named"),
    ],
    ("train.py", "test_distributed.py"): [
        ("slice(distributed.rank(), None, distributed.world_size())", "slice(None)",
         "every process plays all groups"),
        ("learner.halved), distributed.rank(),\n                         distributed.world_size())",
         "learner.halved))",
         "every process computes all rows, whose gradients count several times"),
        ("distributed.sum_metrics(gradients(learner, mini, config, bar.update))",
         "gradients(learner, mini, config, bar.update)",
         "metrics are one process's share of the mini-batch"),
        ("key=lambda t: (t.group_id, t.member))", "key=lambda t: t.member)",
         "episodes are not in the order of one process"),
        ("config.num_groups < distributed.world_size()", "config.num_groups < 1",
         "a process may have no groups"),
        ("writes = distributed.rank() == 0", "writes = True", "every process writes"),
    ],
    ("attention.py", "test_distributed.py"): [
        ("size), size - 1) != rank", "size), size - 1) < rank",
         "the shares of several processes overlap"),
    ],
    ("environments/board.py", "environments/test_frozenlake.py"): [
        ('["Down"] * (row - r)', '["Down"] * (row - r - 1)', "a straight way stops a row early"),
        ("cell[1] + steps * MOVES", "cell[1] - steps * MOVES", "Left is right and Right is left"),
    ],
    ("environments/theorems.py", "environments/test_lean.py"): [
        (" + text\n", "\n", "a variable that is only declared keeps its name in the shape"),
        ('choice.replace("_", found[1] or "_")', "choice",
         "the argument of a pattern is lost"),
        ("return distinct([draw_theorem", "return tuple([draw_theorem",
         "a theorem is drawn twice under other names"),
        ("given(f\"{atoms.pop()} → {goal}\")", "given(f\"{premise} → {goal}\")",
         "a drawn theorem has two proofs, and no fact leads nowhere"),
        ("else rng.permutation([provable, False])", "else [provable] * 2",
         "both sides of a disjunction can be proved"),
    ],
    ("environments/metamathqa.py", "environments/test_metamathqa.py"): [
        ("if self.problem.largest <= largest:", "if self.problem.gold <= largest:",
         "only the result has to be below `largest`"),
        ("max(gold, *numbers))", "max(numbers))", "a result may be above `largest`"),
        ("for _ in range(DRAWS):", "while True:",
         "a template whose numbers are never small enough is drawn for ever"),
        ("or not LEFT_SIDE.fullmatch(left.strip()) or", "or", "18 = 20 is read as 20"),
        ('(r"\\*\\*([^*]+)\\*\\*", r" \\1 "),', "", "a result in bold is no result"),
        ("again * (self.budget.max_actions > 1)", "again",
         "a task of one attempt promises something for the second"),
        ("order = [guess, *(", "order = [*(", "the shallow player ignores the words"),
    ],
}


def run_mutant(file, source, tests):
    """Run `tests` on a copy in which minragen/`file` holds `source`.

    returns: (outcome, seconds), outcome one of "killed", "survived", "killed (time)"
    raises: RuntimeError for a test file that is not there
    """
    missing = [t for t in tests if not (ROOT / "tests" / t).exists()]
    if missing:
        raise RuntimeError(f"{file}: tests/{missing[0]} is not there.")
    folder, began = Path(tempfile.mkdtemp(prefix="mutant-")), time.monotonic()
    try:
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name,
                                ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        (folder / "minragen" / file).write_text(source)
        pid = os.fork()
        if pid == 0:
            _run_tests(folder, tests)
        code = _wait(pid, began + TIME_LIMIT)
        # Above 1 not even the collection came to its end.
        outcome = {0: "survived", None: "killed (time)"}.get(code, "killed")
        return outcome, time.monotonic() - began
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_tests(folder, tests):
    """In the forked process: pytest on the copy, then exit with its code."""
    code = 3
    try:
        os.setsid()
        # A mutant must not leave wrong weights where real runs look for them.
        os.environ["MINRAGEN_CACHE"] = str(folder / "cache")
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        import pytest

        with contextlib.suppress(SystemExit):
            code = int(pytest.main(["-x", "-q", "--no-header", "--assert=plain",
                                    "-p", "no:cacheprovider", "--rootdir", str(folder),
                                    *(f"tests/{t}" for t in tests)]))
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
    """The rows above as jobs: [(file, tests, what is wrong, source), ...].

    raises: ValueError for a row whose text does not stand exactly once in its file
    """
    jobs = []
    for (file, tests), rows in MUTANTS.items():
        source = (ROOT / "minragen" / file).read_text()
        for text, wrong, what in rows if only in file and tested(file) else ():
            if source.count(text) != 1:
                raise ValueError(f"{file} has {source.count(text)} times, expected once: {text!r}")
            jobs.append((file, tests, what, source.replace(text, wrong)))
    return jobs


def tested(file):
    return file not in NEEDS or importlib.util.find_spec(NEEDS[file]) is not None


def sample(seed):
    """SAMPLE of all the mutants that cosmic-ray makes of the package, as jobs of the same kind."""
    found = [(file, *mutant) for file in filter(tested, TESTS) for mutant in generic_mutants(file)]
    jobs = []
    for file, line, operator, make in random.Random(seed).sample(found, SAMPLE):
        before, source = (ROOT / "minragen" / file).read_text().splitlines(), make()
        changed = next(b for a, b in zip(before, source.splitlines()) if a != b).strip()
        jobs.append((file, TESTS[file],
                     f"line {line}, {operator}: {before[line - 1].strip()} -> {changed}", source))
    return jobs


def run(jobs, processes):
    """Try all jobs, `processes` at a time. Prints and returns {what is wrong: outcome}."""
    def attempt(job):
        file, tests, what, source = job
        outcome, seconds = run_mutant(file, source, tests.split())
        print(f"{outcome:13} {seconds:6.1f} s  {file}: {what}", flush=True)
        return f"{file}: {what}", outcome

    with ThreadPoolExecutor(processes) as pool:
        return dict(pool.map(attempt, jobs))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only files whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(),
                        help="mutants at a time [cores]")
    args = parser.parse_args()
    # The copies bring their own modules; what they all import is imported once, here.
    sys.path[:] = [p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "tests"))]
    for name in PRELOADED:
        importlib.import_module(name)
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True,
                              check=True).stdout.strip()

    if git("status", "--porcelain", "minragen", "tests"):
        sys.exit("error: minragen/ or tests/ differ from the commit whose hash is the seed.")
    commit = git("rev-parse", "HEAD")
    written, drawn = table(args.only), [job for job in sample(commit) if args.only in job[0]]
    unchanged = (ROOT / "minragen" / "__init__.py").read_text()
    needed = sorted({name for _, tests, *_ in written + drawn for name in tests.split()})
    found = run([("__init__.py", name, f"unchanged, {name}", unchanged) for name in needed],
                args.jobs)
    if failed := [what for what, outcome in found.items() if outcome != "survived"]:
        sys.exit(f"error: without a mutant these fail, and every mutant would die: {failed}")
    rows, drawn = run(written, args.jobs), run(drawn, args.jobs)
    survivors = [what for what, outcome in rows.items() if outcome == "survived"]
    generic = [what for what, outcome in drawn.items() if outcome == "survived"]
    share = 1 - len(generic) / max(1, len(drawn))
    print(f"table: {len(rows)} mutants, survivors: {survivors or 'none'}\n"
          f"sample of commit {commit[:12]}: {len(drawn)} mutants, {share:.1%} killed")
    if not args.only:
        result = {"commit": commit, "mutants": len(rows), "survivors": survivors,
                  "generic": len(drawn), "generic_killed": len(drawn) - len(generic),
                  "generic_timeouts": sum(o == "killed (time)" for o in drawn.values()),
                  "generic_survivors": generic}
        (ROOT / "runs" / "readme-mutants.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(survivors) or (not args.only and share < LEAST_SHARE))


if __name__ == "__main__":
    main()
