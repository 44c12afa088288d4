"""Effects of a known size, planted to see whether a finding's runs would show them."""

from minragen.environments.layers import Chance


class BadLuck(Chance):
    """With `probability` a success counts as none and pays nothing. So it lowers success by this
    share of it, and a policy can do nothing about it."""

    def _act(self, action):
        outcome = self.env._act(action)
        if outcome and outcome.success and self.happens():
            outcome = outcome._replace(reward=0.0, success=False)
        return outcome
