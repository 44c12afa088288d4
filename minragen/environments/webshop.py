"""WebShop: find and buy in a shop of web pages what a customer asks for."""

import itertools
import json
import random
import re
import string
from collections import defaultdict
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from minragen.environments.data import cached_until_changed, load_table, read_each
from minragen.environments.search import BM25, one_line, words_of
from minragen.envs import Budget, Outcome, TextEnv, split_of, text_space

SHOWN = 120  # characters of a title on a page
LISTED = 50  # products that one search lists, as in WebShop
REMARKS = 6  # products that a note mentions, at most
CACHE_SIZE = 4096  # searches whose results are kept
NO_CAP = float("inf")
STOCK = 1000  # generated products
FAMILIES = 8  # of each kind: products with the same attributes and options
PARAPHRASED = 0.5  # probability that a goal says a kind or an attribute in other words
SUB_PAGES = ("description", "features", "reviews")
BUTTONS = ("next >", "< prev", "buy now", *SUB_PAGES, "back to search")
TABLES = load_table("webshop.json")


class Product(NamedTuple):
    """A product on sale.

    query: the kind of thing      options: name -> tuple of values
    wanted: attributes that a goal asks for
    instruction: the goal in words, in WebShop's own data
    """

    id: str
    title: str
    query: str
    price: float
    attributes: tuple
    options: dict
    description: str
    features: tuple
    wanted: tuple = ()
    instruction: str = ""
    reviews: tuple = ()

    @property
    def line(self):
        return f"{self.title[:SHOWN]}, {format_price(self.price)}"

    @property
    def labels(self):
        """label -> (option name, value); the labels on a page are unique."""
        labels = {}
        for name, values in self.options.items():
            for value in values:
                label = value
                while label in labels or label in BUTTONS:
                    label = f"{name}: {label}"
                labels[label] = name, value
        return labels


class Goal(NamedTuple):
    """What a customer wants.

    words: a search for it            product: one that is right; others may be
    options: (name, value) pairs      cap: the highest price
    """

    text: str
    words: str
    product: Product
    attributes: tuple
    options: tuple
    cap: float

    def score(self, product, chosen):
        """The score of buying `product` with the option values `chosen`, in [0, 1], and its parts.

            r_type * (|U_att & Y_att| + |U_opt & Y_opt| + 1[price <= cap]) / (|U_att| + |U_opt| + 1)

        U is wanted, Y is bought (Yao et al. 2022, "WebShop", section 3.2); r_type is 1 for the
        right kind of thing, otherwise 0. A part that the goal does not ask for is 1.
        """
        kind, price = float(product.query == self.product.query), float(product.price <= self.cap)
        attributes = [attribute in product.attributes for attribute in self.attributes]
        options = [value in chosen for _, value in self.options]
        parts = [*attributes, *options, price]
        return {"score": kind * sum(parts) / len(parts), "r_type": kind,
                "r_att": fmean(attributes or [1]), "r_option": fmean(options or [1]),
                "r_price": price}


