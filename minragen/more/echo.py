"""ECHO (Shrivastava et al. 2026, arXiv 2605.24517): learn to predict what the environment answers.

    L = policy loss + echo_coef * mean over the tokens of states of -log p(token)

No pass is added: these tokens are in rows that are trained anyway. They are the state
(`TextEnv.state`) in every observation but the first, which no reply caused. Chat template, reward
and budget are left out. The paper takes the mean over each episode and trains on all of them. Here
it is the mean over the mini-batch's tokens, and episodes whose group the filter dropped take no
part.

Tests: `python -m pytest tests/test_echo.py`.
"""

from bisect import bisect_left, bisect_right

from minragen.chat import ChatFrame


class EchoFrame(ChatFrame):
    """A ChatFrame that notes where the tokens of states are."""

    def append_next_prompt(self, trajectory, rules):
        """As ChatFrame's; also notes the positions of the state in what it appends."""
        begin = len(trajectory.tokens)
        if fits := super().append_next_prompt(trajectory, rules):
            shown = trajectory.observation
            places = self.places(trajectory.tokens[begin:], shown, shown.state)
            trajectory.sequences[-1].predicted += [begin + i for i in places]
        return fits

    def places(self, ids, observation, state):
        """The positions in `ids` of tokens that belong wholly to the state; empty if the
        observation does not show it."""
        observation, state = self.template.plain(observation), self.template.plain(state)
        before = self.tokenizer.decode(ids).find(observation)
        line = f"\n{observation}".find(f"\n{state}")  # it begins a line
        if not state or before < 0 or line < 0:
            return range(0)

        def length(n):
            return len(self.tokenizer.decode(ids[:n]))

        counts, first = range(len(ids) + 1), before + line
        return range(bisect_left(counts, first, key=length),
                     bisect_right(counts, first + len(state), key=length) - 1)
