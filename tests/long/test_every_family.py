"""All of the architectures of test_families.py, as the table of docs/models.md has them."""

import pytest
from test_families import FAMILIES, PAGE, measured


def table():
    return "\n".join(f"| {name} | {measured(name)} |" for name in FAMILIES)


class TestEveryFamily:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_it_works_or_is_refused_as_the_page_says_and_is_never_silently_wrong(self, name):
        assert f"\n| {name} | {measured(name)} |\n" in PAGE, f"write into the page:\n{table()}"

    def test_the_page_has_all_of_them_and_no_other(self):
        assert f"\n|---|---|\n{table()}\n\n" in PAGE, f"write into the page:\n{table()}"
