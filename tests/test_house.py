"""The package stays one in which a new engineer finds the way: the bounds of :mod:`tests.house`."""

import re
from pathlib import Path

import pytest

from tests.house import MOST, PACKAGE, ROOT, measure


def test_the_package_is_within_its_bounds() -> None:
    house = measure()
    numbers = house.numbers()
    assert {name: number for name, number in numbers.items() if number > MOST[name]} == {}, "\n".join(house.lines())


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one file, which may be imported."""
    folder = tmp_path / "small_house"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Nothing yet."""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_circle_counts_under_type_checking_and_in_functions_too(small: Path) -> None:
    (small / "hub.py").write_text("def make():\n    from small_house import part\n    return part\n")
    (small / "part.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from small_house.hub import make\n"
    )
    (small / "user.py").write_text("import small_house.hub\n")
    house = measure("small_house", small.parent)
    assert house.circles == [["small_house.hub", "small_house.part"]]
    assert house.numbers()["files"] == 4


def test_a_public_class_name_that_is_there_twice_is_named_with_its_places(small: Path) -> None:
    for name in ("first", "second"):
        (small / f"{name}.py").write_text("class Door: ...\nclass _Door: ...\n")
    house = measure("small_house", small.parent)
    assert house.twice == {"Door": ["small_house.first", "small_house.second"]}
    assert "class Door: small_house.first, small_house.second" in house.lines()


def test_a_file_that_is_too_long_is_named(small: Path) -> None:
    (small / "long.py").write_text("x = 1\n" * (MOST["longest file"] + 1))
    assert (
        f"too long: small_house/long.py, {MOST['longest file'] + 1} lines"
        in measure("small_house", small.parent).lines()
    )


def test_every_file_that_the_architecture_page_names_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w./]+\.(?:py|tsx?|js))`", text))
    assert "coordinator/inbox.py" in named
    files = [
        f"/{file.relative_to(ROOT)}"
        for folder in (PACKAGE, "labextension/src")
        for file in (ROOT / folder).rglob("*.*")
    ]
    assert [
        name for name in sorted(named) if not (ROOT / name).is_file() and not any(f.endswith(f"/{name}") for f in files)
    ] == []
