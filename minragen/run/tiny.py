"""The tiny models, untrained: `tiny`, and `tiny-vlm`, which sees images; and WARM_UPS: for each
environment the texts of their vocabulary, and how demonstrations are made.

Reading order: `tiny_policy`, `tiny_vlm`, `tiny_tokenizer`, `WARM_UPS`.

Tests: `python -m pytest tests/test_bundled.py tests/test_chat.py`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from minragen.envs import IMAGE, image_of
from minragen.models import Policy
from minragen.support.formats import FORMATS, WORLD, description_parts, format_instructions

PATCH = 8  # pixels of a patch's side; a board's cell is one patch, and one token
LEAN_WORDS = Path(__file__).parent.parent / "data" / "lean_words.txt"  # of goals, proofs, messages
EXPERT = 0.3  # probability that a turn is the solver's; raised where that gave too few successes
TAGS = ("think", "answer")  # in every vocabulary; VAGEN's other tags only where they are used
TEXT_SEEDS = 64  # instances of each split that give the tokenizer its words
MOST_TURNS = 20  # of an episode that is played for its words
CHAT_TEMPLATE = ("{% for m in messages %}"
                 "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tiny_policy(envs, response_format="free_think"):
    """An untrained Llama of 0.21M to 0.25M parameters with a tokenizer for the words of `envs`."""
    tokenizer = tiny_tokenizer(envs, response_format)
    return Policy("tiny", drawn(transformers.LlamaForCausalLM, tiny_config(tokenizer)), tokenizer)


def tiny_vlm(envs, response_format="free_think"):
    """An untrained LLaVA: tiny's decoder, and a vision tower of two layers that makes a token of
    each cell of an image (PATCH pixels).

    raises: ValueError unless the first observations of `envs` have square images of one size
    """
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from minragen.more.vision import SeeingPolicy, VisionLanguageModel

    images = [image_of(env.reset(seed=0)[0]) for env in envs]
    shapes = {image.shape[:2] for image in images if image is not None}
    side, width = shapes.pop() if len(shapes) == 1 else (0, 1)
    if side != width or side % PATCH:
        raise ValueError(f"tiny-vlm needs square images of one size, in cells of {PATCH} pixels: "
                         f"give --env-arg view=image, or --model tiny.")
    tokenizer = tiny_tokenizer(envs, response_format)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", IMAGE]})
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(do_resize=False, do_center_crop=False), tokenizer, PATCH, "full",
        tokenizer.chat_template)
    tower = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        image_size=side, patch_size=PATCH, initializer_range=0.05)
    model = drawn(transformers.LlavaForConditionalGeneration, transformers.LlavaConfig(
        text_config=tiny_config(tokenizer), image_token_id=processor.image_token_id,
        vision_config=tower, vision_feature_layer=-1, vision_feature_select_strategy="full",
        tie_word_embeddings=True))
    return SeeingPolicy("tiny-vlm", VisionLanguageModel(model, processor), tokenizer)


UNTRAINED = {"tiny": tiny_policy, "tiny-vlm": tiny_vlm}


def tiny_config(tokenizer):
    """The decoder of the tiny models. One KV head: reading the cache bounds steps of 256 rows."""
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.05, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)


def drawn(kind, config):
    """A model with random weights, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).eval()


# ---- Their words ---------------------------------------------------------------------------------
def tiny_tokenizer(envs, response_format="free_think"):
    """One token per tag and per piece of the environments' texts; all other text is bytes.

    A piece is a tag, coordinates, a word, a number, signs up to the next tag, or a blank. A model
    of this size does not learn to read "(", "1", ",", "3", ")" as a place (docs/design.md).
    """
    tagged = dict.fromkeys([*TAGS, *re.findall(r"<(\w+)>", FORMATS[response_format])])
    tags = [f"<{end}{name}>" for name in tagged for end in ("", "/")]
    tag = rf"</?(?:{'|'.join(tagged)})>"
    pattern = (rf"{tag}| ?\(\d+, \d+(?:, \d+)?\)| ?[A-Za-z]+| ?\d+"
               rf"| ?(?:(?!{tag})[^\sA-Za-z\d])+|\n| |\s")
    texts = [text.encode(errors="replace").decode()  # lone surrogates become "?"
             for text in _training_texts(envs, response_format)]
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
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=4096)


