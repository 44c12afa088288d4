"""WebShop: what the shop sells, finds and pays, what its pages do, and how it is played."""

import json
import re
import zlib

import numpy as np
import pytest

from minragen.environments import webshop
from minragen.environments.webshop import Goal, Product, draw_goal, shop
from minragen.envs import Budget, make

NAME = "webshop"
SHIRT = Product("s1", "Soft Cotton Shirt for 2", "shirts", ("clothing", "tops"), 30.0,
                ("soft", "machine washable"), {"color": ("red", "dark blue")},
                "Comes in a linen bag.", ("long sleeve", "warm"), ("soft", "machine washable"))


def solved(env, seed):
    """The reward of the last turn of the solver."""
    env.reset(seed=seed)
    while env._live:
        reward = env.step(env.solve()[0])[1]
    return reward


def walk(env, seeds):
    """Play episodes half at random and half by the solver. Yield each answer before giving it."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        env.reset(seed=seed)
        while env._live:
            answer = env.solve()[0] if rng.random() < 0.5 else env.random_answer(rng)
            yield answer
            env.step(answer)


def after(actions, seed=3, **options):
    """An environment after some actions, none of which pays or costs anything."""
    env = make(NAME, budget=Budget(15, 1, 15), **options)
    env.reset(seed=seed)
    for action in re.findall(r"\w+\[.*?\]", actions):
        assert env.step(action)[1] == 0, action
    return env


def shown(env):
    """The labels in brackets on the current page, but for the words to be searched."""
    return [label for label in re.findall(r"\[ ([^]]*) \]", env.render()) if label != "words"]


class TestShop:
    def test_its_catalogue_is_the_same_on_every_machine(self):
        assert zlib.crc32(repr(webshop.generate_products()).encode()) == 3918771781

    def test_a_title_finds_its_product_among_at_most_fifty(self):
        found = [shop().search(p.title) for p in shop().products]
        assert all(product in results for product, results in zip(shop().products, found))
        assert max(map(len, found)) == 50
        nothing = after("search[xyzzy]").render()
        assert nothing.endswith("120 dollars\nNothing found.\n[ back to search ]")

    def test_a_price_cap_is_the_larger_of_two_of_the_next_four_tens(self):
        """Of 40, 50, 60, 70 above 30: never the first; 50, 60, 70 as 1 : 2 : 3."""
        rng = np.random.default_rng(0)
        caps = [draw_goal(SHIRT, rng).cap for _ in range(1500)]
        for cap, share in ((40, 0), (50, 1 / 6), (60, 2 / 6), (70, 3 / 6)):
            assert abs(caps.count(cap) / 1500 - share) < 0.04, cap
        shirt = SHIRT._replace(instruction="A shirt.", options={"color": ["red"]})
        for change, text in (  # 990 is the last ten
                ({"price": 975}, "A shirt with color: red, and price at most 990 dollars"),
                ({"price": 985, "options": {}}, "A shirt")):
            assert draw_goal(shirt._replace(**change), rng).text == text

    def test_a_goal_names_attributes_the_kind_a_value_of_each_option_and_the_cap(self):
        for count, words in ((1, "natural cream"), (3, "natural soothing creamy cream")):
            goal = after("", seed=0, attributes=count).goal
            assert goal[:2] == (f"{words}, lemon, medium, at most 100 dollars", words)

    def test_a_split_is_by_what_is_asked_for_in_any_order_and_whatever_the_cap(self):
        env = after("", seed=0)
        goal, instance = env.goal, env.instance()
        for other in ({"cap": 5.0}, {"attributes": "x"}, {"options": "x"}, {"product": SHIRT}):
            env.goal = goal._replace(**other)
            assert env.instance() != instance
        goal = goal._replace(attributes=goal.attributes[::-1], options=goal.options[::-1])
        for cap in range(10, 300, 10):
            env.goal = goal._replace(cap=cap)
            assert env.instance_split() == "train"


def score(bought=SHIRT, chosen=(), wanted=SHIRT, attributes=(), colors=(), cap=50):
    goal = Goal("", "", wanted, attributes, tuple(("color", value) for value in colors), cap)
    return goal.score(bought, chosen)


class TestScore:
    def test_it_is_the_share_of_what_was_wanted(self):
        asked_for = {"attributes": ("soft", "wool"), "colors": ["red", "pink"], "chosen": ["red"]}
        assert score(**asked_for, cap=29) == {  # attributes, options, price: 1 + 1 + 0 of 2 + 2 + 1
            "score": 2 / 5, "r_type": 1.0, "r_att": 0.5, "r_option": 0.5, "r_price": 0.0}
        assert score(**asked_for, cap=30)["score"] == 3 / 5  # the cap itself is not too much
        # An attribute may stand in title, feature or description; its words in any order.
        assert score(attributes=("cotton", "sleeve", "linen", "washable machine"))["score"] == 1
        assert set(score().values()) == {1.0}  # also the parts that are not asked for

    def test_the_kind_is_judged_by_nouns_query_and_shelf(self):
        """Attributes, stop words and numbers are no nouns, although all titles here share some."""
        names = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kite"]
        for nouns, same, query, shelf, kind in (
                (10, 3, "", "", 1), (10, 2, "", "", 0.5), (10, 1, "", "", 0.5),
                (11, 1, "", "", 0.1), (10, 2, "shirts", "", 1), (10, 1, "shirts", "", 1),
                (11, 1, "shirts", "", 0.1), (10, 2, "", "ab", 1), (10, 2, "", "ax", 0.5),
                (11, 0, "shirts", "abc", 0), (0, 0, "", "", 0.5), (0, 0, "shirts", "", 1)):
            wanted, bought = (SHIRT._replace(title=" ".join(["Soft for 2", *names[:shared], end]))
                              for shared, end in ((nouns, ""), (same, "Zebra")))
            got = score(bought._replace(query=query, category=tuple(shelf)),
                        wanted=wanted._replace(category=("a", "b", "c")))
            assert got["r_type"] == kind, (nouns, same, query, shelf)

    def test_option_values_are_alike_by_base_colour_or_by_their_sets_of_words(self):
        """RAGEN brings only what was chosen to its base colour: nobody can reach such a goal."""
        for value, other, expected in (
                ("r.brown2060", "Brown", 1), ("dark red", "red wine", 1), ("6' Black", "black", 1),
                ("standard queen", "standard king", 0),  # `tan` is no word of them
                ("machine wash", "Wash machine", 1), ("mint", "cool mint", 1), ("", "mint", 0),
                ("stainless steel", "stainles steel", 1), ("steel", "glass", 0),
                ("♥", "♥", 1), ("♥", "♦", 0)):
            for wanted, chosen in ((value, other), (other, value)):
                assert score(colors=[wanted], chosen=[chosen])["r_option"] == expected, value


class TestPages:
    def test_an_action_works_exactly_where_the_page_shows_it(self):
        env, known = make(NAME), {"shirt a", "red", "search"}
        for _ in walk(env, range(10)):
            here, before = shown(env), dict(vars(env))
            known |= set(here)
            assert len(here) == len(set(here))
            if env.page != "search":  # an impulsive customer takes and buys the first thing
                assert env.first_choice()[7:-2] == ("buy now" if env.page == "item" else here[0])
            actions = {f"click[{label}]": label in here for label in known}
            for action, allowed in (actions | {"search[shirt]": env.page == "search"}).items():
                assert (env._act(action) is not None) == allowed, action
                assert allowed or vars(env) == before
                vars(env).update(before)

    def test_anything_but_exactly_an_action_is_refused(self):
        env = after("")
        before = dict(vars(env))
        for answer in ("search[]", "search[  ]", "search[a][b]", "search [a]", "search[a] ", "a",
                       "I search[a]", "search[a", "search a", "search[a\nb]", "ſearch[a]",
                       "click[]", "search[a] || search[b]", f"search[ {'a' * 201} ]"):
            assert env._act(answer) is None and vars(env) == before, answer
        assert env._act(f"search[{'a' * 200}]")

    def test_spaces_in_brackets_and_case_do_not_matter_but_are_always_shown(self):
        env = make(NAME)
        for answer in walk(env, range(10)):
            verb, target = re.fullmatch(r"(\w+)\[ (\S.*\S) \]", answer).groups()
            before, pages, page = dict(vars(env)), set(), env.render()
            for said in (answer, f"{verb}[{target}]", f"{verb.title()}[  {target.upper()} ]"):
                assert env._act(said) is not None, said
                pages.add((env.render(), *(product.id for product in env.found)))
                vars(env).update(before)
            assert len(pages) == 1
            assert not re.search(r"\[[^ ]|[^ ]\]", page + answer)

    @pytest.mark.parametrize("size", (1, 5, 50))
    def test_paging_forth_and_back_shows_every_result_once(self, size):
        env = after("search[Soft shirt]", page_size=size)
        ids = [product.id for product in shop().search("soft shirt")]
        pages, seen = [env.render()], [label for label in shown(env) if label in ids]
        assert len(ids) > 20 and "< prev" not in shown(env)
        while "next >" in shown(env):
            assert env._act("click[next >]").effective
            pages.append(env.render())
            seen += [label for label in shown(env) if label in ids]
        assert seen == ids and len(pages) == -(-len(ids) // size)
        for page in pages[-2::-1]:
            env._act("click[< prev]")
            assert env.render() == page

    def test_options_are_replaced_kept_by_sub_pages_and_forgotten_with_the_item(self):
        env = after("search[natural soothing cream] click[cream b]", seed=0)
        for value in ("rose", "lemon", "small"):
            assert env._act(f"click[{value}]").effective, value
            assert not env._act(f"click[{value}]").effective, value
        assert "\nChosen: lemon, small\n" in env.render()
        for page, text in (("description", "this natural soothing cream belongs to beauty."),
                           ("features", "natural, soothing, creamy")):
            assert env._act(f"click[{page}]").effective
            assert env.render().endswith(f"\nItem cream b: natural soothing cream, 64 dollars. "
                                         f"{page}: {text}\n[ < prev ] [ back to search ]")
            env._act("click[< prev]")
            assert env.chosen == {"scent": "lemon", "size": "small"}
        env._act("click[< prev]")
        env._act("click[cream b]")
        assert env.chosen == {}

    def test_buying_pays_the_score_or_in_binary_nothing_below_1_and_nothing_else_pays(self):
        for reward, paid in (("score", 3 / 4), ("binary", 0)):
            env = after("search[camera] click[next >] click[next >] click[camera m]", reward=reward)
            _, got, terminated, _, info = env.step("click[buy now]")
            assert terminated and (got, info["success"], info["bought"]) == (paid, 0, 1)
            assert (info["score"], info["r_option"]) == (3 / 4, 0)
            assert solved(env, 3) == 1

    def test_bad_options_are_refused_with_a_sentence(self):
        for options in ({"reward": "raw"}, {"page_size": 51}, {"attributes": 4}):
            with pytest.raises(ValueError, match="of WebShop: .*expected"):
                make(NAME, **options)


class TestPlayers:
    def test_the_plan_of_the_solver_is_the_shortest_and_the_note_knows_titles_and_prices(self):
        camera, charger = "search[portable foldable camera]", "click[next >] click[charger n]"
        want, m = "want portable foldable camera", "click[camera m] click[blue]"
        forth, nuts = "click[next >]", "search[roasted crunchy nuts]"
        for seed, actions, plan, note in (
                (3, "", f"{camera} {m}", want),
                (3, "search[camera]", f"{forth} {forth} {m}", f"{want}: none looks right"),
                (3, f"search[camera] {forth} {forth} {forth}", "click[camera q] click[blue]",
                 f"{want}: camera q looks right"),
                (3, f"{camera} {charger}", f"click[< prev] click[< prev] {m}", "looks wrong"),
                (3, f"{camera} {charger} click[features]", f"click[back to search] {camera} {m}",
                 "read"),
                (3, f"{camera} {m}", "", "looks right: buy now"),
                (1, nuts, "click[nuts k] click[honey] click[triple]", "want roasted crunchy nuts: "
                 "nuts c too dear, nuts i too dear, nuts k looks right")):
            env = after(actions, seed)
            said = " ".join(env.solve()).replace("[ ", "[").replace(" ]", "]")
            assert said == f"{plan} click[buy now]".strip(), (seed, actions)
            assert env.note() == note, (seed, actions)

    def test_the_solver_succeeds_with_every_option_and_budget_that_holds_a_purchase(self):
        for turns, options in ((9, {"page_size": 10, "attributes": 3}), (9, {"attributes": 1}),
                               *((turns, {"page_size": 1}) for turns in (2, 3, 4, 5, 15))):
            env = make(NAME, "val", Budget(turns, 1, turns), **options)
            for seed in range(6):
                assert solved(env, seed) == (turns >= 3), (options, turns, seed)


def lamp(i, **changes):
    """A product as WebShop's items_shuffle has it."""
    return {"asin": f"B{i:02d}", "name": f"Acme Lamp{i}, Dimmable", "query": f"desk lamp{i}",
            "product_category": "Home & Kitchen › Lighting › Desk Lamps", "pricing": "$19.99",
            "full_description": "A lamp that swivels.", "small_description": ["usb port", "1 year"],
            "customization_options": {"Color": [{"value": "r.brown2060"}, {"value": "Black/White"}],
                                      "Size": [{"value": "12 in"}, {"value": "18 in"}]}} | changes