class WebShop(TextEnv):
    """In a shop of web pages, find and buy what a customer asks for.

    Observation: the goal, the page, and in brackets what can be clicked.
    Actions: search[words] on the search page; click[target] elsewhere.
    Reward: on buying, WebShop's score in [0, 1] for kind, attributes, options and price
        (`Goal.score`); nothing before. Success is a score of 1.
    Ends when: something is bought.
    Solver: takes the shortest way to a purchase that scores 1, over pages or by a new search. If
        too few actions are left, it leaves out options, or buys the item it looks at.

    Options: `page_size`, results per page; `wording` of goals in the generated shop (natural ones
    paraphrase half of the attributes and kinds, `plain` ones list words); `products` and
    `instructions`, WebShop's own files, whose pages need a larger `--max-context`. All splits use
    the same shop.
    """

    budget = Budget(max_turns=9, max_actions_per_turn=1, max_actions=9)
    bundled_data = "generated shop of 1,000 products"
    defaults = {"page_size": 10, "wording": "natural", "products": "", "instructions": ""}
    ranges = {"page_size": (1, 50), "wording": ["natural", "plain"]}
    example = ("I search for the product first.", "search[oak wood birdhouse]",
               "Goal: a birdhouse of oak wood. The search page.", "A list of birdhouses.")
    instruction = ("Buy in this web shop what the goal asks for: the right kind of thing with the "
                   "right attributes and options, within the price. search[words] finds products, "
                   "on the search page only. click[target] clicks what stands in brackets. Options "
                   "are chosen on an item's page; click[buy now] ends the episode.")

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        o = self.options
        self.plain = o["wording"] == "plain"
        self.instruction = re.sub(r"\[(.*?)\]", lambda match: self._box(match[1]), self.instruction)
        self.shop = Shop(o["products"], o["instructions"], o["wording"])
        self.observation_space = text_space(self.shop.characters, max_length=2**16)
        # Besides the clicks that choose options: search, item and buy.
        self._wanted = [p for p in self.shop.products
                        if p.wanted and len(p.options) + 3 <= self.budget.max_actions]
        if not self._wanted:
            raise ValueError(f"no goal of WebShop fits into {self.budget}: a purchase takes 3 "
                             f"actions and one for each option (or no product has a goal).")

    def _box(self, text):
        return f"[ {text} ]" if self.plain else f"[{text}]"

    def _click(self, label):
        return f"click{self._box(label)}"

    def _reset(self, rng):
        for _ in range(1000):  # bounded, because what is wanted may be on a page out of reach
            product = self._wanted[rng.integers(len(self._wanted))]
            self.goal = draw_goal(product, rng, self.plain)
            if self._within_reach():
                break
        else:
            raise ValueError(f"no goal of WebShop fits into {self.budget}: give more turns.")
        self.page, self.found, self.at, self.item = "search", (), 0, None
        self.chosen, self.sold = {}, None

    def _within_reach(self):
        """Whether search, pages, item, options and buying fit into the budget."""
        product, size = self.goal.product, self.options["page_size"]
        pages = [found.index(product) // size
                 for found in map(self.shop.search, self._searches()) if product in found]
        clicks = 3 + len(self.goal.options) + min(pages, default=self.budget.max_actions)
        return clicks <= self.budget.max_actions

    def _searches(self):
        """The solver's searches: the words of the goal, and the exact title."""
        return self.goal.words, one_line(self.goal.product.title[:200], "[]")

    def instance(self):
        _, _, product, attributes, options, cap = self.goal
        return f"{product.query}; {sorted(attributes)}; {sorted(options)}; {cap}"

    def instance_split(self):  # whatever the cap
        return split_of(self.instance().rpartition(";")[0])

    # ---- Pages -----------------------------------------------------------------------------------
    def _act(self, action):
        match = re.fullmatch(r"search\[ ?([^][\n]{1,200}) ?\]|click\[(.+)\]", action,
                             re.IGNORECASE | re.ASCII)
        words, target = (s.strip().lower() for s in match.groups("")) if match else ("", "")
        if words and self.page == "search":
            return self._go("results", found=self.shop.search(words), at=0)
        click = self._clicks().get(target)
        return click and click()

    def _clicks(self):
        """What can be clicked on this page: label -> function that returns an Outcome."""
        go = self._go
        if self.page == "search":
            return {}
        if self.page == "results":
            clicks = {label: partial(go, "item", item=p, chosen={})
                      for label, p in self._listed(self.found, self.at).items()}
            if self._listed(self.found, self.at + 1):
                clicks["next >"] = partial(go, "results", at=self.at + 1)
            if self.at:
                clicks["< prev"] = partial(go, "results", at=self.at - 1)
        elif self.page == "item":
            clicks = {"buy now": self._buy,
                      **{page: partial(go, page) for page in SUB_PAGES if getattr(self.item, page)},
                      "< prev": partial(go, "results")}
            for label, (name, value) in self.item.labels.items():
                clicks[label] = partial(go, "item", chosen={**self.chosen, name: value})
        else:
            clicks = {"< prev": partial(go, "item")}
        return clicks | {"back to search": partial(go, "search")}

    def _listed(self, found, at):
        """The products on page number `at` of these results: label -> product."""
        size = self.options["page_size"]
        return {str(place) if self.plain else p.id: p
                for place, p in enumerate(found[at * size:][:size], 1)}

    def _go(self, page, **changes):
        effective = page != self.page or any(getattr(self, k) != v for k, v in changes.items())
        vars(self).update(page=page, **changes)
        return Outcome(0.0, effective=effective)

    def _buy(self):
        self.sold = self.goal.score(self.item, tuple(self.chosen.values()))
        score = self.sold["score"]
        return Outcome(score, True, score == 1.0, metrics={**self.sold, "bought": 1.0})

    def render(self):
        heading = self.item and f"Item{'' if self.plain else f' {self.item.id}'}: {self.item.line}"
        if self.sold:
            return f"{heading}. Bought, score: {self.sold['score']:.3g}"
        lines = [f"Goal: {self.goal.text}"]
        if self.page == "search":
            return "\n".join([*lines, f"Search page: search{self._box('words')}"])
        if self.page == "results":
            # After the dash, the first word is the same token as in the goal. The id comes last,
            # so that a model reads it after the line that it compares with the goal.
            lines += [f"- {p.line} {self._box(label)}"
                      for label, p in self._listed(self.found, self.at).items()]
            lines.append(f"Results, page {self.at + 1}" if self.found else "Nothing found.")
        elif self.page == "item":
            lines.append(heading)
            for name in self.item.options:
                labels = [k for k, pair in self.item.labels.items() if pair[0] == name]
                lines.append(f"{name}: {' '.join(map(self._box, labels))}")
            if self.chosen:
                lines.append(f"Chosen: {', '.join(self.chosen.values())}")
        else:
            text = getattr(self.item, self.page)
            text = text if isinstance(text, str) else ", ".join(text)
            lines.append(f"{heading}. {self.page}: {text[:1000]}")
        buttons = " ".join(self._box(label) for label in self._clicks() if label in BUTTONS)
        return "\n".join([*lines, buttons])

    # ---- Players ---------------------------------------------------------------------------------
    def solve(self):
        """The shortest way to a purchase that scores 1, cut to the actions that are left."""
        left = self.actions_left
        walk, choices = min(self._ways(), key=lambda way: len(way[0] + way[1]))
        if self.page == "item" and len(walk + choices) >= left:
            walk, choices = [], self._choices(self.item, self.chosen)
        choices = choices[:max(0, left - len(walk) - 1)]
        return [*walk, *map(self._click, choices), self._click("buy now")][:left]

    def _ways(self):
        """Ways to purchases that score 1: (answers up to the item's page, labels to choose)."""
        depth = {"search": 0, "results": 1, "item": 2}.get(self.page, 3)
        prev, home = [self._click("< prev")], [self._click("back to search")]
        if depth > 1 and self._perfect(self.item):
            yield prev * (depth - 2), self._choices(self.item, self.chosen)
        lists = [(prev * (depth - 1), self.found, self.at)] if depth else []
        lists += [([*home[:depth], f"search{self._box(words)}"], self.shop.search(words), 0)
                  for words in self._searches()]
        for steps, found, at in lists:
            for page in range(LISTED):  # more than there can be
                turns = [self._click("next >")] * (page - at) or prev * (at - page)
                for label, product in self._listed(found, page).items():
                    if self._perfect(product):
                        yield [*steps, *turns, self._click(label)], self._choices(product, {})

    def _choices(self, product, chosen):
        """The labels on the product's page that choose what is wanted and not yet chosen."""
        left = {*self.goal.options} - chosen.items()
        return [label for label, pair in product.labels.items() if pair in left]

    def _perfect(self, product):
        """Whether buying `product` can score 1."""
        values = [v for name, v in self.goal.options if v in product.options.get(name, ())]
        return self.goal.score(product, values)["score"] == 1.0

    def _looks(self, product):
        """A verdict by title and price; ignores goal words that the right product's title lacks."""
        title, right = (p.title[:SHOWN].lower() for p in (product, self.goal.product))
        signs = set(words_of(right))  # words of its kind, or all
        signs = signs & set(words_of(self.goal.product.query)) or signs
        named = all(a.lower() in title for a in self.goal.attributes if a.lower() in right)
        if not named or not signs <= set(words_of(title)):
            return "looks wrong"
        return "looks right" if product.price <= self.goal.cap else "too dear"

    def note(self):
        """What titles and prices tell. In results a wrong product may look right."""
        if self.page == "search":
            return f"want {self.goal.words}"
        if self.page == "results":
            remarks = [f"{label} {self._looks(p)}"
                       for label, p in self._listed(self.found, self.at).items()]
            right = next((n for n, r in enumerate(remarks, 1) if r.endswith("right")), None)
            remarks = [r for r in remarks[:right] if not r.endswith("wrong")]
            remarks += [] if right else ["none looks right"]
            return f"want {self.goal.words}: {', '.join(remarks[-REMARKS:])}"
        if self.page != "item":
            return "read"
        looks = self._looks(self.item)
        if looks != "looks right" or not self._perfect(self.item):
            return looks.replace("right", "wrong")
        left = self._choices(self.item, self.chosen)
        return f"looks right: {'choose ' + ', '.join(left) if left else 'buy now'}"

    def first_choice(self):
        """A bad habit: after a good search open the first product, and buy without options."""
        if self.page == "search":
            return f"search{self._box(self.goal.words)}"
        return self._click(next(iter(self._clicks())))

    def random_answer(self, rng):
        """The first words of the goal on the search page, a uniformly drawn click elsewhere."""
        if self.page == "search":
            return f"search{self._box(one_line(self.goal.text[:200].partition(',')[0], '[]'))}"
        clicks = list(self._clicks())
        return self._click(clicks[rng.integers(len(clicks))])

    def synonyms(self):
        """The words that only goals of the plain wording use."""
        return "".join(f" {words[0]}" for shelf in TABLES["shelves"].values()
                       for words in shelf["attributes"].values())

    @staticmethod
    def shallow_answer(texts):
        """A text matcher: of the first results within the price it buys the one whose title shares
        most words with the goal, with every option that the goal names."""
        page, goal = texts[-1], re.search("^Goal: (.*)", texts[1], re.M)[1]
        words = [word for word in words_of(goal) if word not in TABLES["common_words"]]
        if "\nSearch page" in page:
            return f"search[{' '.join(words)[:200]}]"
        rows = re.findall(r"^- (.*), ([\d.]+) dollars \[ ?(.*?) ?\]$", page, re.M)
        if rows:
            limit = max(map(float, re.findall(r"(\d+(?:\.\d+)?) dollars", goal) or ["inf"]))
            _, _, best = max(rows, key=lambda row: (
                float(row[1]) <= limit, len({*words} & {*words_of(row[0])})))
            return f"click[{best}]"
        chosen = words_of(page.partition("\nChosen: ")[2].partition("\n")[0])
        options = re.findall(r"\[ ?(.*?) ?\]", page.rpartition("\n[")[0])
        left = [o for o in options if {*words_of(o)} <= {*words}.difference(chosen)]
        return f"click[{left[0] if left else 'buy now'}]"


