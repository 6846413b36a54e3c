"""Links that save what a page shows: a picture as SVG, points as CSV. They need nothing but themselves."""

import csv
import io
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from notebook_cluster.client.curve_rows import curve_rows, outside_name, spreadsheet_safe
from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.thinning import evenly
from notebook_cluster.widgets.formatting import escaped, plain

_ENDINGS = {"text/csv": "csv", "image/svg+xml": "svg"}


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """``rows`` below ``heads`` as a CSV file; no text in it is a formula to a spreadsheet."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(heads)
    table.writerows([spreadsheet_safe(one) if isinstance(one, str) else one for one in row] for row in rows)
    return text.getvalue()


def thinned(series: Sequence[Series], share: float) -> list[Series]:
    """Of each curve that share of its points, but at least four; all of them where ``share`` is 1 or more."""
    return [one if share >= 1 else _thinner(one, share) for one in series]


def _thinner(one: Series, share: float) -> Series:
    places = evenly(one.value, max(int(len(one.step) * share), 4))
    return Series(
        node=one.node, job=one.job, run=one.run, name=one.name, step=[one.step[place] for place in places],
        time=[one.time[place] for place in places], value=[one.value[place] for place in places],
    )  # fmt: skip


def series_csv(series: Sequence[Series]) -> str:
    """``series`` as a CSV file, a row for each point."""
    heads = ("metric", "node", "job", "run", "step", "time", "value")
    return csv_text(
        heads,
        [
            (row.metric, row.node, row.job, row.run, row.step, f"{row.time:.3f}", row.value)
            for row in curve_rows(series, [])
        ],
    )


def data_link(name: str, kind: str, text: str, classes: str = "") -> str:
    """A link, as markup, that saves ``text``, of MIME type ``kind``, as ``name`` with the ending of its type."""
    ending = _ENDINGS[kind]
    data = quote(text, safe=" /:=,;()+-.", errors="replace")
    title = escaped(f"Save {plain(f'{name}.{ending}', 80)}")
    return (
        f'<a class="nbc-save {classes}" download="{escaped(f"{outside_name(name)}.{ending}")}" aria-label="{title}" '
        f'href="data:{kind};charset=utf-8,{data}">{ending.upper()}</a>'
    )
