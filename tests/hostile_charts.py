"""Charts as a hostile node would make them, and such as people make: for tests of the allow-list and in a browser."""

from typing import Any

PLOTLY = "application/vnd.plotly.v1+json"
VEGA = "application/vnd.vega.v5+json"
VEGA_LITE = "application/vnd.vegalite.v5+json"
Chart = dict[str, Any]
_ROWS = [{"x": 1, "y": 2, "c": "a"}, {"x": 2, "y": 3, "c": "b"}, {"x": 3, "y": 1, "c": "a"}]
_XY = {"x": {"field": "x", "type": "quantitative"}, "y": {"field": "y", "type": "quantitative"}}


def vega_lite(**changes: Any) -> Chart:
    """A small scatter plot, with ``changes``."""
    return {"data": {"values": _ROWS}, "mark": "point", "encoding": _XY} | changes


def vega(mark: Chart | None = None, **changes: Any) -> Chart:
    """Three symbols, with ``changes``; ``mark``: of the mark."""
    place = {"x": {"field": "x", "mult": 20}, "y": {"field": "y", "mult": 20}}
    symbols = {"type": "symbol", "from": {"data": "t"}, "encode": {"enter": place}}
    return {
        "width": 90,
        "height": 90,
        "data": [{"name": "t", "values": _ROWS}],
        "marks": [symbols | (mark or {})],
    } | changes


def plotly(trace: Chart | None = None, **layout: Any) -> Chart:
    """A line, with changes of its trace and its layout."""
    return {"data": [{"type": "scatter", "x": [1, 2], "y": [1, 2]} | (trace or {})], "layout": layout}


def _encoded(properties: Chart, kind: str = "symbol") -> Chart:
    place = {"x": {"value": 9}, "y": {"value": 9}}
    return {"type": kind, "from": {"data": "t"}, "encode": {"enter": place | properties}}


