"""The problems of DeepCoder.

Each function is the reference solution of a problem, or of one problem for each value of its last
argument `k`, which the problem replaces by that value. The docstring is the task. An annotation
names the kind of an argument, from KINDS.
"""
# ruff: noqa: F821  (annotations are kinds)

WORDS = ["apple", "tree", "red", "stone", "on", "river", "banana", "light", "cat", "old", "letter",
         "book", "a", "the", "under", "of", "see", "queen", "moon", "Paris", "sky", "level", "in",
         "running", "eggs", "ice", "umbrella", "green", "at"]


def _brackets(rng):
    text = "".join(rng.choice(["()", "[]", "(())", "[()]", "()[", ")", "([])"],
                              size=rng.integers(1, 5)))
    return f"[{text}]" if rng.integers(2) else text


# Description, edge cases, a function of a numpy Generator that makes an input, and one-line
# programs over {v}, each of which fails half of the hidden tests or more.
KINDS = {
    "digit": ("a digit", [0, 1, 9], lambda rng: int(rng.integers(10)), []),
    "numbers": (
        "a list of integers", [[], [7], [4, 4, 4], [-3, 8, -3], [5, 4, 3, 2, 1]],
        lambda rng: rng.integers(*((-9, 20), (0, 5), (1, 10))[rng.integers(3)],
                                 size=rng.integers(3, 10)).tolist(),
        ["{v}", "{v}[::-1]", "sorted({v})", "sum({v})", "len({v})", "max({v}, default=0)",
         "{v}[1:]", "{v}[:-1]", "{v}[:1]", "{v}[-1:]"]),
    "integer": (
        "an integer of at least 0", [0, 1, 10, 100, 999],
        lambda rng: int(rng.integers(2, 10 ** rng.integers(2, 5))),
        ["{v}", "{v} + 1", "{v} // 10", "{v} % 10", "str({v})", "len(str({v}))"]),
    "small": (
        "an integer of at least 1", [1, 2, 3, 12], lambda rng: int(rng.integers(1, 40)),
        ["{v}", "{v} + 1", "2 * {v}", "{v} ** 2", "[1, {v}]", "list(range({v}))",
         "list(range(1, {v} + 1))"]),
    "sentence": (
        "a string of words separated by single spaces", ["", "a", "see see see", "Old Paris"],
        lambda rng: " ".join(rng.choice(WORDS, size=rng.integers(2, 8))),
        ["{v}", "{v}[::-1]", "{v}.split()", "len({v})", "len({v}.split())", "{v}.upper()",
         "{v}.title()", "{v}[:1]", "set({v}.split())"]),
    "letters": (
        "a string of lowercase letters", ["", "a", "bb", "abcd", "zzzz"],
        lambda rng: "".join(rng.choice([*"abcd"], rng.integers(3, 10)).repeat(rng.integers(1, 3))),
        ["{v}", "{v}[::-1]", "len({v})", "{v}.upper()", "{v}[:1]", "{v}[-1:]", "set({v})",
         "''.join(sorted({v}))"]),
    "brackets": (
        "a string of the brackets ( ) [ ]", ["", "(", ")", "([)]", "[()]"], _brackets,
        ["{v}", "{v}[::-1]", "len({v})", "len({v}) // 2", "{v}.count('(')",
         "{v}.count('(') - {v}.count(')')"]),
    "moves": (
        "a string of the letters U, D, L and R", ["", "U", "UD", "LLRR"],
        lambda rng: "".join(rng.choice([*"UDLR"], size=rng.integers(2, 10))),
        ["{v}", "{v}[::-1]", "len({v})", "len(set({v}))", "[0, 0]", "[0, len({v})]"]),
    "grid": (
        "a list of rows of integers, all equally long", [[[5]], [[1, 2]], [[1], [2]]],
        lambda rng: rng.integers(0, 10, size=rng.integers(1, 5, size=2)).tolist(),
        ["{v}", "{v}[::-1]", "[row[::-1] for row in {v}]", "{v}[0]", "{v}[-1]", "len({v})",
         "sum(map(sum, {v}))", "[sum(row) for row in {v}]", "sum({v}, [])"]),
    "intervals": (
        "a list of intervals [start, end]", [[], [[2, 5]], [[0, 9], [1, 2]], [[4, 6], [1, 4]]],
        lambda rng: [[start, start + int(rng.integers(1, 7))]
                     for start in rng.integers(0, 20, size=rng.integers(2, 6)).tolist()],
        ["{v}", "sorted({v})", "len({v})", "{v}[0] if {v} else 0", "sum(b - a for a, b in {v})",
         "[b - a for a, b in {v}]"]),
    "prices": (
        "a dictionary from names to prices", [{}, {"red": 3}, {"red": 5, "book": 5}],
        lambda rng: {name: int(rng.integers(1, 13))
                     for name in rng.permutation(WORDS[:12])[:rng.integers(2, 7)].tolist()},
        ["{v}", "list({v})", "sorted({v})", "len({v})", "sum({v}.values())",
         "max({v}.values(), default=0)", "list({v}.values())", "min({v}, default='')"])}

