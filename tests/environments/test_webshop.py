"""WebShop: what the shop sells, finds and pays, what its pages do, and how it is played."""

import re
import zlib

import numpy as np
import pytest
from conftest import write

from minragen.environments import webshop
from minragen.environments.webshop import Goal, Product, draw_goal
from minragen.envs import Budget, make

NAME, PLAIN = "webshop", {"wording": "plain", "page_size": 5}
SHIRT = Product("s1", "Soft Cotton Shirt for 2", "shirts", 30.0,
                ("soft", "machine washable"), {"color": ("red", "dark blue")},
                "Comes in a linen bag.", ("long sleeve", "warm"), ("soft", "machine washable"))


def walk(env, seeds, solver=0.5):
    """Play episodes partly by the solver, else at random. Yield each answer before giving it."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        env.reset(seed=seed)
        while env._live:
            answer = env.solve()[0] if rng.random() < solver else env.random_answer(rng)
            yield answer
            env.step(answer)


def after(actions, seed=3, **options):
    """A plain shop after some actions, none of which pays or costs anything."""
    env = make(NAME, budget=Budget(15, 1, 15), **{**PLAIN, **options})
    env.reset(seed=seed)
    for action in re.findall(r"\w+\[.*?\]", actions):
        assert env.step(action)[1] == 0, action
    return env


def shown(env):
    """The labels in brackets on the current page, but for the words to be searched."""
    return [label for label in re.findall(r"\[ ?([^]]*?) ?\]", env.render()) if label != "words"]


class TestShop:
    def test_its_catalogue_is_the_same_on_every_machine(self):
        crcs = [zlib.crc32(repr(webshop.generate_products(plain)).encode())
                for plain in (False, True)]
        assert crcs == [1998142022, 1337806572]

    def test_a_price_cap_is_the_larger_of_two_of_the_next_four_tens(self):
        """Of 40, 50, 60, 70 above 30: never the first; 50, 60, 70 as 1 : 2 : 3."""
        rng = np.random.default_rng(0)
        caps = [draw_goal(SHIRT._replace(instruction="A"), rng).cap for _ in range(1500)]
        assert [caps.count(cap) / 1500 for cap in (40, 50, 60, 70)] == pytest.approx(
            [0, 1 / 6, 2 / 6, 3 / 6], abs=0.04)

    def test_a_goal_names_attributes_the_kind_a_value_of_each_option_and_the_cap(self):
        goal = after("", seed=0).goal
        assert goal.words == "natural soothing cream"
        assert goal.text == "pure calming cream, lemon, medium, at most 100 dollars"
        shirt = SHIRT._replace(instruction="A shirt.", options={"color": ["red"]})
        for change, text in (  # 990 is the last ten
                ({"price": 975}, "A shirt with color: red, and price at most 990 dollars"),
                ({"price": 985, "options": {}}, "A shirt")):
            assert draw_goal(shirt._replace(**change), np.random.default_rng(0)).text == text

    def test_a_split_is_by_what_is_asked_for_in_any_order_and_whatever_the_cap(self):
        env = after("", seed=0)
        goal, instance = env.goal, env.instance()
        for other in ({"attributes": "x"}, {"options": "x"}, {"product": SHIRT}):
            env.goal = goal._replace(**other)
            assert env.instance() != instance
        for cap in range(10, 300, 10):
            env.goal = goal._replace(cap=cap, attributes=goal.attributes[::-1])
            assert env.instance_split() == "train"

    def test_it_is_the_share_of_what_was_wanted(self):
        goal = Goal("", "", SHIRT, ("soft", "wool"), (("color", "red"), ("color", "pink")), 29)
        assert goal.score(SHIRT, ["red"]) == {  # attributes, options, price: 1 + 1 + 0 of 2 + 2 + 1
            "score": 2 / 5, "r_type": 1.0, "r_att": 0.5, "r_option": 0.5, "r_price": 0.0}
        goal = goal._replace(cap=30)  # the cap itself is not too much
        assert goal.score(SHIRT, ["red"])["score"] == 3 / 5
        assert goal.score(SHIRT._replace(query="boots"), ["red"])["score"] == 0
        goal = goal._replace(attributes=(), options=())
        assert {*goal.score(SHIRT, []).values()} == {1.0}  # also the parts that are not asked for


class TestPages:
    @pytest.mark.parametrize("options", ({}, PLAIN))
    def test_an_action_works_exactly_where_the_page_shows_it_however_spelt(self, options):
        env, known = make(NAME, **options), {"1", "red", "search"}
        wrong = r"\[[^ ]|[^ ]\]" if options else r"\[ | \]"  # spaces in brackets: plain only
        for answer in walk(env, range(10)):
            here, before, page = shown(env), dict(vars(env)), env.render()
            known |= set(here)
            assert len(here) == len(set(here)) and not re.search(
                wrong, env.system_prompt + page + answer)
            if env.page != "search":  # an impulsive customer takes and buys the first thing
                first = "buy now" if env.page == "item" else here[0]
                assert env.first_choice() == env._click(first)
            actions = {f"click[{label}]": label in here for label in known}
            verb, target = re.fullmatch(r"(\w+)\[ ?(\S|\S.*\S) ?\]", answer).groups()
            spellings = f"{verb}[{target}]", f"{verb.title()}[  {target.upper()} ]", answer
            nearly = (target, f"say {answer}", f"{answer}.", f"{answer}{answer}", f"{verb}[ ]",
                      f"{verb} [{target}]", f"{verb}[{target}", f"ſ{answer[1:]}")
            actions |= dict.fromkeys(spellings, True) | dict.fromkeys(nearly, False)
            actions |= {f"search[{'a' * n}]": n < 201 and env.page == "search" for n in (200, 201)}
            pages = {}
            for action, allowed in actions.items():
                assert (env._act(action) is not None) == allowed, action
                assert allowed or vars(env) == before
                pages[action] = env.render(), env.found
                vars(env).update(before)
            assert pages[spellings[0]] == pages[spellings[1]] == pages[answer]

    @pytest.mark.parametrize("size", (1, 5, 50))
    def test_paging_forth_and_back_shows_every_result_once(self, size):
        env = after("search[Soft shirt]", wording="natural", page_size=size)
        ids = [product.id for product in env.shop.search("soft shirt")]
        pages = [env.render()]
        assert len(ids) > 20 and "< prev" not in shown(env)
        while "next >" in shown(env):
            assert env._act("click[next >]").effective
            pages.append(env.render())
        assert re.findall(r" \[(b0\w+)\]", "".join(pages)) == ids
        assert len(pages) == -(-len(ids) // size)
        assert shown(after("search[Soft shirt]", page_size=3))[:4] == ["1", "2", "3", "next >"]
        for page in pages[-2::-1]:
            env._act("click[< prev]")
            assert env.render() == page

    @pytest.mark.parametrize(("options", "pages"), [
        ({"wording": "natural"}, {
            "description": "Natural Cream By Haxkel U01 - Soothing. Without artificial colors. It "
                           "helps where the skin hurts.",
            "features": "natural, soothing, creamy",
            "reviews": "5 of 5 stars. Like butter on the skin."}),
        (PLAIN, {"features": "natural, soothing, creamy"})])
    def test_options_are_replaced_kept_on_sub_pages_and_lost_with_the_item(self, options, pages):
        """An item has the sub-pages that have a text."""
        env = after("search[natural soothing cream]", seed=0, **options)
        first = shown(env)[0]
        env._act(f"click[{first}]")
        assert {*shown(env)} & {*webshop.SUB_PAGES} == {*pages}
        for value in ("rose", "lemon", "small"):
            assert env._act(f"click[{value}]").effective, value
            assert not env._act(f"click[{value}]").effective, value
        assert "\nChosen: lemon, small\n" in env.render()
        for page, text in pages.items():
            assert env._act(f"click[{page}]").effective and f"{page}: {text}" in env.render()
            env._act("click[< prev]")
            assert env.chosen == {"scent": "lemon", "size": "small"}
        env._act("click[< prev]")
        env._act(f"click[{first}]")
        assert env.chosen == {}

    def test_buying_pays_the_score(self):
        env = after("search[camera] click[next >] click[next >] click[3]")
        _, reward, terminated, _, info = env.step("click[buy now]")
        assert terminated and (reward, info["success"], info["bought"]) == (3 / 4, 0, 1)
        assert (info["score"], info["r_option"]) == (3 / 4, 0)

    def test_a_budget_without_a_purchase_is_refused_with_the_actions_that_are_needed(self):
        with pytest.raises(ValueError, match="no goal .*max_actions=2.*: a purchase takes 3 act"):
            make(NAME, budget=Budget(4, 1, 2))
        env = make(NAME, budget=Budget(3, 1, 3))
        env._within_reach = lambda: False
        with pytest.raises(ValueError, match="no goal of WebShop fits .*max_actions=3.*give more"):
            env.reset(seed=0)

    def test_the_plan_of_the_solver_is_the_shortest_from_any_page(self):
        camera, forth = "search[portable foldable camera]", "click[next >]"
        for actions, plan in (
                ("search[camera]", f"{forth} {forth} click[3] click[blue]"),
                (f"search[camera] {forth} {forth} {forth}", "click[2] click[blue]"),
                (f"{camera} {forth} click[1] click[features]",
                 f"click[back to search] {camera} click[1] click[blue]")):
            said = " ".join(after(actions).solve()).replace("[ ", "[").replace(" ]", "]")
            assert said == f"{plan} click[buy now]", actions

    def test_a_note_judges_results_by_title_and_price_and_an_item_by_all_that_is_wanted(self):
        env = after("search[natural soothing creamy cream]", seed=0)
        assert env.note() == f"want {env.goal.words}: 2 looks right"
        for item, note in ((2, "looks right: choose lemon, medium"), (1, "looks wrong")):
            env._act(f"click[{item}]")
            assert env.note() == note
            env._act("click[< prev]")
        env.goal = env.goal._replace(cap=1)
        assert env.note().endswith("5 too dear, none looks right")


def lamp(i, **changes):
    """A product as WebShop's items_shuffle has it."""
    return {"asin": f"B{i:02d}", "name": f"Acme Lamp{i}, Dimmable", "query": f"desk lamp{i}",
            "pricing": "$19.99",
            "full_description": "A lamp that swivels.", "small_description": ["usb port", "1 year"],
            "customization_options": {"Color": [{"value": "r.brown2060"}, {"value": "Black/White"}],
                                      "Size": [{"value": "12 in"}, {"value": "18 in"}]}} | changes


