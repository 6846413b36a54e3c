"""The cells of docs/recipes.md, for the tests that run them."""

import re
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"


def recipe(heading: str) -> str:
    """The first python block below ``## heading``, without the magic that says where it runs."""
    sections = re.split(r"^## ", RECIPES.read_text(), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.partition("\n")[0].strip() == heading]
    found = re.search(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    assert found, f"no python block below {heading!r}"
    return re.sub(r"\A%%on\S*[^\n]*\n", "", found[1])