# Formulas: pairs (phrase, expression). Parts bind at least as tightly as a product, so that joins
# need no parentheses. Numbers are words, which a small model translates more easily than it copies
# digits.
PARTS = [("{v}", "{v}"), ("twice {v}", "2 * {v}"), ("three times {v}", "3 * {v}"),
         ("four times {v}", "4 * {v}"), ("five times {v}", "5 * {v}"),
         ("ten times {v}", "10 * {v}"), ("{v} squared", "{v} ** 2"), ("{v} cubed", "{v} ** 3")]
JOINS = [("{}, plus {}", "{} + {}"), ("{}, minus {}", "{} - {}"),
         ("the product of {} and {}", "{} * {}"), ("the larger of {} and {}", "max({}, {})"),
         ("the smaller of {} and {}", "min({}, {})"),
         ("the distance from {} to {}", "abs({} - {})"),
         ("{} if a is even, else {}", "{} if a % 2 == 0 else {}"),
         ("{} if a is above b, else {}", "{} if a > b else {}")]

# ---- Lists of numbers ----------------------------------------------------------------------------
def running_maximum(xs: "numbers"):
    """Return a list as long as xs: entry i is the largest of the first i + 1 numbers of xs."""
    best = []
    for x in xs:
        best.append(max(x, best[-1]) if best else x)
    return best

def running_totals(xs: "numbers", k=(0, 5, 10, 100)):
    """Return the totals after each number of xs when they are added to {k} one by one."""
    totals, total = [], k
    for x in xs:
        total += x
        totals.append(total)
    return totals

def differences(xs: "numbers", k=(1, 2, 3)):
    """Return, for each number of xs from place {k} on (the first is place 0), that number minus the
    number {k} places before it."""
    return [xs[i] - xs[i - k] for i in range(k, len(xs))]

def sum_above(xs: "numbers", k=(0, 2, 3, 4, 5, 6)):
    """Return the sum of the numbers of xs that are greater than {k}."""
    total = 0
    for x in xs:
        if x > k:
            total += x
    return total

def sum_before(xs: "numbers", k=(3, 4, 5, 7, 9)):
    """Return the sum of the numbers of xs that come before the first number greater than {k}. If
    there is no such number, return the sum of all."""
    total = 0
    for x in xs:
        if x > k:
            break
        total += x
    return total

def keep_odd_above(xs: "numbers", k=(0, 2, 4, 6)):
    """Return the odd numbers of xs that are greater than {k}, in their order."""
    return [x for x in xs if x % 2 == 1 and x > k]