def asked(i):
    """What items_ins_v2 tells of it."""
    return {"attributes": [f"feature{i}", "easy clean"], "instruction_attributes": [f"feature{i}"],
            "instruction": f"Find me a desk lamp{i} that is easy to clean."}


PRICES = {"$19.99": 19.99, "$10.00 - $20": 15, "$10$30$90": 20, "$1,299.00": 1299, None: 100}
ODD = [
    {"name": "Лампа ☃ für Büro\u202e\x07\n2", "full_description": "é" * 9999},
    {"name": "\ud800 lamp", "small_description": "one line",
     "customization_options": {"style": [{"value": "\ud83c\udf81 gift"}, {"value": 5}]}},
    {"name": "xy z " * 1000, "pricing": "$99999999999999999999", "customization_options": [1, 2]},
    {"small_description": None, "full_description": None, "product_category": None, "query": None,
     "customization_options": {"Color": None, "Size": [], "": [{"value": "x"}, {}, 3]}},
    {"customization_options": {"a": [{"value": "buy now"}, {"value": "red [new]"}, {"value": "x"}],
                               "b": [{"value": "buy now"}, {"value": "< prev"}, {"value": "x"}]}}]
NOT_ASKED = [None, {}, asked(0) | {"instruction": ""}, asked(0) | {"instruction_attributes": []},
             asked(0) | {"instruction_attributes": ["bluetooth"]}]
