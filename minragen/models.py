"""What is trained: a policy loaded from a folder, its logprobs, the critic, and the optimizer.

Reading order: `Policy` and `load_policy`, `token_logprobs`, `Critic`, `AdamW`. How text becomes
tokens is in chat.py; the models that come with minRAGEN are made in run/.

Axes: B rows, T tokens, V vocabulary, N response tokens of a micro-batch, D hidden size.

Tests: `python -m pytest tests/test_models.py`.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from minragen import cache, starpo

LOGIT_BUDGET = 2**24  # elements of one (chunk, V) block of logits: 64 MiB in float32


@dataclass
class Policy:
    """A causal language model with its tokenizer.

    The functions of cache.py run any decoder of transformers; those of fast/ some, with less work.
    """

    name: str  # what messages call it
    model: nn.Module
    tokenizer: object
    base: nn.Module | None = None  # with LoRA: the model without its adapters
    weights: Callable | None = None  # with LoRA: returns the state dict to save
    last_hidden: Callable = cache.last_hidden  # runs the decoder in a rollout
    regather: Callable = cache.regather  # orders slots between turns
    sample_replies: Callable | None = None  # None: that of rollout.py
    hidden_before: Callable = cache.hidden_before  # runs the decoder in an update
    micro_batches: Callable = cache.micro_batches  # divides the rows of an update
    output_layer: Callable | None = None  # None: the function below
    token_logprobs: Callable | None = None  # None: the function below
    image_store = None  # in more/vision.py: the images that it sees

    @property
    def device(self):
        return next(self.model.parameters()).device

    def extend(self, slots, tokens, counts, first_row=0):
        """Append counts[i] ids of row i of `tokens` to slot first_row + i (see `cache.reserve`).
        Returns the logits (n, V) after the last id of each row. tokens: (n, q)      counts: (n,)"""
        hidden = self.last_hidden(self.model, slots, tokens, counts, first_row)
        return (self.output_layer or output_layer)(self.model, hidden)

    def extend_in_chunks(self, slots, fresh, token_budget, first_row=0):
        """`extend` in chunks of `token_budget` padded ids; fresh[i] goes to slot first_row + i."""
        bounds, logits = slots.bounds.clone(), []
        count = max(1, token_budget // max(map(len, fresh)))
        for start in range(0, len(fresh), count):
            part, first = fresh[start:start + count], first_row + start
            counts = torch.tensor([*map(len, part)])
            bounds[first:first + len(part)] += counts
            tokens = pad_sequence([*map(torch.tensor, part)], batch_first=True)
            logits.append(self.extend(slots, *(x.to(self.device, non_blocking=True)
                                               for x in (tokens, counts)), first))
        slots.bounds = bounds  # now equal to the lengths again
        return torch.cat(logits)

    def logprobs(self, tokens, mask, temperature=1.0):
        """`token_logprobs` of this model."""
        function = self.token_logprobs or token_logprobs
        return function(self.model, tokens, mask, temperature, self.hidden_before)

    def begin_rollout(self):
        """Called before episodes are played: more/vision.py forgets the images of earlier ones."""

    def end_rollout(self, trajectories):
        """Called with the trajectories of all processes, before they are trained on."""

    def frozen(self):
        """The reference: a policy that stays as this one is now."""
        model = self.base or copy.deepcopy(self.model).requires_grad_(False)
        return replace(self, model=model, weights=None)

    def save(self, folder):
        """Write a plain Hugging Face folder."""
        weights = self.weights() if self.weights else self.model.state_dict()
        self.model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)


def load_policy(source, name="", device="cpu", dtype=torch.float32):
    """The policy in a folder or behind a Hugging Face id. run/load.py also checks the model."""
    # NOTE: the dtype is given to from_pretrained and never to .to(), which would also round the
    # rotary frequencies and so change the logits of distant tokens.
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    # No dropout anywhere: sampling and training must be the same function.
    return Policy(name or str(source), model.to(device).eval(), tokenizer)


# ---- From tokens to logprobs ---------------------------------------------------------------------
def output_layer(model, hidden):
    """Logits (..., V) of hidden states. Cohere and Granite scale them, Gemma has a soft cap."""
    config, layer = model.config.get_text_config(), model.get_output_embeddings()
    if hidden.itemsize < 4:  # bfloat16 would round logits to 3 digits
        bias = None if layer.bias is None else layer.bias.float()
        logits = linear(hidden.float(), layer.weight.float(), bias)
    else:
        logits = layer(hidden)
    scale = (getattr(config, "logit_scale", None) or 1) / getattr(config, "logits_scaling", 1)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits * scale if scale != 1 else logits
    return torch.tanh(logits / cap) * cap if cap else logits


def token_logprobs(model, tokens, mask, temperature=1.0, hidden_before=cache.hidden_before):
    """The logprob of every masked token, and the entropy over the vocabulary at its position.

    Token t is predicted at position t-1. Only such positions go through the output layer, in chunks
    that are recomputed in the backward pass, so a (B, T, V) tensor never exists.

    tokens: (B, T) int64      mask: (B, T) bool, False in column 0
    hidden_before: of cache.py or fast/, runs the decoder
    returns: logprobs, entropy, both (B, T) float32 in nats, exactly 0 where mask is False
    """
    hidden = hidden_before(model.base_model, tokens, mask)  # (N, D)
    targets = tokens[mask]  # (N,)
    rows = max(1, LOGIT_BUDGET // model.config.get_text_config().vocab_size)

    def chunk(states, target):
        logits = output_layer(model, states).float() / (temperature or 1.0)
        log_p = logits.log_softmax(dim=-1)
        return log_p.gather(-1, target[:, None])[:, 0], starpo.entropy(log_p)

    pieces = list(zip(hidden.split(rows), targets.split(rows)))
    if len(pieces) > 1 and torch.is_grad_enabled():
        chunk = partial(checkpoint, chunk, use_reentrant=False)
    pieces = [chunk(h, t) for h, t in pieces]
    empty = torch.zeros(tokens.shape, device=tokens.device)
    return tuple(empty.masked_scatter(mask, torch.cat(column)) for column in zip(*pieces))


class Critic(nn.Module):
    """A copy of the policy's decoder with a scalar head in place of the output layer.

    V_t is read at position t-1, the state before token t is chosen, as for logprobs. The head
    starts at zero, so the first advantages come from rewards and not from noise.
    """

    def __init__(self, policy):
        super().__init__()
        self.trunk = copy_trainable(policy.model.base_model)
        self.hidden_before = policy.hidden_before
        hidden_size = policy.model.config.get_text_config().hidden_size
        self.head = nn.Linear(hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens, mask):
        """The values (B, T) float32, exactly 0 where mask is False."""
        values = self.head(self.hidden_before(self.trunk, tokens, mask).float())[:, 0]
        return torch.zeros(tokens.shape, device=tokens.device).masked_scatter(mask, values)


def copy_trainable(module):
    """A copy that shares its frozen parameters: deepcopy does not copy what its memo has."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})


class AdamW:
    """torch.optim.AdamW on masters: a float32 copy of each bfloat16 parameter.

    A bfloat16 weight has 8 bits of mantissa: near 1 it cannot move by less than 0.4 %, so an update
    of 1e-6 is rounded away. The masters keep it; after each step the weights are their rounded
    copies. Parameters that are float32 are their own masters and cost nothing.
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

        If it is not finite, the step is skipped: one bad micro-batch must not destroy the weights.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters, max_grad_norm)
        if torch.isfinite(norm):
            self.inner.step()
            with torch.no_grad():
                if self.copies:
                    torch._foreach_copy_(*zip(*self.copies))  # one launch for many of them
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
