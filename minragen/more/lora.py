"""LoRA (Hu et al. 2022): the weights stay as they are, and small matrices beside them are trained.

    y = W x + alpha / r B A x      W: (out, in), frozen      A: (r, in)      B: (out, r), 0 at first

Policy and critic have their own adapters on the same frozen weights, and the reference is those
weights without adapters, so the model is held once. All linear layers of the decoder are adapted.
The output layer is not: most models share it with the embeddings, where a merged adapter would
change both. Embeddings and norms stay as they are, and so does a vision tower.

Difference from RAGEN: alpha is always 2 r, so that the rank is the only option.

Reading order: `add_adapters`; then what a checkpoint holds: `merged`, `trained`, `load`.

Tests: `python -m pytest tests/test_lora.py`.
"""

from functools import partial

import torch

from minragen.models import copy_trainable


def add_adapters(policy, rank, seed):
    """Freeze the policy's model and put adapters beside its linear layers. `policy.base` becomes
    the model without them, on the same weights.

    raises: ImportError without peft
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ImportError("--lora-rank needs a package: pip install 'peft>=0.21'") from None
    policy.base = copy_trainable(policy.model.requires_grad_(False))
    torch.manual_seed(seed)  # of A; alike in all processes
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"),
        policy.model.base_model)
    policy.weights = partial(merged, policy.model)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:  # peft makes float32; AdamW has masters
            parameter.data = parameter.data.to(policy.model.dtype)


def merged(model):
    """The state dict of the equivalent model without adapters: W + alpha / r B A in place of W.
    Merged weights are moved to the CPU: a GPU may have no room for a second copy."""
    state = {name.replace(".base_layer", ""): weight
             for name, weight in model.state_dict().items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if hasattr(layer, "get_delta_weight"):
            # A mixture's experts are wrapped once for each of their parameters, named otherwise.
            weight = f"{name}.{getattr(layer, 'parameter_name', 'weight')}".replace(
                ".base_layer", "")
            state[weight] = (state[weight] + layer.get_delta_weight("default")).detach().cpu()
    return state


def trained(module):
    """{name: weight} of the state that is not frozen."""
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False)
              if not p.requires_grad}
    return {name: weight for name, weight in module.state_dict().items() if name not in frozen}


def load(module, state):
    """Fill in what `trained` returned. Raises RuntimeError for a name too many or too few."""
    frozen = module.state_dict().keys() - trained(module).keys()
    module.load_state_dict({name: module.state_dict()[name] for name in frozen} | state)