def asked(i):
    """What items_ins_v2 tells of it."""
    return {"attributes": [f"feature{i}", "easy clean"], "instruction_attributes": [f"feature{i}"],
            "instruction": f"Find me a desk lamp{i} that is easy to clean."}


PRICES = {"$19.99": 19.99, "$10.00 - $20": 15, "$10$30$90": 20, "$1,299.00": 1299, None: 100}
ODD = [
    {"name": "Лампа ☃ für Büro\u202e\x07\n\ud800 " + "xy z " * 1000, "pricing": "$" + "9" * 20,
     "full_description": "é" * 9999,
     "customization_options": {"style": [{"value": "\ud83c\udf81 gift"}]}},
    {"small_description": None, "full_description": None, "query": None,
     "customization_options": {"Color": None, "Size": [], "": [{"value": "x"}, {"value": ""}]}},
    {"customization_options": {"a": [{"value": "buy now"}, {"value": "red [new]"}, {"value": "x"}],
                               "b": [{"value": "buy now"}, {"value": "< prev"}, {"value": "x"}]}}]
NOT_ASKED = [{}, asked(0) | {"instruction": ""}, asked(0) | {"instruction_attributes": ["wifi"]}]
BAD = [lamp(1), lamp(90, asin="nan lamp"), lamp(91, name=""), lamp(92, asin=None),
       lamp(93, customization_options={"c": [{"value": f"{i}{'x' * 50}"} for i in range(400)]})]


