"""The architectures that test_families.py does not try, as the table of docs/models.md has them."""

from collections import defaultdict

import pytest
from test_families import FAMILIES, PAGE, SOME, listed_as, measured


def table():
    """A row for each outcome, in the order in which FAMILIES has them."""
    names = defaultdict(list)
    for name in FAMILIES:
        names[listed_as(name) if name in SOME else measured(name)].append(name)
    return "\n".join(f"| {outcome} | {'; '.join(found)} |" for outcome, found in names.items())


class TestEveryFamily:
    @pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SOME])
    def test_it_works_or_is_refused_as_the_page_says_and_is_never_silently_wrong(self, name):
        assert listed_as(name) == measured(name), f"write into the page:\n{table()}"

    def test_the_page_has_all_of_them_and_no_other(self):
        assert PAGE.endswith(f"\n|---|---|\n{table()}\n"), f"write into the page:\n{table()}"
