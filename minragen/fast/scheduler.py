"""`rollout.collect` for environments that answer late: no conversation waits for all others.

The model reads a row's prompt, samples its reply, and feeds and samples others until the row's
environment has answered. Time goes to the right:

    a   f s s s s s s - - . f s s s ...       f   it is fed: a prompt, or an observation
    b   f s s s s - - - - . f s s s ...       s   its next token is sampled
    c   f s s s - - - - - - - - - - . ...     -   in flight: its environment has the reply
    d   f s s s s - - |                       .   ready: not fed until others are, too
    e                       f s s s ...       |   its episode is over: e takes its slot

The noise belongs to the trajectory (support/noise.py), so both play the same trajectories.

Reading order: `collect`, `_Scheduler`. Where it is worth it: `collect` of run/groups.py.

Tests: `python -m pytest tests/test_rows.py`.
"""

import torch
from torch.nn.functional import pad

from minragen import rollout
from minragen.fast import sampling
from minragen.support.noise import reply_noise


@torch.inference_mode()
def collect(policy, frame, groups, first_seed, rules, progress=lambda tokens: None):
    """The same as `rollout.collect`, sooner where rows would wait for each other. `groups` have
    `send` and `receive`, as in run/groups.py."""
    trajectories = [rollout.first_prompt(frame, groups, row, observation, rules)
                    for row, observation in enumerate(groups.reset(first_seed))]
    begun = [t for t in trajectories if not t.error]
    _Scheduler(policy, frame, groups, begun, rules, progress).play()
    return trajectories


class _Scheduler:
    """Rows that are ready, sampling, stopped or in flight. Slot i is that of `sampling[i]`."""

    def __init__(self, policy, frame, groups, trajectories, rules, progress):
        self.policy, self.frame, self.groups, self.rules = policy, frame, groups, rules
        self.progress = progress
        # How many tokens of a row are sampled at once: several on a GPU (sampling.py).
        self.ahead = sampling.AHEAD if policy.sample_replies else 1
        rows = [rollout.Conversation(t) for t in trajectories]
        self.ready, self.queue = rows[:rules.max_rows], rows[rules.max_rows:]
        self.sampling, self.in_flight = [], {}  # in_flight: env_index -> Conversation
        # What the rows of `sampling` sample from, (n, V), and their noise, (tokens to come, n).
        self.slots, self.logits, self.noise = None, None, None

    def play(self):
        """Play until no conversation is left."""
        sample = self._sample_token if self.ahead == 1 else self._sample_ahead
        while self.ready:
            self._feed()
            # With all episodes over no row is left: it is time to feed (0 of 0), and play ends.
            while not self._time_to_feed():
                if self.sampling:
                    sample()
                    self._take_results(wait=False)
                else:
                    self._take_results(wait=True)

    def _time_to_feed(self):
        """Whether `feed_share` of the rows are ready; below 1, one is enough while none samples."""
        rows = len(self.sampling) + len(self.in_flight) + len(self.ready)
        alone = not self.sampling and self.rules.feed_share < 1
        return len(self.ready) >= min(rows, 1 if alone else max(1, self.rules.feed_share * rows))

    def _feed(self):
        """Feed the ready rows, which then sample. Slots are copied to a new order: rows in the
        middle of a reply, rows that go on, rows that begin, rows in flight."""
        self.ready.sort(key=lambda row: row.slot)  # and not by when their environments returned
        n, budget = len(self.sampling), self.rules.token_budget
        go_on = [row for row in self.ready if row.cached]
        begin = [row for row in self.ready if not row.cached]
        away = [row for row in self.in_flight.values() if row.cached]
        fresh = [row.trajectory.tokens[row.cached:] for row in go_on]
        if not (n or go_on or away):
            self.slots = None  # frees them before others are made
        self._begin_replies(go_on + begin)
        prefilled, index, logits = None, [], [self.logits] if n else []
        if begin:
            prefilled, index, first_logits = rollout.prefill(
                self.policy, [row.trajectory.tokens for row in begin], budget)
        longest = max(len(row.trajectory.tokens) for row in self.sampling + away)
        # Also padding, which `extend` writes, and tokens behind a reply's stop must fit.
        padded = max((row.cached for row in go_on), default=0) + max(map(len, fresh), default=0)
        self.slots = self.policy.regather(
            [(self.slots, [*range(n), *(row.slot for row in go_on)]), (prefilled, index),
             (self.slots, [row.slot for row in away])],
            max(longest + self.rules.max_new_tokens + self.ahead - 1, padded))
        if go_on:
            logits.append(self.policy.extend_in_chunks(self.slots, fresh, budget, n))
        if begin:
            logits.append(first_logits)
        self.logits = torch.cat(logits)
        for slot, row in enumerate(away, len(self.sampling)):
            row.slot = slot

    def _begin_replies(self, rows):
        """Begin an empty reply in each row. They sample from now on."""
        for row in rows:
            row.begin_reply()
        noise = reply_noise(self.rules, self.groups.split, [row.trajectory for row in rows],
                            self.frame.appends).to(self.policy.device, non_blocking=True)
        if self.sampling:
            earlier = pad(self.noise, (0, 0, 0, len(noise) - len(self.noise)))
            noise = torch.cat([earlier, noise], dim=1)
        self.noise, self.sampling, self.ready = noise, self.sampling + rows, []

    def _sample_token(self):
        """Sample the next token of the rows that sample, and feed it to those that go on. A row
        that stops changes places with a later one, as in `rollout.sample_replies`."""
        tokens, logprobs = rollout.sample_tokens(self.logits, self.noise[0], self.rules)
        self.noise = self.noise[1:]
        self.progress(len(tokens))
        sampled = torch.stack([tokens.float(), logprobs]).tolist()
        for row, token, logprob in zip(self.sampling, *sampled):
            row.add(int(token), logprob, self.frame, self.rules)
        tokens = tokens[self._send_stopped()]
        if self.sampling:
            self.logits = self.policy.extend(self.slots, tokens[:, None], torch.ones_like(tokens))

    def _sample_ahead(self):
        """Sample the next few tokens of the rows that sample, and feed them to those that go on."""
        block, self.noise = self.noise[:self.ahead], self.noise[self.ahead:]
        logits = sampling.sample_block(self.policy, self.frame, self.slots, self.logits, block,
                                       self.sampling, self.rules, self.progress)
        self.logits = logits[self._send_stopped()]

    def _send_stopped(self):
        """Give the environments the replies that have stopped. Their slots follow those of the rows
        that go on. Returns the old places of the rows that go on, as an index."""
        if not any(row.stop for row in self.sampling):
            return slice(None)
        order, live = sampling.stopped_behind(self.slots, self.sampling)
        rows = [self.sampling[i] for i in order]
        self.sampling, self.noise, stopped = rows[:len(live)], self.noise[:, live], rows[len(live):]
        for slot, row in enumerate(stopped, len(self.sampling)):
            row.slot = slot
        rollout.end_replies(self.frame, stopped)
        self.in_flight |= {row.trajectory.env_index: row for row in stopped}
        self.groups.send([row.trajectory.env_index for row in stopped],
                         [row.reply for row in stopped])
        return live

    def _take_results(self, wait):
        """End the turn of each row whose environment has returned."""
        for number, outcome in self.groups.receive(wait).items():
            row = self.in_flight.pop(number)
            if rollout.end_turn(self.frame, self.groups, row, outcome, self.rules):
                self.ready.append(row)
            else:
                self.ready += self.queue[:1]  # takes its place
                del self.queue[:1]
