"""Conversations of which a turn sees only the last few turns.

Each turn is a row of its own, with all that the turn saw: its prompt and its reply.

    turn   full context            limited, window 2       single_turn, window 2
    1      S o1 | r1               S o1 | r1               S o1 | r1
    2      S o1 r1 o2 | r2         S o1 r1 o2 | r2         S "o1, you answered a1; o2" | r2
    3      S o1 r1 o2 r2 o3 | r3   S o2 r2 o3 | r3         S "o2, you answered a2; o3" | r3

S: system message, o: observation, r: reply, a: its answer. `limited` shows the very ids of earlier
replies, `single_turn` one user message. A reply is in the loss of its own row only.

Tests: `python -m pytest tests/test_rows.py tests/test_step.py`.
"""

from minragen.chat import ChatFrame
from minragen.envs import Observation, image_of
from minragen.trajectory import Sequence


class WindowedFrame(ChatFrame):
    """A ChatFrame whose prompts show `window` turns at most, the one to be answered included.

    context: "limited" or "single_turn"; the rest as for ChatFrame
    """

    appends = False

    def __init__(self, *given, context, window, **named):
        self.context, self.window = context, window
        super().__init__(*given, **named)

    def first_prompt_ids(self, system, observation):
        if self.context == "single_turn" and image_of(observation) is not None:
            raise ValueError("context single_turn writes earlier turns as text and would lose "
                             "their images: use --context full or limited.")
        return super().first_prompt_ids(system, observation)

    def append_next_prompt(self, trajectory, rules):
        """Begin the row of the next turn. Returns False if its prompt leaves no token for a reply.

        While a whole reply would not fit, the prompt leaves out its oldest turn.
        """
        for window in range(self.window, 0, -1):
            ids = self.prompt(trajectory, window)
            if rules.max_context - len(ids) >= (rules.max_new_tokens if window > 1 else 1):
                trajectory.sequences.append(Sequence())
                trajectory.add_prompt(ids)
                return True
        return False

    def prompt(self, t, window):
        """The ids of a prompt that shows at most `window` turns, that to be answered included."""
        earlier = range(max(0, len(t.turns) - window + 1), len(t.turns))
        shown = [t.turns[k].observation for k in earlier] + [t.observation]
        if self.context == "single_turn":
            history = [f"{seen}\nYou answered: {t.turns[k].reply.answer or 'nothing valid'}"
                       for k, seen in zip(earlier, shown)]
            text = "\n".join([*history, t.observation])
            return self.first_prompt_ids(t.system, Observation(text, image_of(t.observation)))
        ids = self.first_prompt_ids(t.system, shown[0])
        for k, following in zip(earlier, shown[1:]):
            sequence = t.sequences[k]
            reply = [i for i, sampled in zip(sequence.tokens, sequence.response_mask) if sampled]
            ids = ids + reply + self.next_prompt_ids(reply[-1], following)
        return ids
