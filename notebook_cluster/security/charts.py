"""Charts of nodes (plotly, Vega, Vega-Lite) as they may be drawn in the reader's page, or why not."""

import re
from typing import Any

from notebook_cluster.security.chart_grammar import ChartRefused, check_bounds
from notebook_cluster.security.plotly_charts import PlotlyReader
from notebook_cluster.security.vega_charts import EMBED_OPTIONS, VegaLiteReader, VegaReader

_KINDS = re.compile(r"application/vnd\.(?:(plotly)\.v1|(vega|vegalite)\.v(\d{1,2}))\+json")
_LIBRARIES = {"vega": "vega", "vegalite": "vega-lite"}


def is_chart(mime: str) -> bool:
    """Whether ``mime`` is that of a kind of chart."""
    return _KINDS.fullmatch(mime) is not None


def safe_chart(mime: str, chart: Any) -> dict[str, Any]:
    """``chart`` of this MIME type, which loads nothing and leads nowhere.

    Nothing that draws is changed: where something is not understood the chart is refused. What steers the renderer is
    written here.

    Raises:
        ChartRefused: which key, its value, why, and the way out, on one line.
    """
    kind = _KINDS.fullmatch(mime)
    if kind is None or not isinstance(chart, dict):
        raise ChartRefused("it is no JSON object")
    check_bounds(chart)
    if kind[1]:
        return PlotlyReader().read(chart)
    reader = VegaReader() if kind[2] == "vega" else VegaLiteReader()
    reader.read(chart)
    schema = f"https://vega.github.io/schema/{_LIBRARIES[kind[2]]}/v{int(kind[3])}.json"
    return {**chart, "$schema": schema, "usermeta": {"embedOptions": EMBED_OPTIONS}}


def chart_metadata(mime: str) -> dict[str, Any]:
    """Metadata to display with a safe chart of this MIME type: how JupyterLab embeds it, whatever the chart says."""
    return {} if "plotly" in mime else {"embed_options": EMBED_OPTIONS}