def hostile_vega(there: str) -> list[Chart]:
    """Vega that would fetch from ``there``, listen to the page or run script, each in another way."""
    image = {"url": {"value": there}, "width": {"value": 20}, "height": {"value": 20}}
    computed = {"url": {"signal": f"'{there}?' + datum.x"}, "width": {"value": 20}, "height": {"value": 20}}
    listens = {"events": "body:keydown", "update": "event.key"}
    cursor = f"'ur' + 'l({there}), auto'"
    page = "datum.mark.group.context.dataflow._el.ownerDocument.body.innerHTML"
    found = [{"type": "formula", "as": "cursor", "expr": cursor}, {"type": "formula", "as": "k", "expr": "1"}]
    tables = [{"name": "t", "values": _ROWS}, {"name": "u", "values": [{"k": 1}], "transform": found}]
    lookup = {"type": "lookup", "from": "u", "key": "k", "fields": ["x"], "values": ["cursor"]}
    pictures = [{"name": "t", "values": [{"marktype": "image", "items": [{"url": there}]}]}]
    return [
        vega({"transform": [{"type": "formula", "as": "cursor", "expr": cursor}]}),
        vega({"transform": {"type": "formula", "as": {"signal": "'cur' + 'sor'"}, "expr": cursor}}),
        vega({"transform": [{"type": "formula", "as": "href", "expr": f"'{there}'"}]}),
        vega({"transform": [{"type": "formula", "as": "items", "expr": "data('t')"}], "type": "group"}, data=pictures),
        vega({"transform": [{"type": "formula", "as": "text", "expr": page}]}),
        vega({"transform": [lookup]}, data=tables),
        vega({"type": "group", "marks": [{"type": "text", "transform": [lookup | {"as": ["cursor"]}]}]}, data=tables),
        vega(_encoded({"mark": {"signal": "data('t')[0]"}}), data=pictures),
        vega(axes=[{"scale": "x", "encode": {"labels": {"update": {"mark": {"signal": "data('t')[0]"}}}}}]),
        vega(data=[{"name": "t", "url": there}]),
        vega(data=[{"name": "t", "url": {"signal": f"'{there}'"}}]),
        vega(data=[{"name": "t", "values": _ROWS, "format": {"type": "json"}, "async": True, "url": there}]),
        vega(data={"name": "t", "url": there}),
        vega(_encoded(image, "image")),
        vega(_encoded(computed, "image")),
        vega(_encoded({"url": {"field": "c"}}, "image"), data=[{"name": "t", "values": [{"c": there}]}]),
        vega({"marks": [_encoded(image, "image")], "type": "group"}),
        vega(_encoded({"href": {"value": there}})),
        vega(_encoded({"cursor": {"value": f"url({there}), auto"}})),
        vega(_encoded({"cursor": {"signal": f"'ur' + 'l({there}), auto'"}})),
        vega(_encoded({"fill": {"value": f"url({there}#a)"}})),
        vega(signals=[{"name": "cursor", "value": f"url({there}), auto"}]),
        vega(signals=[{"name": "a", "bind": {"input": "image", "src": there}}]),
        vega(signals=[{"name": "a", "bind": {"input": "text", "autofocus": "", "onfocus": f"fetch('{there}')"}}]),
        vega(signals=[{"name": "a", "bind": {"input": "range", "style": f"background:url({there})"}}]),
        vega(signals=[{"name": "a", "bind": {"element": "body", "event": "keydown"}}]),
        vega(signals=[{"name": "a", "on": [listens]}]),
        vega(signals=[{"name": "a", "update": "event.view.fetch('x')"}]),
        vega(signals=[{"name": "event", "value": 1}, {"name": "a", "update": "event.view"}]),
        vega(signals=[{"name": "a", "update": "constructor.constructor('alert(1)')()"}]),
        vega(signals=[{"name": "a", "update": "''['const' + 'ructor']"}]),
        vega(signals=[{"name": "a", "update": "datum['constructor']"}]),
        vega(signals=[{"name": "a", "update": "regexp('a')"}]),
        vega(signals=[{"name": "a", "update": "test(/a/, 'b')"}]),
        vega(signals=[{"name": "a", "update": "{toString: 1}"}]),
        vega(signals=[{"name": "a", "update": "`${1}`"}]),
        vega(signals=[{"name": "a", "update": "warn('x')"}]),
        vega(signals=[{"name": "a", "update": "window.x"}]),
        vega(signals=[{"name": "a", "update": "\\u0065vent.view"}]),
        vega(signals=[{"name": "a", "value": [{"signal": "event.view"}]}]),
        vega(scales=[{"name": "s", "type": "ordinal", "range": [{"signal": "event.view"}]}]),
        vega(usermeta={"embedOptions": {"config": there}}),
        vega(config={"mark": {"href": there}}),
        vega(axes=[{"scale": "x", "encode": {"labels": {"update": {"href": {"value": there}}}}}]),
        vega(data=[{"name": "t", "values": _ROWS, "on": [{"trigger": "a", "insert": "b"}]}]),
        vega(data=[{"name": "t", "values": "a,b\n1,2", "format": {"type": "csv"}}]),
        vega(data=[{"name": "t", "values": [{"__proto__": {"url": there}}]}]),
        vega({"encode": {"url": {"fill": {"value": "red"}}}}),
        vega(_encoded({"url": {"value": there}})),
        vega(_encoded({"shape": {"value": there}}, "IMAGE")),
        vega(data=[{"name": "t", "transform": [{"type": "extent", "field": "x", "signal": "cursor"}]}]),
        vega(URL=there),
        vega(**{"url ": there}),
    ]


