"""A game whose answer is hidden: what decides the split, and a solver that does not peek.

    python -m minragen environments examples.secret:Secret 1

Tests: `python -m pytest tests/test_env_contract.py --env examples.secret:Secret`.
"""

from minragen.envs import Budget, Outcome, TextEnv


class Secret(TextEnv):
    """Find a secret word. After each guess the agent sees how many letters are in their place."""

    instruction = "Find the secret word of four letters."
    budget = Budget(max_turns=6, max_actions=6)
    words = ("bark", "bird", "boat", "book", "card", "cart", "coat", "cook", "dark", "door",
             "hand", "harp", "lamp", "land", "lark", "moon", "park", "road", "roof", "wolf")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        if self.budget.max_actions < 5:  # what solve() needs for the hardest word
            raise ValueError(f"Secret needs 5 guesses: got {self.budget}.")

    def _reset(self, rng):
        self.word = str(rng.choice(self.words))
        self.episode = int(rng.integers(2**31))  # drawn only to decide the split
        self.left, self.hint = self.words, "No guess yet."

    def instance(self):
        return str(self.episode)  # not self.word: training would never ask for some

    def _act(self, guess):
        if guess not in self.words:
            return None
        self.hint = f"Letters in their place: {self._hits(guess, self.word)}"
        self.left = self._left_after(guess, self.left)
        won = guess == self.word
        return Outcome(float(won), terminated=won, success=won)

    def render(self):
        return self.hint

    def note(self):
        return f"possible {' '.join(self.left)}"

    def random_answer(self, rng):
        return str(rng.choice(self.words))

    def solve(self):  # the guesses of a player who does not know the word
        plan, left = [], self.left
        while self.word not in plan:
            plan.append(left[0])
            left = self._left_after(left[0], left)
        return plan[:self.actions_left]

    def _left_after(self, guess, left):
        hits = self._hits(guess, self.word)
        return [word for word in left if word != guess and self._hits(guess, word) == hits]

    @staticmethod
    def _hits(guess, word):
        return sum(a == b for a, b in zip(guess, word))