@pytest.fixture
def shop(tmp_path):
    """A function that makes a shop of WebShop's two files."""
    def made(records, told):
        return make(NAME, products=write(tmp_path / "p.json", records),
                    instructions=write(tmp_path / "i", told))

    return made


class TestWebShopsFiles:
    def test_records_are_products_and_every_goal_can_be_reached(self, shop, capfd):
        """Ordinary, odd and bad ones, at the middle of a range of prices."""
        changes = [{"pricing": text} for text in PRICES] + ODD
        told = [asked(i) for i in range(len(changes))] + NOT_ASKED
        records = [lamp(i, **change) for i, change in enumerate(changes + [{}] * len(NOT_ASKED))]
        env = shop(records + BAD, {r["asin"]: entry for r, entry in zip(records, told)})
        assert "4 of 16 records left out: no usable asin or name" in capfd.readouterr().err
        products = env.shop.products
        assert products[0] == Product(
            "b00", "Acme Lamp0, Dimmable", "desk lamp0", 19.99, ("feature0", "easy clean"),
            {"color": ("r.brown2060", "black | white"), "size": ("12 in", "18 in")},
            "A lamp that swivels.", ("usb port", "1 year"), ("feature0",),
            "Find me a desk lamp0 that is easy to clean.")
        assert [p.price for p in products[:len(PRICES)]] == [*PRICES.values()]
        assert env._wanted == [*products[:-len(NOT_ASKED)]]  # nobody asks for the others
        assert env.shop.search("port") and not env.shop.search("year")  # of the second feature
        env.instance_split = lambda: "train"
        for product in products[:-len(NOT_ASKED)]:
            env._wanted = [product]
            env.reset(seed=0)
            env.step(env.solve()[0])
            assert f"{product.id} looks right" in env.note()
            assert [*walk(env, [0], solver=1)] and env.sold["score"] == 1, product
            for _ in walk(env, range(2)):  # every page is an observation
                assert env._observe() in env.observation_space

    def test_files_are_read_again_when_they_change(self, shop):
        for count in (1, 2):
            assert len(shop([*map(lamp, range(count))], {"B00": asked(0), "B01": asked(1)},
                            )._wanted) == count

    @pytest.mark.parametrize("records, told, said", [
        ([lamp(0)], {"B00": [asked(0), asked(1)]}, "several goals.*as in items_ins_v2"),
        ([lamp(0)], [], "cannot read .*i: .*Expected one for"),
        ([lamp(0), 3], {}, "record 2 of .*p.json is not of WebShop's form"),
        ([lamp(0)], {}, "no goal of WebShop")])
    def test_files_of_another_form_are_refused_with_a_sentence(self, shop, records, told, said):
        with pytest.raises(ValueError, match=said):
            shop(records, told)

    def test_one_file_without_the_other_is_refused(self, tmp_path):
        for name, said in ("products", "cannot read instructions="), ("instructions", "no file ''"):
            with pytest.raises(ValueError, match=said):
                make(NAME, **{name: write(tmp_path / name, {})})