def hostile_vega_lite(there: str) -> list[Chart]:
    """The same in Vega-Lite."""
    picture = {"mark": {"type": "image", "width": 20, "height": 20}}
    lookup = {"lookup": "x", "from": {"data": {"url": there}, "key": "x", "fields": ["y"]}}
    return [
        vega_lite(data={"url": there}),
        vega_lite(data={"url": there, "format": {"type": "csv"}}),
        vega_lite(data={"values": _ROWS, "url": there}),
        vega_lite(data={"name": "n"}, datasets={"n": there}),
        vega_lite(**picture, encoding=_XY | {"url": {"value": there}}),
        vega_lite(**picture, encoding=_XY | {"url": {"field": "c"}}, data={"values": [{"x": 1, "y": 1, "c": there}]}),
        vega_lite(mark="image", encoding=_XY | {"url": {"value": there}}),
        vega_lite(mark={"type": "boxplot", "box": {"type": "image", "url": there}}),
        vega_lite(mark={"type": "line", "point": {"type": "image", "url": there}}),
        vega_lite(mark={"type": "point", "href": there}),
        vega_lite(mark={"type": "point", "cursor": f"url({there}), auto"}),
        vega_lite(mark={"type": "point", "cursor": {"expr": f"'ur' + 'l({there}), auto'"}}),
        vega_lite(encoding=_XY | {"href": {"value": there}}),
        vega_lite(transform=[lookup]),
        vega_lite(layer=[vega_lite(data={"url": there})]),
        vega_lite(hconcat=[{"vconcat": [vega_lite(data={"url": there})]}]),
        vega_lite(usermeta={"embedOptions": {"config": there}}),
        vega_lite(usermeta={"embedOptions": {"patch": there}}),
        vega_lite(usermeta={"embedOptions": {"loader": {"baseURL": there}}}),
        vega_lite(config={"mark": {"href": there}}),
        vega_lite(config={"style": {"a": {"href": there}}}),
        vega_lite(config={"customFormatTypes": True}),
        vega_lite(encoding=_XY | {"text": {"field": "x", "formatType": "event.view.alert(1)//"}}),
        vega_lite(encoding=_XY | {"x": {"field": "x", "timeUnit": "year') + event.view('"}}),
        vega_lite(encoding=_XY | {"x": {"field": "x", "aggregate": "mean') + event.view('"}}),
        vega_lite(params=[{"name": "a", "bind": {"input": "image", "src": there}}]),
        vega_lite(params=[{"name": "a", "bind": {"input": "text", "onfocus": f"fetch('{there}')", "autofocus": ""}}]),
        vega_lite(params=[{"name": "a", "select": "point", "bind": {"x": {"input": "image", "src": there}}}]),
        vega_lite(params=[{"name": "a", "bind": {"element": "#main", "event": "click"}}]),
        vega_lite(params=[{"name": "cursor", "value": f"url({there})"}]),
        vega_lite(params=[{"name": "a", "select": {"type": "point", "on": "body:keydown"}}]),
        vega_lite(params=[{"name": "a", "select": {"type": "point", "on": {"type": "keydown", "source": "window"}}}]),
        vega_lite(params=[{"name": "a", "select": {"type": "point", "on": "click[event.view.x]"}}]),
        vega_lite(params=[{"name": "a", "select": {"type": "point", "toggle": "event.view"}}]),
        vega_lite(params=[{"name": "a", "expr": "event.view"}]),
        vega_lite(params=[{"name": "a", "value": {"x": {"signal": "event.view"}}}]),
        vega_lite(transform=[{"calculate": "datum.constructor", "as": "z"}]),
        vega_lite(transform=[{"filter": {"and": ["datum.x > 1", {"not": "event.view"}]}}]),
        vega_lite(encoding=_XY | {"x": {"field": "x", "axis": {"labelExpr": "event.view"}}}),
        vega_lite(
            encoding=_XY | {"x": {"field": "x", "axis": {"encode": {"labels": {"update": {"href": {"value": there}}}}}}}
        ),
        vega_lite(encoding=_XY | {"x": {"field": "x", "axis": {"values": [{"signal": "event.view"}]}}}),
        vega_lite(encoding=_XY | {"color": {"condition": {"test": "event.view", "value": "red"}, "value": "blue"}}),
        vega_lite(title={"text": {"signal": "event.view"}}),
        vega_lite(title={"text": {"expr": "event.view"}}),
        vega_lite(data={"values": [{"constructor": {"prototype": {"url": there}}}]}),
        vega_lite(autosize={"__proto__": {"url": there}}),
        vega_lite(Data={"url": there}),
    ]


