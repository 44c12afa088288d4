"""Samples of older weights, on purpose: what an asynchronous trainer trains on, in one process.

Step n of `--stale k` plays with the weights of step n - k, as if they had taken k steps to arrive;
steps up to k play with the first ones.

    stale 2    step             1   2   3   4   5
               plays with       w0  w0  w0  w1  w2
               updates          w0  w1  w2  w3  w4

The update computes the logprobs of its own weights first, from which PPO's ratio starts.
`--tis-cap` weights each token by p(token) now over p(token) when it was sampled; without it old
samples are treated as fresh ones.

Tests: `python -m pytest tests/test_distil.py`.
"""

from contextlib import contextmanager

from minragen.more import lora


class OlderWeights:
    """Within it a policy has the weights that it had `steps` rollouts ago."""

    def __init__(self, policy, steps):
        self.model, self.steps, self.kept = policy.model, steps, []  # oldest first

    @contextmanager
    def __call__(self):
        now = {name: w.clone() for name, w in lora.trained(self.model).items()}
        kept = [*self.kept, now][-self.steps - 1:]
        self.model.load_state_dict(kept[0], strict=False)
        try:
            yield
            self.kept = kept  # not after an error: the rollout is played again
        finally:
            self.model.load_state_dict(now, strict=False)
