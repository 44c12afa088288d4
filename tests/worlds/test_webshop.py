"""What the shop sells, finds and pays, and what its pages do: the specification of webshop."""

import gc
import json
import random
import re
import subprocess
import sys
import zlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minragen.envs import FORMAT_PENALTY, SPLITS, Budget, make, transcript
from minragen.tasks import WebShop
from minragen.tools import (
    MAX_RESULTS,
    NO_CAP,
    SHELVES,
    Goal,
    Product,
    Shop,
    alike,
    generate_products,
    load_products,
    normal,
    shop,
)

NAME = "webshop"
CATALOGUE = 3918771781  # CRC of the generated catalogue, on every machine


def episode(env, seed, player):
    """(observations, rewards, infos) of an episode that `player`, env -> answer, plays."""
    observations, rewards, infos, over = [env.reset(seed=seed)[0]], [], [], False
    while not over:
        observation, reward, terminated, truncated, info = env.step(player(env))
        observations.append(observation)
        rewards.append(reward)
        infos.append(info)
        over = terminated or truncated
    return observations, rewards, infos


def solver(env):
    return env.solve()[0]


def wanderer(seed, solving=0.0):
    rng = np.random.default_rng(seed)
    return lambda env: solver(env) if rng.random() < solving else env.random_answer(rng)


def state(env):
    """All that an action may change."""
    return env.page, env.found, env.at, env.item, dict(env.chosen), env.sold


def put(env, saved):
    env.page, env.found, env.at, env.item, env.chosen, env.sold = saved


def shown(observation):
    """Everything in brackets that an observation shows, but for the words to be searched."""
    labels = [label.strip() for label in re.findall(r"\[([^]]*)\]", observation)]
    return [label for label in labels if label != "words"]


def at_item(**options):
    """An environment on the page of an item with two options."""
    env = make(NAME, **options)
    for seed in range(100):
        env.reset(seed=seed)
        if len(env.goal.options) == 2:
            break
    plan = env.solve()
    for answer in plan[:-3]:
        env.step(answer)
    assert env.page == "item"
    return env


class TestCatalogue:
    def test_there_are_a_thousand_products_in_a_dozen_categories(self):
        products = generate_products()
        assert len(products) == len({p.id for p in products}) == 1000
        assert {p.category[0] for p in products} == set(SHELVES) and len(SHELVES) == 12
        assert all(re.fullmatch(f"{p.query} [a-u]", p.id) for p in products)

    def test_it_is_the_same_on_every_machine(self):
        assert zlib.crc32(repr(generate_products()).encode()) == CATALOGUE

    def test_it_is_the_same_in_a_process_with_another_hash_seed(self):
        code = ("import zlib; from minragen.tools import generate_products as g; "
                "print(zlib.crc32(repr(g()).encode()))")
        for hash_seed in "12":
            out = subprocess.run([sys.executable, "-c", code], text=True, check=True,
                                 capture_output=True, timeout=60,
                                 env={"PYTHONPATH": ":".join(sys.path),
                                      "PYTHONHASHSEED": hash_seed})
            assert int(out.stdout) == CATALOGUE

    def test_every_product_has_a_price_attributes_and_at_most_two_options(self):
        for p in generate_products():
            assert p.price >= 5 and len(p.attributes) == 3
            assert len(p.options) <= 2 and all(len(v) == 3 for v in p.options.values())

    def test_its_words_are_few_and_none_stands_inside_another_attribute(self):
        """The model in the box learns every word; and `in` is how an attribute is looked for."""
        words = set(re.findall("[a-z]+", repr([tuple(p) for p in generate_products()])))
        assert len(words) < 250
        for _, attributes, _, _ in SHELVES.values():
            for a in attributes:
                assert [w for w in words if a in w] == [a]

    def test_products_of_one_title_share_their_options_and_differ_in_price(self):
        lines = {}
        for p in generate_products():
            lines.setdefault(p.title, []).append(p)
        assert all(len({repr(p.options) for p in line}) == 1 for line in lines.values())
        assert sum(len({p.price for p in line}) > 1 for line in lines.values()) > 200


class TestSearch:
    def test_a_title_finds_its_product_among_at_most_fifty(self):
        for i, p in enumerate(shop().products):
            found = shop().search(p.title)
            assert i in found and len(found) == len(set(found)) <= MAX_RESULTS

    def test_words_of_no_product_find_nothing(self):
        assert shop().search("xyzzy") == ()

    def test_what_is_remembered_of_searches_is_bounded(self):
        """The queries are the model's: it can make up as many as it likes."""
        assert shop().search.cache_info().maxsize is not None


SHIRT = Product("s1", "Soft Cotton Shirt for Men", "shirts", ("clothing", "tops"), 30.0,
                ("soft", "machine washable"), {"color": ("red", "dark blue")},
                "Comes in a linen bag.", ("long sleeve",), ("soft", "machine washable"))