@cached_until_changed
class Shop:
    """Products and a BM25 search over them: the generated ones, or those of WebShop's two files.

    All environments with the same data share one shop. Raises ValueError as `load_products` does.
    """

    def __init__(self, products, instructions, wording):
        self.products = found = tuple(
            load_products(products, instructions) if products or instructions else
            generate_products(wording == "plain"))
        self.characters = frozenset(itertools.chain(*map(str, found)))
        index = BM25([" ".join((p.title, p.description, *p.features[:1], *p.options,
                                *itertools.chain(*p.options.values()))) for p in found])
        # query -> the LISTED products that match best, or fewer, best first
        self.search = lru_cache(maxsize=CACHE_SIZE)(
            lambda query: tuple(found[i] for i, _ in index.top(query, LISTED)))


def draw_goal(product, rng, plain=False):
    """Draw a goal for `product`: a value of every option, and WebShop's price cap, which is the
    larger of two of the next four multiples of ten above the price."""
    options = tuple((name, values[rng.integers(len(values))])
                    for name, values in product.options.items())
    above = [ten for ten in range(10, 1000, 10) if ten > product.price][:4]
    cap = float(above[rng.choice(len(above), 2, replace=False).max()]) if above[1:] else NO_CAP
    limit, wanted = format_price(cap), product.wanted
    if product.instruction:
        parts = [f"{name}: {value}" for name, value in options]
        parts += [f"price at most {limit}"] if cap < NO_CAP else []
        text = product.instruction.rstrip(". ") + (" with " if parts else "") + ", and ".join(parts)
        return Goal(text, one_line(product.instruction[:200], "[]"), product, wanted, options, cap)
    shelf = next(s for s in TABLES["shelves"].values() if product.query in s["kinds"])
    said = shelf["attributes"]
    if plain:
        words = " ".join((*(said[a][0] for a in wanted), product.query))
        text = ", ".join((words, *(value for _, value in options), f"at most {limit}"))
    else:  # I am looking for a kettle that does not make noise and is steel, in red, for at ...
        wishes = " and ".join(said[a][1] if rng.random() < PARAPHRASED else f"is {a}"
                              for a in wanted)
        text = TABLES["goals"][rng.integers(len(TABLES["goals"]))].format(
            thing=shelf["kinds"][product.query][int(rng.random() < PARAPHRASED)], wishes=wishes,
            limit=limit,
            choice="".join(f", {TABLES['choices'][n].format(value)}" for n, value in options))
    return Goal(text, " ".join((*wanted, product.query)), product, wanted, options, cap)