def hostile_plotly(there: str) -> list[Chart]:
    """Figures that would load from ``there`` or lead to it."""
    link = f"<a href='{there}'>x</a>"
    styled = f"<span style='filter:url({there})'>x</span>"
    picture = {"source": there, "x": 0, "y": 1, "sizex": 1, "sizey": 1, "xref": "paper", "yref": "paper"}
    button = {"method": "relayout", "label": "x"}
    return [
        plotly(images=[picture]),
        plotly(images=[picture | {"source": "data:image/svg+xml;base64,AAAA"}]),
        plotly(template={"layout": {"images": [picture]}}),
        plotly(template={"layout": {"imagedefaults": picture}}),
        plotly(template={"data": {"image": [{"type": "image", "source": there}]}}),
        plotly({"type": "image", "source": there}),
        plotly({"type": "image", "source": [there]}),
        plotly({"type": "scattergeo", "lon": [1], "lat": [1]}),
        plotly({"type": "choropleth", "locations": ["FRA"], "z": [1]}),
        plotly({"type": "choropleth", "geojson": there, "locations": ["a"], "z": [1]}),
        plotly({"type": "scattermap", "lon": [1], "lat": [1]}, map={"style": there}),
        plotly({"type": "scattermapbox", "lon": [1], "lat": [1]}, mapbox={"style": there}),
        plotly({"type": "densitymap", "lon": [1], "lat": [1], "z": [1]}),
        plotly({"type": "choroplethmapbox", "geojson": there, "locations": ["a"], "z": [1]}),
        plotly({"type": "SCATTERGEO"}),
        plotly({"type": ["scattergeo"]}),
        plotly(geo={"resolution": 50}),
        plotly(map={"style": there}),
        plotly(mapbox2={"style": there}),
        plotly(title={"text": link}),
        plotly(title={"text": styled}),
        plotly(title={"text": link.upper()}),
        plotly(title={"text": f"<a\nhref='{there}'>"}),
        plotly(annotations=[{"text": link, "x": 1, "y": 1}]),
        plotly({"text": [link, "x"], "mode": "text"}),
        plotly({"hovertemplate": styled}),
        plotly({"customdata": [["<a hr", f"ef='{there}'>x"]], "hovertemplate": "%{customdata[0]}%{customdata[1]}"}),
        plotly({"meta": {"a": [styled]}}),
        plotly({"labelalias": {"1": link}}),
        plotly(xaxis={"tickprefix": "<", "ticksuffix": f"a href='{there}'>"}),
        plotly(xaxis2={"title": {"text": styled}}),
        plotly(title={"text": rf"$\style{{background:url({there})}}{{x}}$"}),
        plotly(title={"text": rf"$\href{{{there}}}{{x}}$"}),
        plotly({"name": r"\require{x}"}, title={"text": "$"}),
        plotly(updatemenus=[{"buttons": [button | {"args": [{"images[0].source": there}]}]}]),
        plotly(updatemenus=[{"buttons": [button | {"args": ["images[0].source", there]}]}]),
        plotly(updatemenus=[{"buttons": [button | {"args2": [{"images": [picture]}]}]}]),
        plotly(updatemenus=[{"buttons": [{"method": "restyle", "args": [{"type": ["scattergeo"]}]}]}]),
        plotly(updatemenus=[{"buttons": [{"method": "animate", "args": [[{"layout": {"images": [picture]}}]]}]}]),
        plotly(sliders=[{"steps": [{"method": "relayout", "args": [{"template.layout.images": [picture]}]}]}]),
        plotly(modebar={"add": ["sendChartToCloud"]}),
        plotly({"marker": {"color": f"url({there})"}}),
        plotly(Images=[picture]),
        plotly(**{"images ": [picture]}),
        plotly({"__proto__": {"source": there}}),
        plotly(meta={"__proto__": {"images": [picture]}}),
        plotly() | {"frames": [{"layout": {"images": [picture]}}]},
        plotly() | {"frames": [{"data": [{"type": "scattergeo"}]}]},
        plotly() | {"frames": {"0": {"layout": {"images": [picture]}}}},
        plotly() | {"data": {"0": {"type": "scattergeo"}}},
        plotly() | {"layout": [{"images": [picture]}]},
    ]