JACKET = SHIRT._replace(id="s2", title="Rain Jacket", query="jackets",
                        category=("clothing", "coats"))
POLO = SHIRT._replace(id="s3", title="Polo Shirt", query="polos", category=("clothing", "golf"))
TOP = SHIRT._replace(id="s4", title="Striped Top", query="tops")


def ask(attributes=(), options=(), cap=50.0, product=SHIRT):
    return Goal("", "", product, tuple(attributes), tuple(options), cap)


class TestScore:
    # wanted attributes, options, cap; bought, chosen -> the score as one works it out by hand
    @pytest.mark.parametrize("attributes, options, cap, bought, chosen, score", [
        # Everything: 1 * (2 + 1 + 1) / 4.
        (("soft", "machine washable"), ("red",), 50, SHIRT, ("red",), Fraction(1)),
        # No option chosen: 1 * (2 + 0 + 1) / 4. Another chosen: the same.
        (("soft", "machine washable"), ("red",), 50, SHIRT, (), Fraction(3, 4)),
        (("soft", "machine washable"), ("red",), 50, SHIRT, ("green",), Fraction(3, 4)),
        # One attribute of two: 1 * (1 + 1 + 1) / 4; too dear as well: 1 * (1 + 1 + 0) / 4.
        (("soft", "wool"), ("red",), 50, SHIRT, ("red",), Fraction(3, 4)),
        (("soft", "wool"), ("red",), 29, SHIRT, ("red",), Fraction(1, 2)),
        # The cap itself is not too much: 1 * (0 + 0 + 1) / 1.
        ((), (), 30, SHIRT, (), Fraction(1)),
        # An attribute that only a feature or only the description says: 1 * (2 + 1) / 3.
        (("long sleeve", "linen"), (), 50, SHIRT, (), Fraction(1)),
        # Words in another order are alike: 1 * (1 + 1) / 2.
        (("washable machine",), (), 50, SHIRT, (), Fraction(1)),
        # A polo shirt: of the nouns cotton, shirt, men one is there, 1/3 > 0.2: 1 * (1 + 1) / 2.
        (("soft",), (), 50, POLO, (), Fraction(1)),
        # A jacket has none of the nouns: 0, whatever else is right.
        (("soft",), ("red",), 50, JACKET, ("red",), Fraction(0)),
        # So has the top, and the same shelf does not save it: the last rule wins.
        (("soft",), (), 50, TOP, (), Fraction(0)),
    ])
    def test_it_is_the_hand_worked_one(self, attributes, options, cap, bought, chosen, score):
        goal = ask(attributes, [("color", v) for v in options], cap)
        assert Fraction(Shop([]).score(goal, bought, chosen)["score"]).limit_denominator(
            99) == score

    @pytest.mark.parametrize("title, query, category, r_type", [
        ("Lamp Desk Metal", "lamps", ("home", "light"), 1.0),  # everything the same
        ("Lamp", "chairs", ("garden",), 1.0),  # 1 noun of 3 > 0.2
        ("Zinc", "lamps", ("home", "light"), 0.0),  # no noun at all: whatever the rest says
    ])
    def test_the_kind_is_judged_by_query_shelf_and_title(self, title, query, category, r_type):
        lamp = SHIRT._replace(title="Metal Desk Lamp", query="lamps", category=("home", "light"))
        bought = lamp._replace(title=title, query=query, category=category)
        assert Shop([]).score(ask(product=lamp), bought, ())["r_type"] == r_type

    @pytest.mark.parametrize("nouns, related, r_type", [
        (4, False, 1.0), (3, False, 1.0), (2, False, 0.5), (2, True, 1.0), (1, True, 0.1),
        (1, False, 0.1), (0, True, 0.0)])
    def test_between_all_and_nothing_the_kind_is_worth_a_half_or_a_tenth(self, nouns, related,
                                                                         r_type):
        """Of eleven nouns: 3/11 > 0.2 > 2/11 > 0.1 > 1/11."""
        words = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kite"]
        wanted = SHIRT._replace(title=" ".join(words))
        bought = SHIRT._replace(title=" ".join([*words[:nouns], "zebra"]))
        bought = bought if related else bought._replace(query="x", category=("clothing", "y"))
        assert Shop([]).score(ask(product=wanted), bought, ())["r_type"] == r_type

    def test_two_shared_levels_of_the_shelf_relate_products_and_one_does_not(self):
        words = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu"]
        wanted = SHIRT._replace(title=" ".join(words), category=("a", "b", "c"))
        for category, r_type in ((("a", "b"), 1.0), (("a", "x"), 0.5)):
            bought = wanted._replace(title="ant", query="x", category=category)
            assert Shop([]).score(ask(product=wanted), bought, ())["r_type"] == r_type

    def test_attributes_and_function_words_are_not_what_a_title_is_about(self):
        """`soft` and `for` are all that the two have in common."""
        pillow = SHIRT._replace(title="Soft Pillow for Two", query="pillows")
        assert Shop([]).score(ask(product=pillow), SHIRT._replace(title="Soft Rug for One"),
                              ())["r_type"] == 0

    def test_colours_are_compared_in_one_form_on_both_sides(self):
        """RAGEN normalises what was chosen but not what was wanted: goals that nobody can reach."""
        for value in ("r.brown2060", "dark red", "navy/white", "6'7\" black"):
            goal = ask(options=[("color", value)])
            assert Shop([]).score(goal, SHIRT, (value,))["r_option"] == 1

    def test_a_colour_is_a_word_and_not_a_part_of_one(self):
        """By substrings `standard queen` and `standard king` were both `tan`."""
        assert normal("standard queen") == "standard queen" and normal("R.Brown2060") == "brown"
        assert not alike(normal("standard queen"), normal("standard king"))

    def test_likeness_is_of_sets_of_words(self):
        assert alike("machine wash", "wash machine") and alike("red", "dark red")
        assert alike("stainless steel", "stainles steel") and not alike("steel", "glass")
        assert alike("♥", "♥") and not alike("♥", "♦") and not alike("", "red")

    @settings(max_examples=200, deadline=None)
    @given(st.integers(0, 2**32), st.integers(0, 999), st.integers(1, 3))
    def test_in_the_generated_shop_it_is_what_sets_say(self, seed, bought, attributes):
        """No word there is like another by accident, so the slow twin needs no likeness."""
        rng = np.random.default_rng(seed)
        mine = shop().products[bought]
        near = [p for p in shop().products if p.query == mine.query or p.id[-1] == mine.id[-1]]
        goal = shop().goal(near[rng.integers(len(near))], rng, attributes)
        chosen = {n: v[rng.integers(len(v))] for n, v in mine.options.items() if rng.random() < .8}
        same = goal.product.query == mine.query
        hits = (len(set(goal.attributes) & set(mine.attributes)) + (mine.price <= goal.cap)
                + len({v for _, v in goal.options} & set(chosen.values())))
        parts = shop().score(goal, mine, tuple(chosen.values()))
        assert parts["score"] == same * hits / (len(goal.attributes) + len(goal.options) + 1)
        assert all(0 <= part <= 1 for part in parts.values())


