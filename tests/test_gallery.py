"""The executed notebooks of the site: they are those of today, and their pages load nothing."""

import re
from types import SimpleNamespace

import nbformat
import pytest

from docs import gallery


@pytest.mark.parametrize("name", gallery.SHOWN)
def test_what_was_executed_is_what_people_open(name: str) -> None:
    executed, source = gallery.read(name), nbformat.read(gallery.source_of(name), as_version=4)
    assert [(cell.id, cell.source) for cell in executed.cells] == [(cell.id, cell.source) for cell in source.cells], (
        f"python -m docs.gallery {name} runs it anew"
    )
    for cell in executed.cells:
        failed = cell.cell_type == "code" and any(output.output_type == "error" for output in cell.outputs)
        assert not failed or "raises-exception" in cell.metadata.get("tags", ()), cell.id
    shown = next(cell for cell in executed.cells if cell.id == gallery.SHOWN[name])
    assert shown.outputs, f"nothing is seen where the picture of {name} begins"


@pytest.mark.parametrize("name", gallery.SHOWN)
def test_its_page_loads_nothing_and_names_nobody(name: str) -> None:
    page = gallery.render(name)
    assert "<script" not in page
    assert re.findall(r"(?:src|href|action)=[\"']?(?:https?:)?//[^\"'> ]+", re.sub(r"<a\b[^>]*>", "", page)) == []
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')]+", page) == []
    assert not re.search(r"/tmp/(?!ann\b)|(?<!\w)/work/|Intel\(R\)", page)
    assert gallery.title_of(gallery.read(name)) in page


def test_each_picture_leads_to_its_page() -> None:
    source = gallery.FOLDER.with_suffix(".md").read_text()
    page, other = (SimpleNamespace(file=SimpleNamespace(src_uri=name)) for name in ("gallery.md", "index.md"))
    made = gallery.on_page_markdown(source, page, None, None)
    for name in gallery.SHOWN:
        assert gallery.picture_of(name).exists()
        assert made.count(f"({gallery.page_of(name)})") == 2
    assert gallery.on_page_markdown(source, other, None, None) == source
    with pytest.raises(ValueError, match="no picture of 02_text"):
        gallery.on_page_markdown(source.replace("02_text.png", "x.png"), page, None, None)
