"""Policies that give the same numbers sooner.

Tests: `python -m pytest tests/test_attention.py tests/test_models.py`.
"""

from contextlib import contextmanager
from dataclasses import dataclass

from minragen.fast import llama, prefix_tree
from minragen.models import Policy


def faster(policy, attention=""):
    """The policy with the quickest way to run its model.

    attention: transformers' implementation for the learner's passes; empty: ours where it applies
    raises: ValueError if the model cannot use it
    """
    if attention:
        return OtherAttention(**vars(policy), attention=attention)
    if llama.supports(policy.model.base_model):
        return SharingPolicy(**vars(policy))
    return policy


class SharingPolicy(Policy):
    """A policy of Llama's family: no padding, and beginnings that rows share are computed once."""

    append = staticmethod(llama.append)
    states_before = staticmethod(prefix_tree.states_before)
    micro_batches = staticmethod(prefix_tree.micro_batches)


@dataclass
class OtherAttention(Policy):
    """A policy whose learner uses an attention of transformers, such as flash_attention_2. It may
    not take the masks of a rollout, which keeps the model's usual one."""

    attention: str = ""

    def __post_init__(self):
        self.usual = self.model.config._attn_implementation
        if llama.supports(self.model.base_model):  # it samples as before
            self.append = llama.append
        try:
            self.model.set_attn_implementation(self.attention)
        except (ValueError, ImportError) as error:
            raise ValueError(f"model {self.name!r} cannot use attention {self.attention!r}: "
                             f"{str(error).strip().splitlines()[0]}") from None

    @contextmanager
    def sampling(self):
        config = self.model.config.get_text_config()
        learners, config._attn_implementation = config._attn_implementation, self.usual
        try:
            yield
        finally:
            config._attn_implementation = learners