class TestGoals:
    def test_the_cap_is_the_larger_of_two_of_the_next_four_tens(self):
        """Of 40, 50, 60, 70 above 30: never the first; 50, 60, 70 as 1 : 2 : 3."""
        rng = np.random.default_rng(0)
        caps = [shop().goal(SHIRT._replace(instruction=""), rng).cap for _ in range(3000)]
        share = {cap: caps.count(cap) / 3000 for cap in set(caps)}
        assert set(share) == {50, 60, 70}
        assert all(abs(share[cap] - k / 6) < 0.04 for cap, k in ((50, 1), (60, 2), (70, 3)))

    def test_what_is_dearer_than_all_tens_has_no_cap(self):
        goal = shop().goal(SHIRT._replace(price=985.0, instruction="a shirt"),
                           np.random.default_rng(0))
        assert goal.cap == NO_CAP and "price" not in goal.text

    @pytest.mark.parametrize("attributes", (1, 2, 3))
    def test_a_goal_names_its_attributes_one_value_of_each_option_and_the_cap(self, attributes):
        env = make(NAME, attributes=attributes)
        for seed in range(50):
            env.reset(seed=seed)
            goal = env.goal
            assert len(goal.attributes) == attributes
            assert [n for n, _ in goal.options] == list(goal.product.options)
            assert all(v in goal.product.options[n] for n, v in goal.options)
            assert all(word in goal.text for word in
                       (*goal.attributes, *(v for _, v in goal.options), f"{goal.cap:g} dollars"))

    def test_nothing_is_asked_for_in_two_splits_whatever_the_price_cap(self):
        asked = {}
        for split in SPLITS:
            env = make(NAME, split)
            for seed in range(400):
                env.reset(seed=seed)
                goal = env.goal
                wish = goal.product.query, frozenset(goal.attributes), frozenset(goal.options)
                assert asked.setdefault(wish, split) == split
        assert len(asked) > 400

    def test_view_and_pay_do_not_change_the_task(self):
        envs = [make(NAME), make(NAME, page_size=10, reward="binary")]
        for seed in range(30):
            for env in envs:
                env.reset(seed=seed)
            assert envs[0].instance() == envs[1].instance()