def format_price(price):
    return f"{price:.2f}".removesuffix(".00") + " dollars"


# ---- Generated products --------------------------------------------------------------------------
def generate_products(plain=False):
    """STOCK products over the shelves of data/webshop.json, the same on every machine.

    A title shows two of three attributes, and a goal asks for these; products with the same two (a
    family) share their options. A brand makes things of one kind.
    """
    # Python promises only for Random(int).random() that its numbers never change.
    draw, families, products = random.Random(7).random, defaultdict(dict), []
    shelves = list(TABLES["shelves"].values())
    every_kind = [kind for shelf in shelves for kind in shelf["kinds"]]
    brands = ["".join(pair) for pair in itertools.product(TABLES["syllables"], repeat=2)]

    def one(things):
        return things[int(draw() * len(things))]

    def pick(things, k):
        return tuple(sorted(sorted(things, key=lambda _: draw())[:k], key=things.index))

    for i in range(STOCK):
        number, place = divmod(i, len(shelves))
        shelf = shelves[place]
        kinds, attributes, (low, high) = [*shelf["kinds"]], [*shelf["attributes"]], shelf["price"]
        kind = kinds[number % len(kinds)]
        known, family = families[kind], int(draw() * FAMILIES)
        if family not in known:
            taken = [shown for shown, _ in known.values()]
            known[family] = (one([p for p in itertools.combinations(attributes, 2)
                                  if p not in taken]),
                             {name: pick(values, 3) for name, values in shelf["options"].items()})
        shown, choices = known[family]
        features = shown + pick([a for a in attributes if a not in shown], 1)
        price = float(low + int(draw() * (high - low + 1)))
        product = Product(f"{kind} {number}", " ".join((*shown, kind)), kind, price, features,
                          choices, "", features, wanted=shown)
        if not plain:
            brand = one(brands[every_kind.index(kind)::len(every_kind)])
            title = string.capwords(one(TABLES["titles"]).format(
                brand=brand, kind=kind, first=shown[0], second=shown[1],
                model=f"{one(string.ascii_lowercase)}{one(string.digits)}{one(string.digits)}"))
            means = [shelf["attributes"][a][2].capitalize() for a in features]
            product = product._replace(
                id="b0" + "".join(one(string.digits + string.ascii_lowercase) for _ in range(8)),
                title=title, description=f"{title}. {means[0]}. {means[1]}.",
                reviews=(f"{one('45')} of 5 stars. {means[2]}.",))
        products.append(product)
    return products