def borderline(there: str) -> list[tuple[str, Chart]]:
    """Charts that pass, with an address in texts or put together by expressions: where a page would be styled with
    it, it would be fetched."""
    picture = f"'ur' + 'l({there}#a)'"
    styles = {name: {"signal": picture} for name in ("fill", "stroke", "font", "shape", "tooltip", "ariaRole", "blend")}
    marks = {name: {"expr": picture} for name in ("fill", "stroke", "font", "shape", "tooltip", "description", "blend")}
    look = {"font": {"family": f"x, '{there}'", "shadow": f"1px 1px 1px {there}"}, "text": there}
    return [
        (
            VEGA,
            vega(_encoded(styles), background={"signal": picture}, title={"text": there, "font": {"signal": picture}}),
        ),
        (VEGA, vega(_encoded(styles | {"text": {"value": there}}, "text"), description=there)),
        (VEGA, vega(signals=[{"name": "background", "update": picture}, {"name": "padding", "update": picture}])),
        (VEGA_LITE, vega_lite(mark={"type": "point", **marks}, background={"expr": picture}, title=there)),
        (VEGA_LITE, vega_lite(mark={"type": "text", "text": there, **marks}, description=there)),
        (PLOTLY, plotly({"name": there, "text": [there, there], "mode": "text", "textfont": look["font"]}, title=look)),
        (PLOTLY, plotly({"hovertext": [there] * 2}, annotations=[{"x": 1, "y": 1, **look}], paper_bgcolor=there)),
    ]


def harmless() -> list[tuple[str, Chart]]:
    """Charts with their data in them, as libraries write them: they are drawn."""
    brush = {"name": "brush", "select": {"type": "interval", "encodings": ["x"]}}
    cut = {"name": "cut", "value": 1, "bind": {"input": "range", "min": 0, "max": 3, "step": 1, "name": "cut "}}
    color = {"condition": {"param": "brush", "field": "c", "type": "nominal"}, "value": "lightgray"}
    altair = vega_lite(
        config={"view": {"continuousWidth": 300, "continuousHeight": 300}}, data={"name": "data-1"},
        datasets={"data-1": _ROWS}, mark={"type": "point"}, params=[brush, cut],
        transform=[{"calculate": "datum.x * 2 + 1", "as": "z"}, {"filter": "datum.z > cut && isValid(datum['y'])"}],
        encoding=_XY | {"color": color, "tooltip": [{"field": "c", "type": "nominal"}]},
        **{"$schema": "https://vega.github.io/schema/vega-lite/v6.1.0.json"},
    )  # fmt: skip
    bars = {"type": "bar", "cornerRadius": 2}
    count = {"x": {"field": "c", "type": "nominal"}, "y": {"aggregate": "count", "title": "how many"}}
    extent = [{"type": "extent", "field": "x", "signal": "span_of_x"}]
    bins = [{"type": "bin", "field": "x", "extent": {"signal": "span_of_x"}, "as": ["from", "to"]}]
    data = [{"name": "t", "values": _ROWS, "transform": extent}, {"name": "b", "source": "t", "transform": bins}]
    axis = {"scale": "s", "orient": "bottom", "encode": {"labels": {"update": {"fill": {"value": "red"}}}}}
    drawn = [{"type": "formula", "as": "size", "expr": "datum.datum.x * 100"}, {"type": "force", "as": ["x", "y"]}]
    return [
        (VEGA_LITE, altair),
        (VEGA_LITE, vega_lite(mark=bars, encoding=count, title="of $5 at http://example.org")),
        (VEGA, vega({"transform": drawn}, axes=[axis], scales=[{"name": "s", "type": "linear", "range": "width"}])),
        (VEGA, vega(_encoded({"fill": {"value": "red"}, "x": {"signal": "10 * datum.x"}}), data=data)),
        (PLOTLY, plotly({"hovertemplate": "<b>%{x}</b><br>c=<unk><extra></extra>"}, title={"text": "x < 3, $5"})),
    ]