class TestPages:
    def test_every_click_that_is_shown_works_and_every_other_is_refused(self):
        """On every page of wandering episodes, against all targets ever seen."""
        env, known = make(NAME), {"next >", "< prev", "buy now", "back to search", "red", "shirt a"}
        for seed in range(15):
            env.reset(seed=seed)
            player, over = wanderer(seed, solving=0.3), False
            while not over:
                here, before = shown(env.render()), state(env)
                known |= set(here)
                assert len(here) == len(set(here)) and set(here) == set(env._clicks())
                for label in sorted(known):
                    outcome = env._act(f"click[{label}]")
                    assert (outcome is not None) == (label in here), (label, env.render())
                    if outcome is None:
                        assert state(env) == before
                    put(env, before)
                _, _, terminated, truncated, _ = env.step(player(env))
                over = terminated or truncated

    def test_search_works_on_the_search_page_only(self):
        """RAGEN's engine searches from any page, also when the action was called invalid."""
        env, pages = make(NAME), set()
        for seed in range(40):
            env.reset(seed=seed)
            player, over = wanderer(seed), False
            while not over:
                before = state(env)
                done = env._act("search[soft shirt]") is not None
                assert done == (env.page == "results" and before[0] == "search")
                pages.add(before[0])
                put(env, before)
                _, _, terminated, truncated, _ = env.step(player(env))
                over = terminated or truncated
        assert pages == {"search", "results", "item", "description", "features"}

    @pytest.mark.parametrize("answer", [
        "search[]", "search[ ]", "search[a][b]", "search [a]", "search[a] ", "I search[a]", "a",
        "search[a", "search a", "search[a\nb]", "ſearch[a]", "click[search]", "click[]",
        "search[" + "a" * 201 + "]", "search[a] || search[b]", "search[  ]", "search [ a ]",
        "search[ a ] ", "click[ ]", "click[ search ]", "search[ " + "a" * 201 + " ]"])
    def test_anything_but_exactly_an_action_is_refused(self, answer):
        env = make(NAME)
        env.reset(seed=0)
        before = state(env)
        assert env._act(answer) is None and state(env) == before

    def test_blanks_beside_a_target_do_not_matter_and_every_word_shown_has_one_before_it(self):
        """`click[camera k]` is `click[ camera k ]`; and a word is one token, wherever it stands."""
        env, pages = make(NAME), set()
        for seed in range(30):
            env.reset(seed=seed)
            player, over = wanderer(seed, solving=0.5), False
            while not over:
                answer, before, after = player(env), state(env), []
                verb, target = re.fullmatch(r"(\w+)\[ (\S.*\S) \]", answer).groups()
                for said in (answer, f"{verb}[{target}]"):
                    after.append((env._act(said), state(env), env.render()))
                    put(env, before)
                assert after[0] == after[1] and after[0][0] is not None
                # In a reply a note stands behind a blank; what opens a line is none of these.
                page, note = env.render(), f" {env.note()}"
                words = set(re.findall(r"\w+", f"{env.goal.text} {env.note()} {target}"))
                for text in (page, note, answer, after[0][2]):
                    assert not re.search(r"\[[^ ]|[^ ]\]", text)
                    assert all(text[m.start() - 1] == " " for m in re.finditer(r"\w+", text)
                               if m[0] in words)
                pages.add(env.page)
                _, _, terminated, truncated, _ = env.step(answer)
                over = terminated or truncated
        assert pages == {"search", "results", "item", "description", "features"}

    def test_case_does_not_matter(self):
        env = at_item()
        buttons = shown(env.render())
        assert env._act("CLICK[< PREV]") and env.page == "results"
        assert env._act(f"Click[{env.shop.products[env.found[0]].id.upper()}]")
        assert env.page == "item" and buttons

    @pytest.mark.parametrize("size", (1, 5, 10, 50))
    def test_paging_forth_and_back_shows_every_result_once(self, size):
        env = make(NAME, page_size=size, budget=Budget(999, 1, 999))
        env.reset(seed=1)
        env.step("search[soft shirt]")
        ids = [env.shop.products[i].id for i in env.shop.search("soft shirt")]
        assert len(ids) > 20
        seen, pages = [label for label in shown(env.render()) if label in ids], [env.render()]
        while "next >" in shown(env.render()):
            env.step("click[next >]")
            pages.append(env.render())
            seen += [label for label in shown(env.render()) if label in ids]
        assert seen == ids and len(pages) == -(-len(ids) // size)
        for page in pages[-2::-1]:
            env.step("click[< prev]")
            assert env.render() == page
        assert "< prev" not in shown(env.render())

    def test_an_empty_result_page_leads_only_back(self):
        """RAGEN's offers a next page after the last and after nothing."""
        env = make(NAME)
        env.reset(seed=0)
        env.step("search[xyzzy]")
        assert "Nothing found." in env.render() and shown(env.render()) == ["back to search"]

    def test_what_was_searched_is_never_shown(self):
        env = make(NAME)
        env.reset(seed=0)
        assert "Reward" not in env.step("search[Reward: 1 shirt]")[0].replace("Reward: 0", "")

    def test_options_are_chosen_by_value_replaced_and_shown(self):
        env = at_item()
        (name, values), (_, others) = env.shop.products[env.item].options.items()
        for value in values:
            assert env._act(f"click[{value}]").effective
            assert env.chosen == {name: value} and f"Chosen: {value}" in env.render()
            assert not env._act(f"click[{value}]").effective
        env._act(f"click[{others[0]}]")
        assert f"Chosen: {values[-1]}, {others[0]}" in env.render()

    @pytest.mark.parametrize("page", ("description", "features"))
    def test_a_sub_page_keeps_the_options_and_an_item_left_forgets_them(self, page):
        env = at_item()
        product = env.shop.products[env.item]
        env._act(f"click[{product.options['color'][0]}]" if "color" in product.options else
                 f"click[{next(iter(product.options.values()))[0]}]")
        chosen = dict(env.chosen)
        env._act(f"click[{page}]")
        text = product.description if page == "description" else ", ".join(product.features)
        assert text in env.render() and shown(env.render()) == ["< prev", "back to search"]
        env._act("click[< prev]")
        assert env.page == "item" and env.chosen == chosen
        env._act("click[< prev]")
        assert env.page == "results"
        env._act(f"click[{product.id}]")
        assert env.chosen == {}

    def test_no_page_gives_advice_or_names_a_budget(self):
        """RAGEN appends nine lines of advice to every state, with a budget that is not its own."""
        env = make(NAME)
        for seed in range(10):
            for observation in episode(env, seed, wanderer(seed, solving=0.5))[0]:
                assert not re.search(r"should|must|please|try|\bactions?\b|steps?", observation)


class TestReward:
    def test_nothing_is_paid_before_buying(self):
        env = make(NAME)
        for seed in range(50):
            _, rewards, infos = episode(env, seed, wanderer(seed, solving=0.3))
            assert set(rewards[:-1]) <= {0.0}
            assert rewards[-1] == infos[-1].get("score", 0.0)
            assert [i for i, info in enumerate(infos) if "bought" in info] in (
                [], [len(infos) - 1])

    def test_the_parts_of_the_score_are_reported_on_buying(self):
        env = at_item()
        *_, info = env.step("click[buy now]")
        assert (info["r_type"], info["r_att"], info["r_option"], info["r_price"],
                info["bought"]) == (1, 1, 0, 1, 1)
        assert info["score"] == 3 / 5 and info["success"] == 0

    def test_a_graded_score_is_paid_and_a_binary_one_is_all_or_nothing(self):
        for reward, paid in (("score", 3 / 5), ("binary", 0.0)):
            env = at_item(reward=reward)
            assert env.step("click[buy now]")[1] == paid
            assert episode(env, 0, solver)[1][-1] == 1.0

    def test_reading_paging_and_searching_for_ever_earn_nothing(self):
        env = make(NAME, budget=Budget(400, 1, 400))
        env.reset(seed=0)
        loop = ["search[soft]", "click[next >]", "click[< prev]", "click[back to search]"]
        assert sum(env.step(loop[i % 4])[1] for i in range(400)) == 0

    def test_an_unavailable_click_costs_the_format_penalty(self):
        env = make(NAME)
        env.reset(seed=0)
        assert env.step("click[buy now]")[1] == FORMAT_PENALTY


def shortest(env, limit):
    """Fewest actions to a purchase of score 1 from here, by trying all of them; None beyond
    `limit`. Searches are for the goal's words or title only."""
    searches = [f"search[{env.goal.words}]", f"search[{env.goal.product.title}]"]
    frontier, seen = [state(env)], set()
    for depth in range(1, limit + 1):
        following = []
        for here in frontier:
            put(env, here)
            for action in (searches if env.page == "search" else
                           [f"click[{c}]" for c in env._clicks()]):
                put(env, here)
                if env._act(action).success:
                    return depth
                key = repr(state(env))
                if not env.sold and key not in seen:
                    seen.add(key)
                    following.append(state(env))
        frontier = following
    return None


class TestSolver:
    @pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"attributes": 3}])
    def test_no_way_is_shorter_than_its_plan_from_wherever_one_has_got_to(self, options):
        env, compared = make(NAME, **options), 0
        for seed in range(12):
            env.reset(seed=seed)
            player = wanderer(seed, solving=0.3)
            for _ in range(seed % 4):
                if env._live:
                    env.step(player(env))
            plan, left, here = env.solve(), env.actions_left, state(env)
            if env._live and plan[-1] == "click[ buy now ]" and len(plan) <= 5:
                best = shortest(env, len(plan))
                put(env, here)
                assert best == len(plan) or (best is None and len(plan) == left)
                compared += best is not None
        assert compared >= 4

    @pytest.mark.parametrize("options", [{"page_size": 1}, {"page_size": 10}, {"attributes": 1},
                                         {"attributes": 3}, {"reward": "binary"}])
    def test_it_succeeds_with_every_option(self, options):
        env = make(NAME, "val", **options)
        for seed in range(60):
            assert episode(env, seed, solver)[1][-1] == 1.0

    @pytest.mark.parametrize("turns", (3, 4, 5, 15))
    def test_goals_fit_into_the_budget_if_anything_does(self, turns):
        env = make(NAME, budget=Budget(turns, 1, turns))
        assert all(episode(env, seed, solver)[2][-1]["success"] for seed in range(40))

    def test_too_late_for_everything_it_buys_what_it_stands_before(self):
        env = at_item(budget=Budget(6, 1, 6))
        for _ in range(3):
            env.step("nothing")
        assert env.solve() == ["click[ buy now ]"]
        assert env.step(env.solve()[0])[1] == 3 / 5

    def test_it_always_has_an_answer(self):
        for turns in (1, 2, 3):
            env = make(NAME, budget=Budget(turns, 1, turns))
            for seed in range(20):
                env.reset(seed=seed)
                player, over = wanderer(seed), False
                while not over:
                    assert 1 <= len(env.solve()) <= env.turns_left
                    _, _, terminated, truncated, _ = env.step(player(env))
                    over = terminated or truncated


