"""The output layer on a GPU's tensor cores: logits for sampling, logprobs for learning.

A product of two bfloat16 numbers is exact in float32. So tensor cores may multiply bfloat16
matrices and sum in float32: it is as exact as models.py, which multiplies their float32 copies
without them.

Reading order: `token_logprobs`, `LogProbs`, `product`.

Axes: B rows, T tokens, N response tokens, n of a chunk, V vocabulary, D hidden size.

Tests: `python -m pytest tests/test_attention.py -k TensorCores`.
"""

import torch
from torch.autograd.function import once_differentiable

from minragen import starpo

LOGITS = 2**26  # of a chunk: with fewer, adding up the weight's gradient outlasts computing it


def fits(model):
    """Whether the output layer of a model is a product with bfloat16 weights and nothing else."""
    config, layer = model.config.get_text_config(), model.get_output_embeddings()
    return layer.weight.dtype == torch.bfloat16 and layer.bias is None and not any(
        getattr(config, name, None)
        for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"))


def output_layer(model, hidden):
    """Logits (n, V) float32 of hidden states (n, D), as in models.py."""
    return product(hidden, model.get_output_embeddings().weight.T)


def token_logprobs(model, tokens, mask, temperature, hidden_before):
    """The logprob of every token that mask selects, and the entropy there, as in models.py."""
    hidden = hidden_before(model.base_model, tokens, mask)  # (N, D)
    weight = model.get_output_embeddings().weight
    columns = LogProbs.apply(hidden, weight, tokens[mask], temperature or 1.0,
                             max(1, LOGITS // len(weight)))
    empty = torch.zeros(tokens.shape, device=tokens.device)
    return tuple(empty.masked_scatter(mask, column) for column in columns)


class LogProbs(torch.autograd.Function):
    """(N,) logprobs of targets and (N,) entropies, in chunks of `rows` states. The backward pass
    computes the logits z again; with p the probabilities and H the entropy,

        d log p_target / dz_v = [v = target] - p_v        dH / dz_v = -p_v (log p_v + H)

    hidden: (N, D)      weight: (V, D)      targets: (N,)
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, rows):
        logprobs, entropies = [], []
        for states, target in zip(hidden.split(rows), targets.split(rows)):
            log_p = _log_p(states, weight, temperature)
            logprobs.append(log_p.gather(1, target[:, None])[:, 0])
            entropies.append(starpo.entropy(log_p))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat(logprobs), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprob, d_entropy):
        hidden, weight, targets, entropy = ctx.saved_tensors
        columns = hidden, targets[:, None], *(x[:, None] / ctx.temperature for x in (
            d_logprob, d_entropy, d_logprob + d_entropy * entropy))
        d_hidden, d_weight = torch.empty_like(hidden), None
        for out, states, target, of_logprob, of_entropy, of_both in zip(
                *(x.split(ctx.rows) for x in (d_hidden, *columns))):
            log_p = _log_p(states, weight, ctx.temperature)
            p = log_p.exp()
            d_logits = log_p.mul_(of_entropy).add_(of_both).mul_(p).neg_()
            d_logits.scatter_add_(1, target, of_logprob)
            halves = _halves(d_logits, weight.dtype)
            out.copy_(product(halves, weight).unflatten(0, (2, -1)).sum(dim=0))
            if ctx.needs_input_grad[1]:  # with LoRA the output layer is frozen
                part = product(halves.T, torch.cat([states, states]))
                d_weight = part if d_weight is None else d_weight.add_(part)
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def _log_p(states, weight, temperature):
    """Log-probabilities (n, V) float32 of states (n, D)."""
    return product(states, weight.T).div_(temperature).log_softmax(dim=-1)


def _halves(x, dtype):
    """(2n, V): x (n, V) rounded to dtype, and below it the remainder, rounded too. With one
    bfloat16 number alone gradients would be less exact than those of models.py."""
    coarse = x.to(dtype)
    return torch.cat([coarse, (x - coarse).to(dtype)])


def product(a, b):
    """a @ b; bfloat16 matrices give their product in float32."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if a.device.type == "cpu":  # which has no such kernel
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)