def halve_or_add(xs: "numbers", k=(1, 3, 5, 7)):
    """Return xs with every even number halved and {k} added to every odd number."""
    return [x // 2 if x % 2 == 0 else x + k for x in xs]

def longest_rise(xs: "numbers"):
    """Return the longest stretch of neighbours in xs in which each number is greater than the one
    before. If several are equally long, return the first."""
    best = run = xs[:1]
    for x in xs[1:]:
        run = run + [x] if x > run[-1] else [x]
        if len(run) > len(best):
            best = run
    return best

def longest_stretch_below(xs: "numbers", k=(3, 4, 5, 6)):
    """Return the longest stretch of neighbours in xs that are all less than {k}. If several are
    equally long, return the first."""
    best = run = []
    for x in xs:
        run = run + [x] if x < k else []
        if len(run) > len(best):
            best = run
    return best

def drop_repeats(xs: "numbers"):
    """Return xs without repeats: of equal numbers only the first is kept."""
    kept = []
    for x in xs:
        if x not in kept:
            kept.append(x)
    return kept

def rare_numbers(xs: "numbers", k=(1, 2)):
    """Return the numbers that are in xs exactly {k} times, each once, in ascending order."""
    return sorted({x for x in xs if xs.count(x) == k})

def largest_distinct(xs: "numbers", k=(2, 3)):
    """Sort the distinct numbers of xs from the largest to the smallest and return number {k} of
    them; the largest is number 1. If there are fewer, return None."""
    values = sorted(set(xs), reverse=True)
    return values[k - 1] if len(values) >= k else None

def rotate(xs: "numbers", k=(1, 2, 3, 4)):
    """Return xs moved {k} places to the right. Numbers that fall off the end come in again at the
    front."""
    for _ in range(k if xs else 0):
        xs = [xs[-1], *xs[:-1]]
    return xs

def chunks(xs: "numbers", k=(2, 3, 4)):
    """Return xs cut into lists of {k} numbers. The last one may be shorter."""
    return [xs[i:i + k] for i in range(0, len(xs), k)]

def reverse_chunks(xs: "numbers", k=(2, 3, 4)):
    """Cut xs into pieces of {k} numbers, reverse each piece, and return the pieces joined to one
    list. The last piece may be shorter."""
    out = []
    for i in range(0, len(xs), k):
        out += xs[i:i + k][::-1]
    return out

def window_sums(xs: "numbers", k=(2, 3, 4)):
    """Return the sum of every {k} neighbours in xs, from left to right."""
    return [sum(xs[i:i + k]) for i in range(len(xs) - k + 1)]

def window_maxima(xs: "numbers", k=(2, 3, 4)):
    """Return the largest of every {k} neighbours in xs, from left to right."""
    return [max(xs[i:i + k]) for i in range(len(xs) - k + 1)]

def two_sum(xs: "numbers", k=(5, 6, 7, 8, 9)):
    """Return the places [i, j], i before j, of two numbers of xs whose sum is {k}. Take the
    smallest possible i, then the smallest possible j. If there are none, return an empty list."""
    for i, x in enumerate(xs):
        for j in range(i + 1, len(xs)):
            if x + xs[j] == k:
                return [i, j]
    return []

def partition(xs: "numbers", k=(2, 3, 4, 5, 6)):
    """Return the numbers of xs that are less than {k}, followed by all others. Both keep their
    order."""
    return [x for x in xs if x < k] + [x for x in xs if x >= k]

def clamp(xs: "numbers", k=(3, 4, 6, 8)):
    """Return xs with 1 in place of every number less than 1, and {k} in place of every number
    greater than {k}."""
    return [1 if x < 1 else k if x > k else x for x in xs]

def alternating_sum(xs: "numbers"):
    """Return the first number of xs minus the second plus the third minus the fourth, and so on; 0
    for an empty list."""
    total = 0
    for i, x in enumerate(xs):
        total += x if i % 2 == 0 else -x
    return total

def weighted_sum(xs: "numbers", k=(0, 1, 2, 3)):
    """Multiply each number of xs by its place and return the sum. The first place is {k}."""
    return sum(i * x for i, x in enumerate(xs, k))

def interleave(xs: "numbers", ys: "numbers"):
    """Return a list that takes numbers from xs and ys in turn, xs first. When one is used up, the
    rest of the other follows."""
    out = []
    for i in range(max(len(xs), len(ys))):
        out += xs[i:i + 1] + ys[i:i + 1]
    return out

def common_numbers(xs: "numbers", ys: "numbers"):
    """Return the numbers that are both in xs and in ys, each once, in ascending order."""
    return sorted(set(xs) & set(ys))

def only_in_first(xs: "numbers", ys: "numbers"):
    """Return the numbers of xs that are not in ys, in their order and with repeats."""
    return [x for x in xs if x not in ys]

def product_sum(xs: "numbers", ys: "numbers"):
    """Multiply the numbers of xs and ys at the same place and return the sum. Numbers of the longer
    list that have no partner do not count."""
    return sum(x * y for x, y in zip(xs, ys))

def peaks(xs: "numbers"):
    """Return the numbers of xs that are greater than both of their neighbours. The first and the
    last number are never among them."""
    return [xs[i] for i in range(1, len(xs) - 1) if xs[i - 1] < xs[i] > xs[i + 1]]

def best_stretch(xs: "numbers"):
    """Return the largest sum of one or more neighbours in xs; 0 for an empty list."""
    best, total = None, 0
    for x in xs:
        total = max(x, total + x)
        best = total if best is None else max(best, total)
    return best or 0

def best_gain(xs: "numbers"):
    """The numbers of xs are the prices of a share on one day after another. Return the most that
    can be gained by buying it on one day and selling it on a later one; 0 if nothing can be."""
    best = 0
    for i, bought in enumerate(xs):
        for sold in xs[i + 1:]:
            best = max(best, sold - bought)
    return best

def missing_numbers(xs: "numbers"):
    """Return the integers between the smallest and the largest number of xs that are not in xs, in
    ascending order."""
    return [n for n in range(min(xs), max(xs)) if n not in xs] if xs else []

def by_remainder(xs: "numbers", k=(2, 3, 4)):
    """Return {k} lists: the numbers of xs whose remainder when divided by {k} is 0, those whose
    remainder is 1, and so on. The numbers of a list keep their order."""
    lists = [[] for _ in range(k)]
    for x in xs:
        lists[x % k].append(x)
    return lists

def run_lengths(xs: "numbers"):
    """Return a pair [number, length] for each run of equal neighbours in xs, in order."""
    runs = []
    for x in xs:
        if runs and runs[-1][0] == x:
            runs[-1][1] += 1
        else:
            runs.append([x, 1])
    return runs

def most_common(xs: "numbers"):
    """Return the number that is most often in xs, the smallest of them if there are several. For an
    empty list return None."""
    return min(xs, key=lambda x: (-xs.count(x), x)) if xs else None

def bubble_pass(xs: "numbers"):
    """Go through xs once from left to right and swap two neighbours whenever the left one is the
    greater. Return the resulting list."""
    xs = list(xs)
    for i in range(len(xs) - 1):
        if xs[i] > xs[i + 1]:
            xs[i], xs[i + 1] = xs[i + 1], xs[i]
    return xs

def smaller_counts(xs: "numbers"):
    """Return, for each number of xs, how many numbers of xs are less than it."""
    return [sum(y < x for y in xs) for x in xs]

def next_greater(xs: "numbers"):
    """Return, for each number of xs, the first number to its right that is greater, or None if
    there is none."""
    return [next((y for y in xs[i:] if y > x), None) for i, x in enumerate(xs)]

# ---- Integers ------------------------------------------------------------------------------------
def digit_sum(n: "integer", k=(2, 3, 5, 7, 10)):
    """Return the sum of the digits of n when it is written in base {k}."""
    total = 0
    while n:
        n, digit = divmod(n, k)
        total += digit
    return total

def to_base(n: "integer", k=(2, 3, 4, 5, 7, 8)):
    """Return n written in base {k}, as a string without leading zeros. 0 is '0'."""
    digits = ""
    while n >= k:
        n, digit = divmod(n, k)
        digits = str(digit) + digits
    return str(n) + digits

def digit_root(n: "integer", k=(2, 3)):
    """While n is greater than 30, replace it by the sum of its digits, each multiplied by {k}.
    Return n in the end."""
    while n > 30:
        n = sum(k * int(digit) for digit in str(n))
    return n

def even_digits_first(n: "integer"):
    """Return the integer that has the even digits of n first and then its odd digits. Both keep
    their order."""
    return int("".join(sorted(str(n), key=lambda digit: int(digit) % 2)))

def clock(n: "integer"):
    """Return n seconds as hours:minutes:seconds, each with two digits, such as '01:05:09'."""
    parts = []
    for _ in range(2):
        n, part = divmod(n, 60)
        parts.append(f"{part:02}")
    return ":".join([f"{n:02}", *parts[::-1]])

def coins(n: "integer", k=(50, 20, 100)):
    """Pay n with coins of {k}, 10, 5 and 1, always with the largest coin that is not too much.
    Return how many coins of each value are needed, as a list of four numbers."""
    counts = []
    for coin in (k, 10, 5, 1):
        counts.append(n // coin)
        n %= coin
    return counts

def roman(n: "integer"):
    """Return n as a Roman numeral, an empty string for 0. Use M for every 1000, and 4 and 9 as in
    IV, IX, XL, XC, CD and CM."""
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    signs, out = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"], ""
    for value, sign in zip(values, signs):
        out += sign * (n // value)
        n %= value
    return out

def largest_power(n: "integer", k=(2, 3, 4, 5)):
    """Return the largest power of {k} that is not greater than n (1 is one), or 0 if there is
    none."""
    power = 1
    while power * k <= n:
        power *= k
    return power if n else 0

def sum_of_multiples(n: "small", k=(2, 3, 4, 5)):
    """Return the sum of the multiples of {k} from 1 to n."""
    return sum(i for i in range(1, n + 1) if i % k == 0)

def divisors(n: "small"):
    """Return the divisors of n in ascending order, 1 and n included."""
    return [d for d in range(1, n + 1) if n % d == 0]

def prime_factors(n: "small"):
    """Return the prime factors of n in ascending order, with repeats; an empty list for 1."""
    factors, d = [], 2
    while n > 1:
        if n % d:
            d += 1
        else:
            n //= d
            factors.append(d)
    return factors

def primes_up_to(n: "small"):
    """Return the prime numbers up to n in ascending order."""
    primes = []
    for i in range(2, n + 1):
        if all(i % p for p in primes):
            primes.append(i)
    return primes

def fizz(n: "small", k=(2, 3, 4, 5)):
    """Return the list of the integers from 1 to n, but with the word 'fizz' in place of every
    multiple of {k}."""
    return ["fizz" if i % k == 0 else i for i in range(1, n + 1)]

def sum_sequence(n: "small", k=(1, 2, 3, 4, 5)):
    """A sequence begins with 1 and {k}, and every later number is the sum of the two before it.
    Return its first n numbers."""
    numbers = [1, k]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]

def collatz(n: "small", k=(1, 5)):
    """Start with n. Halve an even number; multiply an odd one by 3 and add {k}. Return the list of
    the first ten numbers, n included."""
    path = [n]
    while len(path) < 10:
        path.append(path[-1] // 2 if path[-1] % 2 == 0 else 3 * path[-1] + k)
    return path

def stair_ways(n: "small", k=(2, 3, 4)):
    """A child climbs a stair of n steps and takes from 1 to {k} steps at a time. Return the number
    of different ways to reach the top."""
    ways = [1]
    for _ in range(n):
        ways.append(sum(ways[-k:]))
    return ways[n]

def pascal_row(n: "small"):
    """Return row n of Pascal's triangle. Row 1 is [1], row 2 is [1, 1], and a number within a row
    is the sum of the two above it."""
    row = [1]
    for _ in range(n - 1):
        row = [1, *(a + b for a, b in zip(row, row[1:])), 1]
    return row

def common_divisor(a: "small", b: "small"):
    """Return the greatest integer that divides both a and b."""
    while b:
        a, b = b, a % b
    return a

def common_multiple(a: "small", b: "small"):
    """Return the smallest integer of at least 1 that both a and b divide."""
    multiple = a
    while multiple % b:
        multiple += a
    return multiple

def multiples_between(a: "small", b: "small", k=(3, 4, 5)):
    """Return the multiples of {k} from the smaller of a and b to the larger, both included, in
    ascending order."""
    return [i for i in range(min(a, b), max(a, b) + 1) if i % k == 0]

# ---- Texts ---------------------------------------------------------------------------------------
def count_words(s: "sentence"):
    """Return a dictionary from each word of s to the number of times that it is in s."""
    counts = {}
    for word in s.split():
        counts[word] = counts.get(word, 0) + 1
    return counts

def longest_word(s: "sentence"):
    """Return the longest word of s, the first of them if there are several; '' if s is empty."""
    return max(s.split(), key=len, default="")

def repeated_words(s: "sentence"):
    """Return the words of s in their order, without each word that equals the one before it and
    without words of one letter."""
    words = s.split()
    return [w for i, w in enumerate(words) if len(w) > 1 and words[i - 1:i] != [w]]

def acronym(s: "sentence", k=(1, 2, 3)):
    """Return the first letters of those words of s that have more than {k} letters, as one string
    in uppercase."""
    return "".join(word[0].upper() for word in s.split() if len(word) > k)

def long_words(s: "sentence", k=(2, 3, 4)):
    """Return the list of the words of s that have more than {k} letters, in their order."""
    return [word for word in s.split() if len(word) > k]

def reverse_long_words(s: "sentence", k=(3, 4, 5)):
    """Return s with every word of at least {k} letters reversed."""
    return " ".join(w[::-1] if len(w) >= k else w for w in s.split())

def count_letters(s: "sentence", k=("aeiou", "aeo", "rst", "elt")):
    """Return how many letters of s are one of the letters of {k}."""
    return sum(letter in k for letter in s)

def hide_words(s: "sentence", k=(2, 3, 4, 5)):
    """Return s with every letter of each word that has exactly {k} letters replaced by *."""
    return " ".join("*" * k if len(w) == k else w for w in s.split())

def shift_letters(s: "sentence", k=(1, 2, 3, 5, 13)):
    """Return s with every small letter replaced by the letter {k} places later in the alphabet; a
    comes again after z. Everything else stays."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return "".join(alphabet[(alphabet.index(c) + k) % 26] if c in alphabet else c for c in s)

def capitalise_long_words(s: "sentence", k=(2, 3, 4)):
    """Return s with the first letter of every word of more than {k} letters as a capital."""
    return " ".join(w[0].upper() + w[1:] if len(w) > k else w for w in s.split())

def words_by_length(s: "sentence"):
    """Return a dictionary from lengths to the list of the words of s that are so long, in their
    order."""
    words = {}
    for word in s.split():
        words.setdefault(len(word), []).append(word)
    return words

def pig_latin(s: "sentence", k=("ay", "way", "yay")):
    """Change each word of s: if it begins with a, e, i, o or u, put '{k}' after it; else move its
    first letter to its end and put 'ay' after it. Return the changed words with blanks between
    them."""
    return " ".join(w + k if w[0] in "aeiou" else w[1:] + w[0] + "ay" for w in s.split())

def wrap(s: "sentence", k=(8, 10, 12, 15)):
    """Put the words of s into lines, as many into each as fit into {k} characters, with one blank
    between two words. No word is longer than that. Return the list of lines."""
    lines = []
    for word in s.split():
        if lines and len(lines[-1]) + 1 + len(word) <= k:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines

def run_length_code(s: "letters"):
    """Return s with each run of equal letters written as the letter and the length of the run, such
    as 'a3b1' for 'aaab'."""
    code = ""
    for i, letter in enumerate(s):
        if i == 0 or s[i - 1] != letter:
            length = 1
            while s[i + length:i + length + 1] == letter:
                length += 1
            code += f"{letter}{length}"
    return code

def squeeze(s: "letters"):
    """Return s with each run of equal letters replaced by one such letter."""
    return "".join(c for i, c in enumerate(s) if s[i - 1:i] != c)

def letter_counts(s: "letters"):
    """Return the pairs [letter, count] of the letters of s, the most frequent first; letters of the
    same count are in alphabetical order."""
    return sorted(([c, s.count(c)] for c in set(s)), key=lambda pair: (-pair[1], pair[0]))

def capital_places(s: "letters", k=(2, 3, 4)):
    """Return s with the letters at the places 0, {k}, twice {k} and so on in uppercase."""
    return "".join(c.upper() if i % k == 0 else c for i, c in enumerate(s))

def columns(s: "letters", k=(2, 3, 4)):
    """Write s into lines of {k} letters each and read it column by column: first the first letters
    of all lines, then the second ones, and so on. Return what you read."""
    return "".join(s[i::k] for i in range(k))

def swap_pairs(s: "letters"):
    """Return s with its first two letters swapped, the next two swapped, and so on. A last letter
    without a partner stays."""
    return "".join(s[i:i + 2][::-1] for i in range(0, len(s), 2))

def longest_palindrome(s: "letters"):
    """Return the longest part of s that reads the same forwards and backwards, the first of them if
    there are several."""
    parts = [s[i:j] for i in range(len(s)) for j in range(i + 1, len(s) + 1)]
    return max((p for p in parts if p == p[::-1]), key=len, default="")

def edit_distance(s: "letters", t: "letters"):
    """Return how many letters must at least be inserted, deleted or replaced to turn s into t."""
    row = list(range(len(t) + 1))
    for i, a in enumerate(s, 1):
        old, row = row, [i]
        for j, b in enumerate(t, 1):
            row.append(min(row[-1] + 1, old[j] + 1, old[j - 1] + (a != b)))
    return row[-1]

def first_letters_left(s: "letters", t: "letters"):
    """Take away from s, for each letter of t, its first such letter if there is one left. Return
    what is left of s."""
    for letter in t:
        s = s.replace(letter, "", 1)
    return s

# ---- Brackets and moves --------------------------------------------------------------------------
def first_error(s: "brackets"):
    """Return the place (from 0) of the first closing bracket in s that does not close the last open
    one. If there is none, return the number of brackets that are still open at the end."""
    opened = []
    for i, bracket in enumerate(s):
        if bracket in "([":
            opened.append(bracket)
        elif not opened or opened.pop() + bracket not in ("()", "[]"):
            return i
    return len(opened)

def depths(s: "brackets"):
    """Return a list with the number of open brackets after each bracket of s. A closing bracket
    closes one of any kind; if none is open, the number stays 0."""
    out, depth = [], 0
    for bracket in s:
        depth = depth + 1 if bracket in "([" else max(0, depth - 1)
        out.append(depth)
    return out

def reduce_brackets(s: "brackets"):
    """Remove '()' and '[]' from s again and again until neither is left. Return the rest."""
    while "()" in s or "[]" in s:
        s = s.replace("()", "").replace("[]", "")
    return s

def end_point(s: "moves", k=(1, 2, 3)):
    """A robot starts at [0, 0]. U adds {k} to the second number, D takes {k} away from it, R adds
    1 to the first and L takes 1 away from it. Return where it ends."""
    x = y = 0
    for move in s:
        x += (move == "R") - (move == "L")
        y += k * ((move == "U") - (move == "D"))
    return [x, y]

def visited(s: "moves"):
    """A robot starts on a field of an endless board and moves one field up, down, left or right for
    each letter of s. Return how many different fields it has been on."""
    x = y = 0
    fields = {(0, 0)}
    for move in s:
        x += (move == "R") - (move == "L")
        y += (move == "U") - (move == "D")
        fields.add((x, y))
    return len(fields)

def wall_walk(s: "moves", k=(1, 2, 3)):
    """A robot stands at 0 and can go no further left than 0 and no further right than {k}. R moves
    it 1 to the right, L 1 to the left; other letters do nothing. Return the list of its places
    after each letter of s."""
    places, x = [], 0
    for move in s:
        x = min(k, max(0, x + (move == "R") - (move == "L")))
        places.append(x)
    return places

# ---- Grids ---------------------------------------------------------------------------------------
def transpose(rows: "grid"):
    """Return the list of the columns of rows, from left to right."""
    return [list(column) for column in zip(*rows)]

def quarter_turn(rows: "grid"):
    """Return the rows that one sees after turning the grid a quarter clockwise."""
    return [list(column) for column in zip(*rows[::-1])]

def column_sums(rows: "grid"):
    """Return the sum of each column of rows, from left to right."""
    return [sum(column) for column in zip(*rows)]

def snake(rows: "grid"):
    """Return all numbers of rows in one list: the first row from left to right, the second from
    right to left, the third from left to right, and so on."""
    out = []
    for i, row in enumerate(rows):
        out += row if i % 2 == 0 else row[::-1]
    return out

def border_sum(rows: "grid"):
    """Return the sum of the numbers in the first and last row and the first and last column. Each
    field counts once."""
    total = 0
    for i, row in enumerate(rows):
        for j, x in enumerate(row):
            if i in (0, len(rows) - 1) or j in (0, len(row) - 1):
                total += x
    return total

def diagonal(rows: "grid"):
    """Return the first number of the first row, the second of the second row, and so on, as long as
    there are both such a row and such a number in it."""
    return [row[i] for i, row in enumerate(rows) if i < len(row)]

def places_above(rows: "grid", k=(2, 3, 4, 5, 6)):
    """Return the places [row, column], counted from 0, of the numbers greater than {k}, row by
    row."""
    return [[i, j] for i, row in enumerate(rows) for j, x in enumerate(row) if x > k]

def largest_of_columns(rows: "grid"):
    """Return the largest number of each column, from left to right."""
    return [max(column) for column in zip(*rows)]

def drop_fall(rows: "grid"):
    """Let the numbers of each column that are not 0 fall down, so that the zeros of a column are
    above all others. The others keep their order. Return the new rows."""
    fallen = [sorted(column, key=bool) for column in zip(*rows)]
    return [list(row) for row in zip(*fallen)]

# ---- Intervals and prices ------------------------------------------------------------------------
def merge_intervals(pairs: "intervals"):
    """Join all intervals that overlap or touch, and return the resulting intervals in ascending
    order."""
    merged = []
    for start, end in sorted(pairs):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged

def covered_length(pairs: "intervals"):
    """Return the length of the line that is covered by at least one of the intervals."""
    return len({x for start, end in pairs for x in range(start, end)})

def covering(pairs: "intervals", k=(3, 5, 7, 9, 11)):
    """Return the intervals that contain {k}, their ends included, in the given order."""
    return [[start, end] for start, end in pairs if start <= k <= end]

def free_gaps(pairs: "intervals", k=(20, 25, 30)):
    """Return the gaps [start, end] between 0 and {k} that no interval covers, in ascending
    order."""
    gaps, free = [], 0
    for start, end in sorted(pairs):
        if start > free:
            gaps.append([free, start])
        free = max(free, end)
    return gaps + ([[free, k]] if free < k else [])

def longest_interval(pairs: "intervals"):
    """Return the longest interval, the first of them if there are several; [] if there is none."""
    return max(pairs, key=lambda pair: pair[1] - pair[0], default=[])

def cheap_names(prices: "prices", k=(3, 4, 5, 6, 7, 8, 9)):
    """Return the names whose price is at most {k}, in alphabetical order."""
    return sorted(name for name, price in prices.items() if price <= k)

def raised_prices(prices: "prices", k=(1, 2, 3, 5)):
    """Return a dictionary in which every price below 6 is {k} higher. The other prices stay."""
    return {name: price + k if price < 6 else price for name, price in prices.items()}

def names_by_price(prices: "prices"):
    """Return the list of names from the cheapest to the dearest; names of the same price are in
    alphabetical order."""
    return sorted(prices, key=lambda name: (prices[name], name))

def shopping(prices: "prices", k=(8, 10, 12, 15)):
    """Go through the names in alphabetical order with {k} coins and buy each thing that you can
    still pay for. Return how many coins are left."""
    for name in sorted(prices):
        if prices[name] <= k:
            k -= prices[name]
    return k

def swap_keys(prices: "prices"):
    """Return a dictionary from each price to the list of names of that price, in alphabetical
    order."""
    names = {}
    for name in sorted(prices):
        names.setdefault(prices[name], []).append(name)
    return names