# ---- WebShop's own files -------------------------------------------------------------------------
def load_products(products_path, instructions_path):
    """The products of WebShop's files (`items_shuffle*.json`, `items_ins_v2*.json`).

    A product without a usable id or name, or with too many options, is left out. One without an
    instruction is on sale, but is never a goal. Raises ValueError for a file that is missing or of
    another form.
    """
    try:
        told = json.loads(Path(instructions_path).read_text("utf-8-sig"))
        if not all(isinstance(entry, dict) for entry in told.values()):
            raise ValueError("a product has several goals, or none")
    except (OSError, ValueError, RecursionError, AttributeError) as problem:
        raise ValueError(f"cannot read instructions={instructions_path}: {problem}. Expected one "
                         f"for each product, as in items_ins_v2.") from None
    products = {}
    for product in read_each(
            products_path, partial(product_of, told=told), "record {number} of {path} is not of "
            "WebShop's form: {problem}.", "no usable asin or name, or too many options"):
        products.setdefault(product.id, product)
    return products.values()


def product_of(record, told):
    """The Product of a record of WebShop, or None if it is unusable."""
    asin, title, options = str(record["asin"] or ""), _clean(record["name"]), {}
    for name, entries in (record.get("customization_options") or {}).items():
        values = _texts([entry["value"].lower().replace("/", " | ") for entry in entries or ()])
        if values:
            options[_clean(name).lower()[:40] or "option"] = tuple(dict.fromkeys(values))
    shown = sum(len(name + v) + 6 for name, values in options.items() for v in values)
    # A page must fit into an observation.
    if not re.fullmatch(r"[A-Za-z0-9]{1,20}", asin) or not title or shown > 20_000:
        return None
    prices = re.findall(r"\$\s*([0-9][0-9,]{0,9}(?:\.[0-9]+)?)", _clean(record.get("pricing")))
    # The middle of a range, or 100 if there is no price, as in WebShop.
    price = round(fmean([float(price.replace(",", "")) for price in prices[:2]] or [100.0]), 2)
    asked = told.get(asin, {})
    product = Product(
        asin.lower(), title, _clean(record.get("query")).lower(),
        price, _texts(asked.get("attributes")), options, _clean(record.get("full_description")),
        _texts(record.get("small_description")),
        instruction=_clean(asked.get("instruction"))[:1000])
    wanted = _texts(asked.get("instruction_attributes")) if product.instruction else ()
    # A goal that asks for what its own product lacks is dropped.
    return product._replace(wanted=wanted if {*wanted} <= {*product.attributes} else ())


def _clean(value):
    """A text on one line; "" for anything else."""
    return one_line(value) if isinstance(value, str) else ""


def _texts(value):
    return tuple(filter(None, map(_clean, value if isinstance(value, list) else [value])))
