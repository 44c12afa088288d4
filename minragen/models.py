"""What is trained: a policy loaded from a folder, its logprobs, the critic, and the optimizer.

Reading order: `Policy` and `load_policy`, `token_logprobs` (logprobs of chosen tokens),
`Critic`, `AdamW` (float32 masters). How text becomes tokens is in chat.py; the models that come
with minRAGEN are made in run/.

Axes: B rows, T tokens, V vocabulary, N response tokens of a micro-batch, D hidden size.

Tests: `python -m pytest tests/test_models.py`.
"""

import contextlib
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from minragen import cache, starpo

LOGIT_BUDGET = 2**24  # elements of one (chunk, V) block of logits: 64 MiB in float32


@dataclass
class Policy:
    """A causal language model with its tokenizer. `name` is what the user called it.

    Any decoder of transformers runs here as it is; fast/ has policies that get the same numbers
    from less work.
    """

    name: str
    model: nn.Module
    tokenizer: object
    base: nn.Module | None = None  # the model before RL, if it shares its weights (LoRA)
    weights: Callable | None = None  # -> the state dict to save; None: the model's

    append = staticmethod(cache.append)
    states_before = staticmethod(cache.states_before)
    micro_batches = staticmethod(cache.micro_batches)

    @property
    def device(self):
        return next(self.model.parameters()).device

    @property
    def image_store(self):
        """The images that the model sees; None if it sees none."""
        return getattr(self.model, "image_store", None)

    @property
    def num_parameters(self):
        return sum(p.numel() for p in self.model.parameters())

    def extend(self, slots, tokens, counts, first_row=0):
        """Append counts[i] ids of tokens[i] to slot first_row + i. Returns the logits (n, V) after
        each row's last one.

        tokens: (n, q) int64, right-padded      counts: (n,) int64; 0 leaves a slot unchanged
        """
        with self.sampling():
            hidden = self.append(self.model, slots, tokens, counts, first_row)
        return output_layer(self.model, hidden)

    def sampling(self):
        """A context in which the decoder takes the masks of a rollout."""
        return contextlib.nullcontext()

    def logprobs(self, tokens, mask, temperature=1.0):
        """`token_logprobs` of this model."""
        return token_logprobs(self.model, tokens, mask, temperature, self.states_before)

    def begin_rollout(self):
        """Forget the images of the last rollout."""
        if self.image_store:
            self.image_store.forget()

    def end_rollout(self, trajectories):
        """Add the images that other processes showed, before they are trained on."""
        if self.image_store:
            self.image_store.add_images_of(trajectories)

    def frozen(self):
        """The policy as it is now, for a reference that is not trained."""
        reference = copy.copy(self)
        reference.weights = None
        reference.model = self.base or copy.deepcopy(self.model).requires_grad_(False)
        return reference

    def save(self, folder):
        """Write a plain Hugging Face folder. Raises OSError, for example for a full disk."""
        try:
            self.model.save_pretrained(folder, state_dict=(
                self.weights or self.model.state_dict)())
            self.tokenizer.save_pretrained(folder)
        except Exception as problem:  # tokenizers raises Exception, safetensors SafetensorError
            if type(problem) is Exception or isinstance(problem, SafetensorError):
                raise OSError(str(problem)) from problem
            raise


def load_policy(source, name="", device="cpu", dtype=torch.float32):
    """The policy in a folder or behind a Hugging Face id; run/load.py refuses what does not fit."""
    # NOTE: the dtype is given to from_pretrained and never to .to(): the latter would also round
    # the rotary frequencies, which changes the logits of distant tokens.
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    # No dropout anywhere: sampling and training must be the same function.
    return Policy(name or str(source), model.to(device).eval(), tokenizer)


# ---- From tokens to logprobs ---------------------------------------------------------------------
def output_layer(model, hidden):
    """Logits (..., V) of hidden states, with the scale (Cohere, Granite) or soft cap (Gemma) that
    some models have."""
    config, logits = model.config.get_text_config(), model.get_output_embeddings()(hidden)
    scale = (getattr(config, "logit_scale", None) or 1) / getattr(config, "logits_scaling", 1)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits * scale if scale != 1 else logits
    return torch.tanh(logits / cap) * cap if cap else logits


def token_logprobs(model, tokens, response_mask, temperature=1.0,
                   states_before=cache.states_before):
    """Logprob of every response token, and the entropy of the distribution that it was drawn from.

    The logits of token t stand at position t-1. Only those positions go through the output layer,
    in chunks that are recomputed in the backward pass, so a (B, T, V) tensor never exists.

    tokens: (B, T) int64      response_mask: (B, T) bool, False in column 0
    states_before: how the decoder is run, as in cache.py
    returns: logprobs, entropy, both (B, T) float32 in nats, exactly 0 where response_mask is False
    """
    predicts = states_before(model.base_model, tokens, response_mask)  # (N, D)
    targets = tokens[response_mask]  # (N,)
    rows = max(1, LOGIT_BUDGET // model.config.get_text_config().vocab_size)

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


def max_positions(model):
    """The maximum length of a conversation: the model's, or longrope's original length. Beyond that
    its frequencies change, and cached keys would be wrong."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    original = [part["original_max_position_embeddings"] for part in (rope, *rope.values())
                if isinstance(part, dict) and part.get("rope_type") == "longrope"]
    return min([getattr(config, "max_position_embeddings", sys.maxsize), *original])


class Critic(nn.Module):
    """A second model of the policy's kind, from the same weights, with a scalar head. Frozen
    weights are shared.

    V_t is read at position t-1, the state before token t is chosen, as for logprobs. The head
    starts at zero, so the first advantages are the plain returns and not noise.

    others_of: trunk -> a module that the trunk calls and does not hold, or None
    """

    def __init__(self, policy, others_of=lambda trunk: None):
        super().__init__()
        self.trunk, self.states_before = twin(policy.model.base_model), policy.states_before
        self.vision_model = others_of(self.trunk)
        hidden_size = policy.model.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens, mask):
        """values (B, T) float32, exactly 0 where mask is False."""
        values = self.head(self.states_before(self.trunk, tokens, mask).float())[:, 0]
        return torch.zeros(tokens.shape, device=tokens.device).masked_scatter(mask, values)


def twin(module):
    """Copy a module. Its frozen parameters are shared, not copied."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})


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
        self.copies = [(p, m) for p, m in zip(self.parameters, self.masters) if m is not p]
        for parameter, master in self.copies:
            parameter.register_post_accumulate_grad_hook(partial(_add_to_master, master))

    def step(self, max_grad_norm):
        """Clip the gradients, step, clear the gradients. Returns their norm before clipping.

        A non-finite norm skips the step: one bad micro-batch must not destroy the weights.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters, max_grad_norm)
        if torch.isfinite(norm):
            self.inner.step()
            with torch.no_grad():
                for parameter, master in self.copies:
                    parameter.copy_(master)
        self.clear()
        return norm

    def clear(self):
        """Forget the gradients."""
        for parameter, master in zip(self.parameters, self.masters):
            parameter.grad = master.grad = None

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
    """Sum the micro-batches' gradients in float32: bfloat16 would round small shares away."""
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None
