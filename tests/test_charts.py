"""The allow-list for charts of nodes: what could fetch, listen or run is refused by name, what people draw passes."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notebook_cluster import security
from notebook_cluster.security import chart_grammar
from notebook_cluster.security.chart_grammar import ChartRefused
from notebook_cluster.security.sanitise import safe_chart
from notebook_cluster.security.vega_expressions import ExpressionRefused, check_expression
from tests.hostile_charts import (
    PLOTLY,
    VEGA,
    VEGA_LITE,
    borderline,
    harmless,
    hostile_plotly,
    hostile_vega,
    hostile_vega_lite,
    plotly,
    vega,
    vega_lite,
)

THERE = "http://elsewhere.example/canary"
HOSTILE = [
    *((PLOTLY, chart) for chart in hostile_plotly(THERE)),
    *((VEGA, chart) for chart in hostile_vega(THERE)),
    *((VEGA_LITE, chart) for chart in hostile_vega_lite(THERE)),
]


@pytest.mark.parametrize(("mime", "chart"), HOSTILE)
def test_chart_that_could_load_lead_or_run_is_refused(mime: str, chart: dict[str, Any]) -> None:
    with pytest.raises(ChartRefused):
        safe_chart(mime, chart)


@pytest.mark.parametrize("mime", [VEGA, VEGA_LITE, PLOTLY])
def test_chart_is_refused_however_deep_the_address_lies(mime: str) -> None:
    for depth in (1, 5, 20):
        inner: Any = {"url": THERE}
        for _ in range(depth):
            inner = {"layout": [inner]}
        chart = {PLOTLY: plotly(), VEGA: vega(), VEGA_LITE: vega_lite()}[mime]
        with pytest.raises(ChartRefused):
            safe_chart(mime, chart | {"layout": inner})


@pytest.mark.parametrize(("mime", "chart"), [*harmless(), *borderline(THERE)])
def test_chart_with_its_data_in_it_passes_unchanged_but_for_what_steers_the_renderer(
    mime: str, chart: dict[str, Any]
) -> None:
    safe = safe_chart(mime, chart)
    steering = {"$schema", "usermeta", "config"} if mime == PLOTLY else {"$schema", "usermeta"}
    assert {key: value for key, value in safe.items() if key not in steering} == {
        key: value for key, value in chart.items() if key not in steering
    }


def test_schema_and_embedding_are_written_here() -> None:
    safe = safe_chart(VEGA_LITE, vega_lite(**{"$schema": "https://vega.github.io/schema/vega/v5.json"}))
    assert safe["$schema"] == "https://vega.github.io/schema/vega-lite/v5.json"
    options = safe["usermeta"]["embedOptions"]
    assert options["actions"] == {
        "export": {"png": True, "svg": False}, "source": False, "compiled": False, "editor": False,
    }  # fmt: skip
    assert (options["ast"], options["renderer"], options["tooltip"]) == (True, "canvas", False)
    hostile = {"data": {VEGA: vega()}, "metadata": {VEGA: {"embed_options": {"config": THERE, "actions": True}}}}
    shown = security.safe_output("display_data", hostile)
    assert shown is not None
    assert shown["metadata"] == {VEGA: {"embed_options": options}}


def test_config_of_plotly_is_written_here() -> None:
    config = {"plotlyServerURL": THERE, "topojsonURL": THERE, "responsive": True, "showSendToCloud": True}
    safe = safe_chart(PLOTLY, plotly() | {"config": config})
    off = ("displaylogo", "showLink", "showEditInChartStudio", "showSendToCloud")
    assert safe["config"] == {"responsive": True, **dict.fromkeys(off, False)}


def test_figure_of_plotly_express_with_its_template_passes() -> None:
    express = pytest.importorskip("plotly.express")
    rows = [{"x": 1, "y": 2.5, "c": "a"}, {"x": 2, "y": 3.5, "c": "b"}]
    for figure in (
        express.scatter(rows, x="x", y="y", color="c", title="a <b>title</b>"),
        express.bar(rows, x="c", y="y", animation_frame="x"),
        express.histogram(rows, x="y", marginal="box", template="plotly_dark"),
        express.sunburst(rows, path=["c", "x"], values="y"),
        express.imshow([[1, 2], [3, 4]]),
    ):
        chart = json.loads(figure.to_json())
        safe = safe_chart(PLOTLY, chart)
        assert safe["data"] == chart["data"]
        assert not safe["layout"]["template"]["data"].keys() & {"scattergeo", "choropleth", "scattermap"}
        assert not safe["layout"]["template"]["layout"].keys() & {"geo", "map", "mapbox"}


def test_refused_chart_is_shown_as_text_with_a_line_that_says_why() -> None:
    safe = security.safe_bundle({VEGA_LITE: vega_lite(data={"url": THERE}), "text/plain": "<VegaLite 5 object>"})
    assert safe == {
        "text/plain": "<VegaLite 5 object>\n[notebook-cluster: the chart is shown as text: 'data.url' "
        f"({THERE}) may load from an address or lead to one: put what it stands for into the chart, "
        "or show a picture (PNG)]"
    }
    beside = security.safe_bundle({PLOTLY: plotly(geo={}), "text/html": "<b>x</b>"})
    assert set(beside) == {"text/plain", "text/html"}
    assert "layout.geo" in beside["text/html"]


def test_long_or_strange_keys_and_values_are_shortened_in_the_line() -> None:
    with pytest.raises(ChartRefused) as told:
        safe_chart(PLOTLY, plotly(**{"a\n\u202e<b>" + "x" * 500: "y\x1b[31m" * 100}))
    assert len(str(told.value)) < 400
    assert str(told.value).isprintable()


@pytest.mark.parametrize("mime", [VEGA, VEGA_LITE, PLOTLY])
def test_depth_and_number_of_values_are_bounded_before_anything_recurses(
    mime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(ChartRefused, match="deep"):
        safe_chart(mime, {"data": deep})
    monkeypatch.setattr(chart_grammar, "MOST_VALUES", 1_000)
    with pytest.raises(ChartRefused, match="more than 1000 values"):
        safe_chart(mime, {"data": [{"values": [{"x": 1.5}] * 2_000}]})


def test_sequence_that_would_hang_the_page_is_refused() -> None:
    def of_vega(**numbers: Any) -> dict[str, Any]:
        return vega(data=[{"name": "t", "transform": [{"type": "sequence", **numbers}]}])

    impute = {"impute": "y", "key": "x", "value": 0, "keyvals": {"stop": 1e12}}
    for mime, chart in (
        (VEGA, of_vega(start=0, stop=1e12)),
        (VEGA, of_vega(start=0, stop={"signal": "1e12"})),
        (VEGA, of_vega(start=1, stop=0, step=-1e-9)),
        (VEGA_LITE, vega_lite(data={"sequence": {"start": 0, "stop": 1, "step": 1e-9}})),
        (VEGA_LITE, vega_lite(transform=[impute])),
    ):
        with pytest.raises(ChartRefused):
            safe_chart(mime, chart)
    safe_chart(VEGA, of_vega(start=0, stop=100, step=0.1))
    safe_chart(VEGA_LITE, vega_lite(data={"sequence": {"start": 0, "stop": 12.7, "step": 0.1, "as": "x"}}))


def test_list_of_numbers_counts_as_one_value() -> None:
    numbers = [0.5, 1] * 100_000
    scatter = plotly({"type": "scattergl", "x": numbers, "y": numbers, "marker": {"color": numbers}})
    assert safe_chart(PLOTLY, scatter)["data"] == scatter["data"]
    numbers.append(float("inf"))
    with pytest.raises(ChartRefused, match="not JSON"):
        safe_chart(PLOTLY, plotly({"x": numbers[-3:]}))


@pytest.mark.parametrize("value", [None, [], "x", 3, True, {"data": float("nan")}, {1: 2}])
def test_what_is_no_json_object_is_refused(value: Any) -> None:
    for mime in (VEGA, VEGA_LITE, PLOTLY):
        with pytest.raises(ChartRefused):
            safe_chart(mime, value)


_KEYS = st.sampled_from(["data", "layout", "url", "mark", "type", "values", "config", "name", "args", "signals", "on"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(THERE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS | st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_KEYS, _VALUES, max_size=6), st.sampled_from([VEGA, VEGA_LITE, PLOTLY]))
def test_any_json_is_refused_or_passes_and_nothing_else_is_raised(chart: dict[str, Any], mime: str) -> None:
    refusal = ""
    try:
        json.dumps(safe_chart(mime, chart), allow_nan=False)
    except ChartRefused as error:
        refusal = str(error)
    assert "\n" not in refusal


@pytest.mark.parametrize(
    "text",
    [
        "datum.x * 2 + 1", "datum['a b'] > 3 && !isNaN(datum.y)", "cut / (1 - 2)", "brush.x[0]",
        "format(datum.x, ',.2f')", "if(datum.x > 1, 'red', \"blue\")", "[1, 2, datum.x]",
        "timeFormat(datum.d, '%b') + '\\n'", "PI", "1e3 % .5",
        "data('t')[0].x", "-datum.x ? 1 : 2",
    ],
)  # fmt: skip
def test_expression_that_computes_passes(text: str) -> None:
    check_expression(text, {"cut", "brush"})


@pytest.mark.parametrize(
    "text",
    [
        "event", "window.x", "alert(1)", "datum.constructor", "datum['__proto__']", "datum[a]", "datum.x()",
        "datum.x['a' + 'b']", "(1)('x')", "[1][0](2)", "a => 1", "x = 1", "/a/.test('b')", "1 + /a/", "'a' in b",
        "`a`", "new Date()", "'\\u0041'", "1;2", "a ?? b", "// x", "/* x */ 1", "{a: 1}", "ev\u0435nt", "this",
        "item.url", "format.constructor('x')", "'" + "x" * 6_000 + "'", "0x1f", "'a\nb'", "datum . constructor",
    ],
)  # fmt: skip
def test_expression_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ExpressionRefused):
        check_expression(text, {"cut"})