class TestPlayers:
    def test_what_the_random_policy_does_is_always_an_action(self):
        env = make(NAME)
        for seed in range(50):
            assert all(i["valid"] for i in episode(env, seed, wanderer(seed))[2])

    def test_the_habit_is_an_action_everywhere_and_seldom_good_enough(self):
        env = make(NAME, "val")
        won = 0
        for seed in range(100):
            *_, infos = episode(env, seed, lambda env: env.habit)
            assert all(info["valid"] for info in infos) and infos[-1]["bought"]
            won += infos[-1]["success"]
        assert won < 20
        env = at_item()
        env._act("click[features]")
        assert env.habit == "click[ < prev ]"

    @pytest.mark.parametrize("own", (False, True))
    def test_the_note_names_what_the_solver_clicks_next(self, own, data):
        """On every page of its own way; also over files of WebShop's form, whose titles name no
        attributes."""
        things = ("lamp", "kettle", "chair", "rug", "clock", "vase", "shelf", "stool")
        rows = [row(i, name=f"{thing.title()} Model{i}", query=f"home {thing}s",
                    product_category=thing) for i, thing in enumerate(things)]
        orders = {r["asin"]: order(instruction=f"Find me a {thing} that is easy to clean.")
                  for r, thing in zip(rows, things)}
        files = data(rows, orders) if own else {}
        env, agreed, all_of_them = make(NAME, "train" if own else "val", **files), 0, 0
        for seed in range(30 if own else 100):
            env.reset(seed=seed)
            over = False
            while not over:
                answer = solver(env)
                target = re.fullmatch(r"\w+\[ (.*) \]", answer)[1]
                note = env.note()
                result = env.page == "results" and target != "next >"
                agreed += ((f"{target} looks right" if result else target) in note
                           or target == "next >" and "none looks" in note)
                all_of_them += 1
                _, _, terminated, truncated, _ = env.step(answer)
                over = terminated or truncated
        assert agreed > 0.98 * all_of_them

    def test_the_note_says_nothing_that_is_not_on_the_page(self):
        env, plain = make(NAME), {"want", "none", "looks", "right", "wrong", "choose", "buy", "now",
                                  "read", "too", "dear"}
        for seed in range(30):
            env.reset(seed=seed)
            player, over = wanderer(seed, solving=0.4), False
            while not over:
                words = re.findall(r"\w+", env.note())
                assert set(words) - plain <= set(re.findall(r"\w+", env.render()))
                assert len(words) <= 4 + 4 * env.options["page_size"]
                _, _, terminated, truncated, _ = env.step(player(env))
                over = terminated or truncated

    def test_64_seeds_say_every_word_of_the_catalogue(self):
        env = make(NAME)
        said = set(re.findall(r"\w+", " ".join(t for s in range(64) for t in env.texts(s))))
        for p in env.shop.products:
            values = {v for values in p.options.values() for v in values}
            assert {*p.title.split(), *p.id.split()} | set(p.options) | values <= said