def _training_texts(envs, response_format):
    """Texts of the format, and of TEXT_SEEDS instances of each environment."""
    yield "system\nuser\nassistant\n"
    yield format_instructions(response_format, max_new_tokens=1)
    yield "Reward: 0 -0.1 1 No valid action was given, or not all were valid."
    for env in envs:
        yield env.system_prompt
        for seed in range(TEXT_SEEDS):
            for texts in warm_up_of(env).texts:
                yield from texts(env, seed)
        if description_parts(response_format):
            yield f"{WORLD} none"


def episode(env, seed, solved=False):
    """The texts of an episode of random answers, or of the solver's."""
    observation, rng = env.reset(seed=seed)[0], np.random.default_rng(seed)
    for _ in range(MOST_TURNS):
        answer = env.solve()[0] if solved else env.random_answer(rng)
        yield f"{observation}\n {env.note()}\n {answer}"
        observation, _, terminated, truncated, _ = env.step(answer)
        if terminated or truncated:
            break
    yield observation


# ---- What is particular to an environment --------------------------------------------------------
class WarmUp(NamedTuple):
    """How an environment is demonstrated, and which texts give the tokenizer its words."""

    habit: Callable = lambda env: ""  # the action that the noisy demonstrator prefers; "": none
    expert: float = EXPERT  # probability that a turn is the solver's
    distinct: int | None = None  # steps of new demonstrations, then repeated; None: all
    texts: tuple = (episode,)  # functions of an environment and a seed


def _metamathqa_texts(env, seed):
    """A template with its distractors, by seed, and every number up to `largest`."""
    if not env.records:
        yield "".join(f" {n}" for n in range(env.unwrapped.options["largest"] + 1))
        template = env.templates[seed % len(env.templates)]
        distractors = env.unwrapped.options["distractors"]
        yield env.pose(template, np.random.default_rng(seed), distractors).question


def _webshop_texts(env, seed):
    """A share of the titles, the synonyms, and a good episode with its notes."""
    yield env.synonyms()
    yield " ".join(f"- {p.title}" for p in env.shop.products[seed % TEXT_SEEDS::TEXT_SEEDS])
    yield from episode(env, seed, solved=True)


def _deepcoder_texts(env, seed):
    observation, _ = env.reset(seed=seed)
    answers = f" {env.random_answer(np.random.default_rng(seed))}\n {env.solve()[0]}"
    yield f"{observation}\n {env.note()}\n{answers}\nPassed {seed % 9} of 8 hidden tests."


def _lean_texts(env, seed):
    for number in (seed, seed + TEXT_SEEDS):
        env._reset(np.random.default_rng(number))
        yield "\n ".join((env.theorem.statement, *env.theorem.proof))
    step = env.unwrapped.options["step_cost"]
    yield LEAN_WORDS.read_text(encoding="utf-8")
    yield f"-{step:.4g} {1 - step:.4g}\nTurns left: {seed % env.budget.max_turns + 1}"


WARM_UPS = {
    "Bandit": WarmUp(lambda env: env.actions[0]),
    # Every target, product and sum, also those that no seed happens to show.
    "Countdown": WarmUp(texts=(episode, lambda env, seed: (
        f" {n}" for n in range(env.TARGETS.stop + 1)))),
    # A simpler program than the solver's. DeepCoder and Lean are too slow to play for words.
    "DeepCoder": WarmUp(lambda env: env.problem.name and (
        f"def {env.problem.name}({env.problem.arguments}): return {env.problem.simpler[0]}"),
        texts=(_deepcoder_texts,)),
    "FrozenLake": WarmUp(lambda env: env.safe_moves()[0]),
    # 200 steps of new demonstrations: Lean takes 25 ms for a tactic that it has not seen.
    "Lean": WarmUp(lambda env: "intro h", 0.4, 200, (_lean_texts,)),
    # The first number of the question.
    "MetaMathQA": WarmUp(lambda env: (re.findall(r"\d+", env.problem.question) or [""])[0], 0.4,
                         texts=(episode, _metamathqa_texts)),
    "SearchQA": WarmUp(lambda env: f"search[ {env.question.steps[0].query} ]", 0.6, texts=(
        episode, lambda env, seed: () if env.questions else env.words())),
    "Sokoban": WarmUp(lambda env: "Right", 0.4),
    "WebShop": WarmUp(lambda env: env.first_choice(), 0.5, texts=(episode, _webshop_texts))}


def warm_up_of(env):
    """The WarmUp of the bundled class that an environment has or derives from."""
    return next((WARM_UPS[c.__name__] for c in type(env.unwrapped).__mro__ if c.__name__ in WARM_UPS
                 and c.__module__.startswith("minragen.environments.")), WarmUp())
