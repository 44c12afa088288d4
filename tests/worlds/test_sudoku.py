"""What Sudoku is about; what all environments share stands in the contract's tests."""

import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen.envs import FORMAT_PENALTY, Budget
from minragen.games import Sudoku, sudoku_geometry, sudoku_grid, sudoku_solvable

LONG = Budget(40, 2, 80)
SEEDS = st.integers(0, 2**32 - 1)


def fresh(seed=0, split="train", budget=None, **options):
    env = Sudoku(split, budget, **options)
    env.reset(seed=seed)
    return env


def peers(cell, n):
    """The cells that may not share a number with `cell`, straight from the rules."""
    b, (r, c) = round(n**0.5), divmod(cell, n)
    return [i * n + j for i in range(n) for j in range(n) if (i, j) != (r, c)
            and (i == r or j == c or (i // b, j // b) == (r // b, c // b))]


def legal(board, cell, number, n):
    return all(board[p] != number for p in peers(cell, n))


def completions(board, n, enough=2):
    """How many full grids extend `board`, counting to `enough`: cell after cell, every number."""
    if 0 not in board:
        return 1
    cell, found = board.index(0), 0
    for number in range(1, n + 1):
        if found < enough and legal(board, cell, number, n):
            found += completions(board[:cell] + [number] + board[cell + 1:], n, enough - found)
    return found


def proper(grid, n):
    return set(grid) == set(range(1, n + 1)) and all(
        legal(grid, c, number, n) for c, number in enumerate(grid))


def name(cell, n=4):
    return f"({cell // n + 1}, {cell % n + 1})"


def put(env, cell, number):
    return env.step(f"{number} at {name(cell, env.n)}")


def blanks(env):
    return [c for c, number in enumerate(env.board) if not number]


def legal_but_wrong(env):
    return [(c, v) for c in blanks(env) for v in range(1, env.n + 1)
            if v != env.solution[c] and legal(env.board, c, v, env.n)]


def with_a_mistake(**options):
    """A fresh puzzle in which some cell admits a number that is not its own: (env, cell, number)"""
    for seed in range(100):
        env = fresh(seed, budget=LONG, **options)
        if found := legal_but_wrong(env):
            return env, *found[0]
    raise AssertionError("no puzzle leaves any choice")


def mess(env, rng, actions):
    """Any numbers in any cells that the rules let in, wrong ones more often than not."""
    for _ in range(actions):
        cell = int(rng.choice([c for c, clue in enumerate(env.clues) if not clue]))
        wrong = [v for v in range(1, env.n + 1) if v != env.solution[cell]]
        env._act(f"{rng.choice(wrong)} at {name(cell, env.n)}")


class TestPuzzles:
    @pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
    def test_every_puzzle_has_exactly_one_solution(self, difficulty):
        """Only 77, 43 and 8 % of RAGEN's have."""
        for split in ("train", "val", "test"):
            for seed in range(60):
                env = fresh(seed, split, difficulty=difficulty)
                assert completions(env.board, 4) == 1
                assert proper(env.solution, 4)

    def test_so_has_one_of_9x9(self):
        for difficulty in ("easy", "medium", "hard"):
            assert completions(fresh(1, size=9, difficulty=difficulty).board, 9) == 1

    @pytest.mark.parametrize("size", [4, 9, 16])
    @pytest.mark.parametrize("difficulty", ["easy", "medium"])
    def test_easy_and_medium_ones_are_solved_by_elimination_alone(self, size, difficulty):
        """Which proves that they have one solution, also where counting would take for ever."""
        env = fresh(2, size=size, difficulty=difficulty)
        fits = {c: {v for v in range(1, size + 1) if legal(env.board, c, v, size)}
                for c in blanks(env)}
        board = list(env.board)
        while fits:
            only = {c: v for c, choice in fits.items() for v in choice if len(choice) == 1}
            if difficulty == "medium":
                for c, choice in fits.items():
                    for unit in sudoku_geometry(size)[0][c]:
                        elsewhere = set().union(*(fits.get(d, ()) for d in unit if d != c))
                        placed = {board[d] for d in unit}
                        for v in choice - elsewhere - placed:
                            only[c] = v
            assert only, "elimination is stuck"
            cell, number = only.popitem()
            board[cell] = number
            del fits[cell]
            for p in peers(cell, size):
                if p in fits:
                    fits[p].discard(number)
        assert board == env.solution

    @pytest.mark.parametrize("size,counts", [(4, (6, 8, 9)), (9, (32, 40, 48)),
                                             (16, (102, 128, 153))])
    def test_the_blanks_are_four_five_or_six_tenths_of_the_cells(self, size, counts):
        got = tuple(len(blanks(fresh(size=size, difficulty=d)))
                    for d in ("easy", "medium", "hard"))
        assert got == counts

    def test_all_288_grids_of_4x4_are_drawn(self):
        grids = {tuple(sudoku_grid(4, np.random.default_rng(seed))) for seed in range(6000)}
        assert len(grids) == 288
        assert all(proper(list(grid), 4) for grid in grids)

    @given(seed=SEEDS, size=st.sampled_from([4, 9, 16]))
    @settings(max_examples=30, deadline=None)
    def test_a_full_grid_keeps_all_rules(self, seed, size):
        assert proper(sudoku_grid(size, np.random.default_rng(seed)), size)

    def test_9x9_grids_are_not_only_shuffles_of_the_regular_one(self):
        """In that one the three columns of a stack hold the same triples of numbers, as do rows."""
        def irregular(grid):
            triples = [{frozenset(grid[r * 9 + c] for r in range(k, k + 3)) for k in (0, 3, 6)}
                       for c in range(9)]
            return any(triples[c] != triples[c // 3 * 3] for c in range(9))

        assert sum(irregular(sudoku_grid(9, np.random.default_rng(s))) for s in range(20)) >= 15

    @given(seed=SEEDS, holes=st.integers(1, 14), damage=st.booleans())
    @settings(max_examples=150, deadline=None)
    def test_the_search_agrees_with_counting(self, seed, holes, damage):
        rng = np.random.default_rng(seed)
        board = sudoku_grid(4, rng)
        empty = rng.permutation(16)[:holes]
        for c in empty:
            board[c] = 0
        if damage:
            fitting = [v for v in range(1, 5) if legal(board, empty[0], v, 4)]
            board[empty[0]] = int(rng.choice(fitting))
        assert sudoku_solvable(board, 4, 10**6) == (completions(board, 4, 1) == 1)

    def test_a_search_that_runs_out_of_patience_says_perhaps(self):
        impossible = [1, 2, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0]
        assert completions(impossible, 4) == 0
        assert not sudoku_solvable(impossible, 4)
        assert sudoku_solvable(impossible, 4, patience=1)

    def test_the_instance_is_the_clues_whatever_the_view(self):
        plain = fresh(5)
        for options in ({"view": "simple"}, {"view": "with_feedback"}, {"hints": False},
                        {"allow_conflicts": True}):
            assert fresh(5, **options).instance() == plain.instance()
        before = plain.instance()
        put(plain, blanks(plain)[0], plain.solution[blanks(plain)[0]])
        assert plain.instance() == before


class TestBudget:
    def test_the_own_budget_covers_the_blanks_with_slack(self):
        """RAGEN gives 10 actions for 32 blanks, so success there is impossible."""
        assert Sudoku().budget == Budget(5, 2, 10)
        for size in (4, 9, 16):
            for difficulty in ("easy", "medium", "hard"):
                env = Sudoku(size=size, difficulty=difficulty)
                assert env.blanks < env.budget.max_actions <= 2 * env.blanks

    @pytest.mark.parametrize("size", [4, 9])
    @pytest.mark.parametrize("budget", [Budget(1, 1, 1), Budget(2, 1, 1), Budget(2, 2, 3),
                                        Budget(3, 5, 15)], ids=str)
    def test_a_small_budget_leaves_fewer_blanks_so_that_it_can_be_solved(self, size, budget):
        env = fresh(budget=budget, size=size)
        assert len(blanks(env)) == min(env.blanks, budget.max_actions)
        for answer in env.solve():
            *_, info = env.step(answer)
        assert info["success"]

    def test_9x9_is_solved_within_its_own_budget(self):
        env = fresh(3, size=9, view="with_feedback")
        for answer in env.solve():
            *_, terminated, truncated, info = env.step(answer)
        assert (terminated, truncated, info["success"]) == (True, False, 1.0)


SPELLINGS = ("({r}, {c}) {n}", "{n} at ({r}, {c})", "{n} at ({r},{c})", "place {n} at ({r}, {c})",
             "place {n} at ({r},{c})", "place {n} at row {r} col {c}", "place {n} at {r},{c}",
             "{n} at {r},{c}", "{n} at {r}, {c}", "({r},{c},{n})", "({r}, {c}, {n})", "{r},{c},{n}",
             "PLACE {n} AT ROW {r} COL {c}", "  place  {n}  at ( {r} , {c} )  ")


class TestSpellings:
    @pytest.mark.parametrize("spelling", SPELLINGS)
    def test_every_spelling_of_the_reference_is_understood(self, spelling):
        for seed in range(10):
            env = fresh(seed)
            cell = blanks(env)[-1]
            r, c, n = cell // 4 + 1, cell % 4 + 1, env.solution[cell]
            _, reward, *_, info = env.step(spelling.format(n=n, r=r, c=c))
            assert (reward, info["valid"], env.board[cell]) == (1.0, 1.0, n)

    @pytest.mark.parametrize("text", [
        "5 at (1, 2)", "0 at (1, 2)", "1 at (0, 2)", "1 at (1, 5)", "1 at (5, 1)", "-1 at (1, 2)",
        "1.0 at (1, 2)", "1 at (1, 2", "1 at 1 2", "1 at (1, 2, 3)", "I say 1 at (1, 2)",
        "1 at (1, 2).", "1 at (1, 2) 2 at (1, 3)", "1 at row 1", "what is 1, 2, 3", "1 2 3",
        "(1, 2, 3", "1, 2, 3, 4", "at (1, 2)", "place at (1, 2)", "place1at(1,2)", "١ at (١, ٢)",
        "1 at (01234567890, 2)", "1 at (1, 2)" + " " * 99 + "!", "clear (0, 1)", "clear (1, 2, 3)",
        "clear", "1,2,0", "1 AT (1, 2) at (1, 2)", "place 1 at row 1 column two",
        "satisfy 1, 2, 3"])
    def test_anything_else_is_no_action_and_changes_nothing(self, text):
        """RAGEN takes the first match inside the text, and reads any "at" as a change of order."""
        env = fresh()
        before = list(env.board)
        _, reward, *_, info = env.step(text)
        assert (reward, info["valid"], env.board) == (FORMAT_PENALTY, 0.0, before)

    def test_two_digits_are_understood_where_the_grid_has_them(self):
        env = fresh(size=16)
        cell = next(c for c in blanks(env) if env.solution[c] > 9)
        assert put(env, cell, env.solution[cell])[1] == 1.0

    def test_own_spelling_of_a_move_is_read_back_as_that_move(self):
        env = fresh(size=9)
        for cell in range(81):
            for number in range(10):
                assert env._parse(env._spell(cell, number)) == (cell, number)


class TestRewards:
    def test_the_right_number_pays_one_and_the_last_one_ten_more(self):
        env = fresh(1)
        todo = blanks(env)
        rewards = [put(fresh(1), c, env.solution[c])[1] for c in todo]
        assert rewards == [1.0] * 6
        env = fresh(1, budget=LONG)
        for c in todo:
            _, reward, terminated, _, info = put(env, c, env.solution[c])
        assert (reward, terminated, info["success"], info["correct"]) == (11.0, True, 1.0, 1.0)

    def test_a_cell_pays_once_however_often_it_is_toggled(self):
        """In RAGEN six changes of one cell between two candidates earn 4.5."""
        env, cell, wrong = with_a_mistake()
        right = env.solution[cell]
        earned = [put(env, cell, number)[1] for number in (right, wrong, right, wrong, right)]
        assert earned == [1.0, 0.0, 0.0, 0.0, 0.0]
        env.step(f"clear {name(cell)}")
        assert put(env, cell, right)[1] == 0.0

    def test_a_number_that_fits_but_is_wrong_stays_pays_nothing_and_can_be_corrected(self):
        env, cell, wrong = with_a_mistake()
        _, reward, *_, info = put(env, cell, wrong)
        assert (reward, info["valid"], info["effective"]) == (0.0, 1.0, 1.0)
        assert env.board[cell] == wrong
        assert put(env, cell, env.solution[cell])[1] == 1.0

    def test_a_full_board_with_a_mistake_is_not_the_end(self):
        env, cell, wrong = with_a_mistake(allow_conflicts=True)
        put(env, cell, wrong)
        for c in blanks(env):
            terminated = put(env, c, env.solution[c])[2]
        assert 0 not in env.board and not terminated
        assert put(env, cell, env.solution[cell])[1:3] == (11.0, True)

    def test_a_clue_cannot_be_changed_or_cleared(self):
        env = fresh(view="with_feedback")
        cell = next(c for c, clue in enumerate(env.clues) if clue)
        for action in (f"{env.clues[cell]} at {name(cell)}", f"clear {name(cell)}"):
            before = list(env.board)
            observation, reward, *_, info = env.step(action)
            assert (reward, info["valid"], info["effective"]) == (-0.1, 1.0, 0.0)
            assert env.board == before and f"Refused {'clear ' * (action[0] == 'c')}" in observation
            assert ": it is a clue" in observation

    @given(seed=SEEDS, answers=st.integers(1, 12))
    @settings(max_examples=60, deadline=None)
    def test_no_play_earns_more_than_the_blanks_and_the_bonus(self, seed, answers):
        env, rng, total, over = fresh(seed % 50, budget=LONG), np.random.default_rng(seed), 0, False
        while not over:
            answer = env.random_answer(rng) if rng.random() < 0.9 else env.solve()[0]
            _, reward, terminated, truncated, _ = env.step(answer)
            total, over = total + reward, terminated or truncated
        assert total <= env.blanks + 10 * (env.board == env.solution) + 1e-9


class TestConflicts:
    def breaking(self, env):
        return next((c, v) for c in blanks(env) for v in range(1, 5) if not legal(env.board, c, v,
                                                                                  4))

    def test_a_number_against_the_rules_is_refused_with_the_reason(self):
        for seed in range(20):
            env = fresh(seed, view="with_feedback")
            (cell, number), before = self.breaking(env), list(env.board)
            observation, reward, *_, info = put(env, cell, number)
            assert (reward, info["effective"], env.board) == (-0.1, 0.0, before)
            why = re.search(rf"Refused \({cell // 4 + 1}, {cell % 4 + 1}, {number}\): against "
                            r"(.*)", observation)[1]
            r, c, b = cell // 4, cell % 4, (cell // 8, cell % 4 // 2)
            units = {f"row {r + 1}": [k for k in range(16) if k // 4 == r],
                     f"column {c + 1}": [k for k in range(16) if k % 4 == c],
                     f"box ({b[0] + 1}, {b[1] + 1})":
                         [k for k in range(16) if (k // 8, k % 4 // 2) == b]}
            assert why == ", ".join(u for u, cells in units.items()
                                    if number in [env.board[k] for k in cells])

    def test_what_was_refused_is_told_in_the_next_observation_only(self):
        env = fresh(budget=LONG)
        assert "Refused" in put(env, *self.breaking(env))[0]
        assert "Refused" not in env.step("nothing")[0]

    def test_if_allowed_it_stays_is_shown_and_costs_the_same(self):
        """RAGEN draws conflicts but never has any, because it refuses them."""
        for view in Sudoku.VIEWS:
            env = fresh(allow_conflicts=True, view=view)
            cell, number = self.breaking(env)
            observation, reward, *_ = put(env, cell, number)
            assert (reward, env.board[cell]) == (-0.1, number)
            told = re.search(r"Conflicts: (.*)", observation)[1]
            clash = [c for c, v in enumerate(env.board) if v and not legal(env.board, c, v, 4)]
            assert told == " ".join(map(name, clash)) and name(cell) in told
            assert (f"*{number}*" in observation) == (view in ("detailed", "with_feedback"))

    def test_without_them_nothing_is_shown(self):
        assert "Conflicts" not in fresh(allow_conflicts=True).render()


class TestSolver:
    @pytest.mark.parametrize("allow_conflicts", [False, True])
    def test_it_finds_the_way_after_mistakes(self, allow_conflicts):
        rng = np.random.default_rng(0)
        for seed in range(60):
            env = fresh(seed, budget=LONG, difficulty="hard", allow_conflicts=allow_conflicts)
            mess(env, rng, 12)
            wrong = sum(v not in (0, s) for v, s in zip(env.board, env.solution))
            plan = env.solve()
            if allow_conflicts:  # then nothing ever stands in the way
                assert len(" || ".join(plan).split(" || ")) == wrong + len(blanks(env))
            for answer in plan:
                *_, info = env.step(answer)
                assert info["effective"] == info["valid"] == 1.0
            assert info["success"]

    def test_it_clears_as_few_numbers_as_any_plan(self):
        """Two numbers in each other's cells can only be swapped over an empty one."""
        def orderable(env, cleared, wrong):
            board = [0 if c in cleared else v for c, v in enumerate(env.board)]
            todo = set(wrong)
            while free := [c for c in todo if legal(board, c, env.solution[c], 4)]:
                board[free[0]] = env.solution[free[0]]
                todo.remove(free[0])
            return not todo

        rng, circles = np.random.default_rng(1), 0
        for seed in range(250):
            env = fresh(seed, budget=LONG, difficulty="hard")
            mess(env, rng, 14)
            wrong = [c for c, v in enumerate(env.board) if v not in (0, env.solution[c])]
            fewest = next(k for k in range(len(wrong) + 1)
                          for cleared in combinations(wrong, k) if orderable(env, cleared, wrong))
            assert " ".join(env.solve()).count("clear") == fewest
            circles += fewest > 0
        assert circles > 10

    def test_without_enough_turns_it_still_has_an_answer(self):
        env = fresh(budget=Budget(6, 1, 6))
        for _ in range(5):
            env.step("nothing")
        assert len(env.solve()) == 1 and env.step(env.solve()[0])[1] == 1.0

    def test_the_note_names_the_numbers_of_this_turns_solution(self):
        rng = np.random.default_rng(2)
        for seed in range(50):
            env = fresh(seed, budget=LONG)
            for _ in range(5):
                said = re.findall(r"\((\d), (\d), (\d)\)", env.note())
                assert " || ".join(f"({', '.join(move)})" for move in said) == env.solve()[0]
                assert all(env.solution[(int(r) - 1) * 4 + int(c) - 1] == int(v)
                           for r, c, v in said)
                if legal_but_wrong(env):
                    break
                env.step(env.random_answer(rng))

    def test_on_a_correct_board_of_the_default_the_note_copies_the_last_hints(self):
        for seed in range(100):
            env = fresh(seed)
            hints = env.render().split("Fits: ")[1].split("; ")
            first, second = env.note().replace(", (", "|(").split("|")
            assert hints[-1] == first and second in hints


class TestViews:
    def board(self, view, **options):
        env = fresh(view=view, **options)
        env.solution = [1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]
        env.clues = (1, 0, 3, 4, 0, 4, 0, 2, 2, 0, 0, 3, 4, 3, 2, 1)
        env.board = list(env.clues)
        return env

    def test_compact_is_the_bare_rows_and_the_hints(self):
        assert self.board("compact").render().splitlines() == [
            "1 . 3 4", ". 4 . 2", "2 . . 3", "4 3 2 1",
            "Fits: (3, 3, 4); (3, 2, 1); (2, 3, 1); (2, 1, 3); (1, 2, 2)"]

    def test_simple_has_lines_between_the_boxes(self):
        assert self.board("simple", hints=False).render().splitlines() == [
            "1 . | 3 4", ". 4 | . 2", "---------", "2 . | . 3", "4 3 | 2 1"]

    def test_detailed_tells_clues_from_own_and_conflicting_numbers(self):
        env = self.board("detailed", hints=False, allow_conflicts=True)
        put(env, 1, 2)
        put(env, 4, 1)
        assert env.render().splitlines() == [
            "[1] 2 | [3][4]", "*1*[4]|  . [2]", "--------------", "[2] . |  . [3]",
            "[4][3]| [2][1]", "[5] clue, 5 placed, *5* conflicting, . empty",
            "Conflicts: (1, 1) (2, 1)"]

    def test_with_feedback_tells_how_every_action_went_and_how_full_the_grid_is(self):
        env = self.board("with_feedback")
        said = env.step("2 at (1, 2) || 3 at (1, 1)")[0]
        assert "(1, 2, 2): correct" in said and "Refused (1, 1, 3): it is a clue" in said
        assert "Filled: 12/16 (11 clues, 1 placed)" in said
        assert "fits" not in said and "clear (1, 2): done" in env.step("clear (1, 2)")[0]

    def test_hints_are_the_numbers_that_fit_least_choice_last_and_at_most_ten_cells(self):
        for size, seed in ((4, 1), (9, 1), (16, 1)):
            env = fresh(seed, size=size, difficulty="medium")
            shown = env.render().split("Fits: ")[1].split("; ")
            assert len(shown) == min(10, len(blanks(env)))
            choices = []
            for text in shown:
                # "(1, 2) 3 4", or "(1, 2, 3)", which is a move.
                r, c, fitting = re.fullmatch(r"\((\d+), (\d+)\)? *,? ([\d ]+)\)?", text).groups()
                assert (env._parse(text) is not None) == (len(fitting.split()) == 1)
                cell = (int(r) - 1) * size + int(c) - 1
                choices.append([int(v) for v in fitting.split()])
                assert choices[-1] == [v for v in range(1, size + 1)
                                       if legal(env.board, cell, v, size)]
            assert [len(c) for c in choices] == sorted((len(c) for c in choices), reverse=True)
        assert "Fits" not in fresh(hints=False).render() + fresh(hints=False).instruction

    def test_a_cell_that_nothing_fits_says_so(self):
        env = self.board("compact", allow_conflicts=True)
        put(env, 9, 2)
        assert "(2, 1, 3)" in env.render()
        put(env, 6, 3)  # row 2 has its 3 now, so nothing is left for its first cell
        assert "(2, 1) none" in env.render()

    def test_every_view_of_every_size_stays_in_the_observation_space(self):
        for size in (4, 9):
            for view in Sudoku.VIEWS:
                rng = np.random.default_rng(0)
                env = fresh(size=size, view=view, allow_conflicts=True)
                for _ in range(4):
                    assert env.step(env.random_answer(rng))[0] in env.observation_space


class TestOptions:
    @pytest.mark.parametrize("option,value,known", [
        ("size", 5, "4, 9, 16"), ("difficulty", "evil", "easy, medium, hard"),
        ("view", "grid", "compact, simple, detailed, with_feedback")])
    def test_a_bad_one_is_refused_with_the_known_ones(self, option, value, known):
        with pytest.raises(ValueError, match=f"option {option} of Sudoku: got {value!r}, expected "
                                             f"one of {known}"):
            Sudoku(**{option: value})