class TestSessions:
    def test_two_interleaved_sessions_do_not_influence_each_other(self):
        def both(seed):
            return episode(make(NAME), seed, wanderer(seed, solving=0.5))

        alone = both(1), both(2)
        envs = [make(NAME), make(NAME)]
        players = [wanderer(1, solving=0.5), wanderer(2, solving=0.5)]
        seen, live = [], [0, 1]
        for k, env in enumerate(envs):
            seen.append(([env.reset(seed=k + 1)[0]], [], []))
        while live:
            for k in list(live):
                observation, reward, terminated, truncated, info = envs[k].step(
                    players[k](envs[k]))
                for log, entry in zip(seen[k], (observation, reward, info)):
                    log.append(entry)
                if terminated or truncated:
                    live.remove(k)
        assert tuple(seen) == alone

    def test_nothing_grows_with_resets(self):
        """RAGEN's server keeps every session for ever."""
        env = make(NAME)

        def objects():
            for seed in range(60):
                episode(env, seed, solver)
            gc.collect()
            return len(gc.get_objects())

        objects()
        assert objects() - objects() in range(-20, 20)


def row(i, **changes):
    """A product as WebShop's items_shuffle has it."""
    return {"asin": f"B0{i:08d}", "name": f"Acme Model{i} Desk Lamp, Dimmable",
            "category": "garden", "query": "desk lamps",
            "product_category": "Home & Kitchen › Lighting › Desk Lamps",
            "full_description": "A lamp that swivels.", "small_description": ["usb port", "1 year"],
            "pricing": "$19.99", "images": [], "customization_options": {
                "Color": [{"value": "r.brown2060", "image": None}, {"value": "Black/White"}],
                "Size": [{"value": "12 inch"}, {"value": "18 inch"}]}} | changes