BAD = [None, 3, [], {}, lamp(1), lamp(90, asin="nan lamp"), lamp(91, name=""), lamp(92, asin=None),
       lamp(93, customization_options={"c": [{"value": f"{i}{'x' * 50}"} for i in range(400)]})]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A shop of WebShop's two files, with ordinary, odd and bad records."""
    products, orders = (tmp_path_factory.mktemp("webshop") / name for name in ("p", "i"))
    changes = [{"pricing": text} for text in PRICES] + ODD
    told = [asked(i) for i in range(len(changes))] + NOT_ASKED
    records = [lamp(i, **change) for i, change in enumerate(changes + [{}] * len(NOT_ASKED))]
    products.write_text(json.dumps(records + BAD))
    orders.write_text(json.dumps({r["asin"]: entry for r, entry in zip(records, told)}))
    with pytest.warns(UserWarning, match="9 of 24 products"):
        return make(NAME, products=str(products), instructions=str(orders))


class TestWebShopsFiles:
    def test_a_record_becomes_a_product_at_the_middle_of_its_range_of_prices(self, own):
        assert own.shop.products[0] == Product(
            "b00", "Acme Lamp0, Dimmable", "desk lamp0",
            ("Home & Kitchen", "Lighting", "Desk Lamps"), 19.99, ("feature0", "easy clean"),
            {"color": ("r.brown2060", "black | white"), "size": ("12 in", "18 in")},
            "A lamp that swivels.", ("usb port", "1 year"), ("feature0",),
            "Find me a desk lamp0 that is easy to clean.")
        assert [p.price for p in own.shop.products[:len(PRICES)]] == [*PRICES.values()]

    def test_bad_records_are_skipped_and_nobody_asks_for_what_a_product_has_not(self, own):
        assert (len(own.shop.products), len(shop().products)) == (15, 1000)
        assert own._wanted == [*own.shop.products[:len(PRICES) + len(ODD)]]

    def test_every_goal_can_be_reached_and_every_page_is_an_observation(self, own):
        env = make(NAME, **own.options)
        env.instance_split = lambda: "train"
        for product in own._wanted:
            env._wanted = [product]
            env.reset(seed=0)
            env.step(env.solve()[0])
            assert f"{product.id} looks right" in env.note()
            assert solved(env, 0) == 1, product
            for _ in walk(env, range(2)):
                assert env._observe() in env.observation_space
                assert max(map(len, env.render().split("\n"))) < 1300

    def test_files_that_are_something_else_are_refused_with_a_sentence(self, tmp_path):
        paths = tmp_path / "p", tmp_path / "i"
        for content, told in ((("{}", "{}"), "holds a dict, expected a list of products"),
                              (("[", "{}"), "cannot read .*p: "), (("[]", "{}"), "no goal in")):
            for path, text in zip(paths, content):
                path.write_text(text)
            with pytest.raises(ValueError, match=told):
                webshop.load_products(*paths)
        with pytest.raises(ValueError, match="needs both of WebShop's files"):
            make(NAME, products=str(paths[0]))