def order(**changes):
    """An entry of items_ins_v2."""
    return {"attributes": ["usb port", "easy clean"], "instruction_attributes": ["easy clean"],
            "instruction": "Find me a desk lamp that is easy to clean."} | changes


@pytest.fixture
def data(tmp_path):
    """A function rows, orders -> the options that load them."""
    def write(rows, orders):
        paths = {}
        for name, content in (("products", rows), ("instructions", orders)):
            path = tmp_path / f"{name}{random.Random(repr(content)).random()}.json"
            path.write_text(json.dumps(content))
            paths[name] = str(path)
        return paths
    return write


def lamps(count, **changes):
    rows = [row(i, **changes) for i in range(count)]
    return rows, {r["asin"]: order(attributes=[f"feature{i}", "easy clean"],
                                   instruction_attributes=[f"feature{i}"])
                  for i, r in enumerate(rows)}


class TestWebShopsFiles:
    def test_a_record_becomes_a_product(self, data):
        (lamp,), skipped = load_products(*data([row(7)], {row(7)["asin"]: order()}).values())
        assert skipped == 0 and lamp == Product(
            "b000000007", "Acme Model7 Desk Lamp, Dimmable", "desk lamps",
            ("Home & Kitchen", "Lighting", "Desk Lamps"), 19.99, ("usb port", "easy clean"),
            {"color": ("r.brown2060", "black | white"), "size": ("12 inch", "18 inch")},
            "A lamp that swivels.", ("usb port", "1 year"), ("easy clean",),
            "Find me a desk lamp that is easy to clean.")

    def test_the_goal_reads_as_webshops(self, data):
        env = make(NAME, **data(*lamps(30)))
        env.reset(seed=0)
        (_, color), (_, size) = env.goal.options
        assert env.goal.text == (f"Find me a desk lamp that is easy to clean with color: {color}, "
                                 f"and size: {size}, and price at most {env.goal.cap:g} dollars")

    @pytest.mark.parametrize("text, price", [
        ("$19.99", 19.99), ("$10.00 - $20.00", 15.0), ("$10.00$30.00", 20.0), ("$1,299.00", 1299.0),
        ("", 100.0), (None, 100.0), ("free", 100.0), (["$5"], 100.0), ("$", 100.0)])
    def test_a_price_is_the_middle_of_its_range_and_100_if_there_is_none(self, data, text, price):
        """RAGEN draws it from the global stream at load time: other goals in every process."""
        options = data([row(1, pricing=text)], {row(1)["asin"]: order()})
        assert [load_products(*options.values())[0][0].price for _ in "12"] == [price, price]

    def test_every_goal_can_be_reached(self, data):
        """Among them RAGEN's unreachable kind, and fewer than its 1,500 that its modulus needs."""
        for split in SPLITS:
            env = make(NAME, split, **data(*lamps(40)))
            for seed in range(20):
                assert episode(env, seed, solver)[2][-1]["success"]

    def test_odd_records_are_playable_and_stay_in_the_observation_space(self, data):
        rows, orders = lamps(40)
        odd = [
            dict(name="Лампа ☃ für Büro\u202e\x07\n2", full_description="é" * 9999),
            dict(customization_options=None), dict(customization_options=""),
            dict(customization_options={"Color": None, "Size": [], "": [{"value": "x"}, {}, 3]}),
            dict(customization_options={"a": [{"value": "buy now"}, {"value": "red [new]"}],
                                        "b": [{"value": "buy now"}, {"value": "< prev"}]}),
            dict(small_description=None, full_description=None, product_category=None),
            dict(small_description="one line", query=None, pricing=None),
            dict(name="\ud800 lamp"), dict(customization_options=[1, 2]),
            dict(customization_options={"style": [{"value": "\ud83c\udf81 gift"}, {"value": 5}]}),
            dict(name="xy z " * 1000, pricing="$99999999999999999999"),
        ]
        rows = [r | odd[i % len(odd)] for i, r in enumerate(rows)]
        ids = set()
        for split in SPLITS:
            env = make(NAME, split, **data(rows, orders))
            for seed in range(40):
                for player in (solver, wanderer(seed, solving=0.4)):
                    observations, rewards, infos = episode(env, seed, player)
                    assert all(o in env.observation_space for o in observations)
                    assert all(i["valid"] for i in infos)
                    assert player is not solver or rewards[-1] == 1.0
                env.reset(seed=seed)
                assert env.note() and env.instance()
                ids.add(env.goal.product.id)
        assert {int(asin[1:]) % len(odd) for asin in ids} == set(range(len(odd)))

    def test_values_of_one_name_can_each_be_clicked(self, data):
        options = {"a": [{"value": "buy now"}, {"value": "x"}], "b": [{"value": "x"}]}
        env = make(NAME, **data(*lamps(20, customization_options=options)))
        env.reset(seed=0)
        for answer in env.solve()[:2]:
            env.step(answer)
        for label, chosen in (("x", ("a", "x")), ("b: x", ("b", "x")), ("a: buy now",
                                                                       ("a", "buy now"))):
            assert label in shown(env.render()) and env._act(f"click[{label}]")
            assert chosen in env.chosen.items()
        assert env._act("click[buy now]").terminated

    def test_bad_records_are_skipped_counted_and_warned_of(self, data):
        rows, orders = lamps(20)
        bad = [None, 3, [], {}, row(1), {"asin": "nan lamp", "name": "x"}, row(90, name=""),
               row(91, asin=None), row(92, customization_options={
                   "c": [{"value": f"{i} {'x' * 50}"} for i in range(999)]})]
        with pytest.warns(UserWarning, match="9 of 29 products"):
            products, skipped = load_products(*data(rows + bad, orders).values())
        assert (len(products), skipped) == (20, 9)

    def test_nobody_asks_for_what_has_no_instruction_or_what_its_product_has_not(self, data):
        rows, orders = lamps(20)
        spoilt = [{}, None, order(instruction=""), order(instruction_attributes=[]),
                  order(instruction_attributes=["bluetooth"])]
        for i, entry in enumerate(spoilt):
            orders[rows[i]["asin"]] = entry
        env = make(NAME, **data(rows, orders))
        assert len(env.shop.products) == 20 and len(env._wanted) == 15

    @pytest.mark.parametrize("products, instructions, told", [
        ("{}", "{}", "holds a dict, expected a list of products"),
        ("[]", "[]", "holds a list, expected an object"),
        ("[", "{}", "cannot read"),
        ("[]", "{}", "no goal in"),
    ])
    def test_files_that_are_something_else_are_refused_with_a_sentence(
            self, tmp_path, products, instructions, told):
        for name, text in (("p.json", products), ("i.json", instructions)):
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=told):
            make(NAME, products=str(tmp_path / "p.json"), instructions=str(tmp_path / "i.json"))

    def test_a_missing_file_and_half_of_the_two_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"cannot read .*none\.json"):
            make(NAME, products=str(tmp_path / "none.json"), instructions="x")
        with pytest.raises(ValueError, match="needs both of WebShop's files"):
            make(NAME, products=str(tmp_path / "none.json"))

    def test_two_catalogues_live_in_one_process(self, data):
        """RAGEN loads the first and silently gives it to whoever asks for another."""
        mine = make(NAME, **data(*lamps(20)))
        other = make(NAME, **data(*lamps(30)))
        counts = [len(env.shop.products) for env in (mine, other, make(NAME))]
        assert counts == [20, 30, 1000]
        assert make(NAME).shop is make(NAME).shop  # and each is loaded once


class TestOptions:
    @pytest.mark.parametrize("options, told", [
        ({"reward": "raw"}, "got 'raw', expected score or binary"),
        ({"page_size": 0}, "page_size of 1 to 50"), ({"page_size": 51}, "page_size of 1 to 50"),
        ({"attributes": 4}, "attributes of 1 to 3"), ({"attributes": 0}, "attributes of 1 to 3")])
    def test_bad_ones_are_refused_with_a_sentence(self, options, told):
        with pytest.raises(ValueError, match=told):
            make(NAME, **options)

    def test_the_transcript_of_the_docstring_is_what_happens(self):
        block = WebShop.__doc__.split("The solver at seed 3")[1].split("\n\n", 1)[1]
        lines = [line[8:] for line in block.rstrip().split("\n")]
        assert transcript(NAME, 3).endswith("\n".join(lines)) and len(lines) > 20
