"""What nodes display in the tests of ``test_browser_safety.py``: output and widgets that would run a script or fetch.

WHO, THERE and HERE stand for who displays it and for addresses.
"""

DISPLAYS = """
from IPython.display import HTML, SVG, Markdown, display, update_display
def script(what):
    return f'''<img src=x onerror="(window.ran = window.ran || []).push('WHO {what}')">'''
display(HTML(script("html") + "<b>WHO bold</b>"))
display(HTML(f'<svg><script>window.ran = ["WHO script"]</script></svg><a href="javascript:{script("link")}">x</a>'))
display(HTML(r"$\\href{javascript:window.ran=['WHO latex']}{WHO latex}$"))
display(Markdown(script("markdown") + " [WHO link](javascript:alert(1))"))
onload = "(window.ran = window.ran || []).push('WHO svg')"
display(SVG(f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" onload="{onload}"><circle r="9"/></svg>'))
handle = display(HTML("first"), display_id="same")
update_display(HTML(script("update") + "<i>WHO updated</i>"), display_id="same")
metadata = {"text/html": {"isolated": False}, "x": script("metadata")}
display({"text/html": script("isolated")}, raw=True, metadata=metadata)
display({"application/javascript": "window.ran = ['WHO javascript']", "text/plain": "WHO plain"}, raw=True)
title = {"data": [{"y": [1, 2]}], "layout": {"title": {"text": script("plotly")}}}
display({"application/vnd.plotly.v1+json": title, "text/plain": "WHO chart"}, raw=True)
print(script("stdout"))
ours = {"token": script("ours"), "place": 0, "nodes": [script("ours")]}
mime = "application/vnd.notebook-cluster.output+json"
display({mime: ours, "text/html": script("ours"), "text/plain": "x"}, raw=True)
"""
WIDGETS = """
import ipywidgets as w
text = script("widget")
display(w.HTML(script("widgets.HTML") + "<b>WHO html</b>", description=script("description")))
display(w.HTMLMath(script("widgets.HTMLMath") + r"$\\href{javascript:window.ran=['WHO math']}{WHO math}$"))
display(w.Button(description=text, tooltip=text, icon=text), w.Checkbox(description=text, description_allow_html=True))
display(w.ToggleButtons(options=[text], tooltips=[text], icons=[text]), w.RadioButtons(options=[text]))
display(w.Dropdown(options=[text], description=text), w.SelectMultiple(options=[text]), w.Combobox(options=[text]))
display(w.Tab([w.Label(text)], titles=[text]), w.Accordion([w.Label(text)], titles=[text]), w.TagsInput(value=[text]))
display(w.Text(text, placeholder=text), w.Textarea(text), w.Valid(False, readout=text))
display(w.SelectionSlider(options=[text]), w.Password(text), w.Select(options=[text]), w.FileUpload(description=text))
display(w.IntSlider(readout_format="d", description=text), w.Label("WHO widgets are there"))
class Disguised(w.Text):
    _view_name = __import__("traitlets").Unicode("HTMLView").tag(sync=True)
display(Disguised(script("view of another widget")))
a, b = w.Text(script("link")), w.HTML("")
w.jslink((a, "value"), (b, "value"))
display(a, b)
out = w.Output()
display(out)
with out:
    display(HTML(script("Output") + "<b>WHO caught</b>"))
out.append_display_data(HTML(script("append_display_data")))
"""
SCRIPTED = """
import anywidget
class Scripted(anywidget.AnyWidget):
    _esm = "export default { render({ el }) { el.innerHTML = '%s' } }" % script("anywidget").replace("'", "\\\\'")
display(Scripted())
"""
FAILS = """
class Error(Exception):
    pass
Error.__name__ = '''<img src=x onerror="(window.ran = window.ran || []).push('WHO error name')">'''
raise Error('''WHO failed <img src=x onerror="(window.ran = window.ran || []).push('WHO error')">'''
            "\\x1b]8;;javascript:alert(1)\\x07link\\x1b]8;;\\x07\\x1b[31m<script>window.ran = ['WHO ansi']</script>")
"""
NAMED = """
from notebook_cluster.magics.display.output import CellDisplay
from notebook_cluster.magics.display.publishing import ShellPublisher
from notebook_cluster.protocol.views import Output
def named(who):
    return f'''<img src=x onerror="(window.ran = window.ran || []).push('{who} node name')">'''
shown = CellDisplay(ShellPublisher(get_ipython()), named("cluster"))
for rank, who in enumerate(("first", "second")):
    kind = {"name": "stdout", "text": f"{who} has a name\\n"}
    shown.add([Output(node=named(who), rank=rank, kind="stream", content=kind)])
    html = {"data": {"text/html": "<b>rich</b>"}, "metadata": {}}
    shown.add([Output(node=named(who), rank=rank, kind="display_data", content=html)])
shown.note(named("note"))
shown.finish()
"""
FETCHING_MARKUP = r"""
import base64
from IPython.display import HTML, SVG, Markdown, Latex, GeoJSON, display
math = r"\style{background-image:url(THERE?math)}{x} \href{THERE?math}{x} \class{x}{y} \require{THERE}"
# MathJax is told to be safe in notebooks, and lets this style pass.
math += r" \style{cursor:url(THERE?cursor),auto}{x}"
forms = [
    "<img src='THERE'>", "<img srcset='THERE 2x'>", "<div style='background:url(THERE)'>x</div>",
    "<table background='THERE'><tr><td background='THERE'>x</td></tr></table>", "<link rel=stylesheet href='THERE'>",
    "<video src='THERE' poster='THERE'></video>", "<audio src='THERE'></audio>", "<object data='THERE'></object>",
    "<embed src='THERE'>", "<iframe src='THERE'></iframe>", "<svg><image href='THERE'/><use href='THERE#a'/></svg>",
    "<style>@import 'THERE'; body { background: url(THERE) }</style>", "<base href='THERE'>",
    "<meta http-equiv=refresh content='0;url=THERE'>", "<input type=image src='THERE'>", "<q cite='THERE'>x</q>",
    "<div style=\"border-image:url(THERE) 9;list-style:url(THERE);cursor:url(THERE),auto\">x</div>",
    "<ul style='list-style-image:url(THERE)'><li style='content:url(THERE)'>x</li></ul>",
    "<div style='width:image-set(\"THERE\" 1x);color:u\\72l(THERE)'>x</div>", "<img src='HERE'>",
    "$" + math + "$", "$$" + math + "$$", "\\[" + math + "\\]", "\\begin{equation}" + math + "\\end{equation}",
    "<pre>$" + math + "$</pre>", "<span>$\\style{background-image:</span>url(THERE)}{x}$",
]
for form in forms:
    display(HTML(form))
    display({"text/html": form}, raw=True, metadata={"text/html": {"isolated": True}})
    display(Markdown(form))
drawing = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><image href='THERE' width='9' height='9'/>" \
    "<style>@import 'THERE'; rect { fill: url(THERE#a) }</style><rect width='9' height='9'/></svg>"
display(SVG(drawing))
encoded = base64.b64encode(drawing.encode()).decode()
display(HTML(f"<img src='data:image/svg+xml;base64,{encoded}'>"))
display(Markdown("![x](THERE) ![x](HERE)"), Latex("$" + math + "$"))
place = {"type": "FeatureCollection", "features": []}
altair6 = {"data": {"url": "THERE"}}
others = {
    "application/geo+json": place, "application/pdf": "JVBERi0=", "application/json": {"a": "THERE"},
    "text/vnd.mermaid": "graph TD\nA-->B", "application/vnd.jupyter.stdout": "THERE",
    "application/javascript": "fetch('THERE')", "image/svg+xml": drawing, "image/png": "THERE",
    "text/latex": "$" + math + "$", "application/xhtml+xml": "<img src='THERE'/>",
    "application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "application/vnd.vegalite.v5.json": altair6,
    "application/vnd.notebook-cluster.output+json": {"html": "<img src='THERE'>"},
    "application/vnd.bokehjs_load.v0+json": "x",
}
for mime, value in others.items():
    for metadata in ({"url": "THERE", "url_prefix": "THERE", "url_template": "THERE"}, {}):
        display({mime: value, "text/plain": mime}, raw=True, metadata={mime: metadata})
handle = display(HTML("first"), display_id="fetches")
handle.update({"text/html": "<img src='THERE'>"}, raw=True)
print("\x1b]8;;THERE\x07link\x1b]8;;\x07 THERE")
print("WHO markup is there")
"""
FETCHING_WIDGETS = r"""
import ipywidgets as w
math = r"$\style{background-image:url(THERE?math)}{x} \href{THERE?math}{x} \style{cursor:url(THERE?widget),auto}{x}$"
texts = [
    "<img src='THERE'>", "<div style='background:url(THERE)'>x</div>", "THERE", "url(THERE)",
    "image-set('THERE' 1x)", "red;background:url(THERE)", "x\" src=\"THERE", "</style><img src='THERE'>", math,
]
made = 0
for name in dir(w):
    kind = getattr(w, name)
    is_widget = isinstance(kind, type) and issubclass(kind, w.DOMWidget)
    if not is_widget or name in ("DOMWidget", "CoreWidget", "Controller"):
        continue
    same = []
    for text in texts:
        try:
            widget = kind()
        except Exception:
            break
        same.append(widget)
        made += 1
        for part in (widget, widget.layout, getattr(widget, "style", None)):
            if part is None or isinstance(part, str):
                continue
            for key in part.keys:
                if key in ("layout", "style", "comm") or key.startswith(("_model", "_view")) and key != "_view_count":
                    continue
                for value in (text, [text], text.encode()):
                    buffers = [value] if isinstance(value, bytes) else None
                    state = {} if buffers else {key: value}
                    data = {"method": "update", "state": state, "buffer_paths": [[key]] if buffers else []}
                    part.comm.send(data, buffers=buffers)
    display(w.VBox(same))
for form in ("url", "svg+xml", "png"):
    picture = w.Image(value=b"THERE", format="png")
    display(picture)
    picture.comm.send({"method": "update", "state": {"format": form}, "buffer_paths": []})
display(w.Video(value=b"THERE", format="url"), w.Audio(value=b"THERE", format="url"))
out = w.Output()
display(out)
with out:
    display({"text/html": "<img src='THERE'>"}, raw=True)
    display({"application/vnd.vegalite.v5+json": {"data": {"url": "THERE"}, "mark": "point", "encoding": {}}}, raw=True)
hostile = {"data": {"url": "THERE"}, "mark": "point", "encoding": {}}
stored = {"output_type": "display_data", "data": {"application/vnd.vegalite.v5+json": hostile}, "metadata": {}}
late = w.Output()
display(late)
late.comm.send({"method": "update", "state": {"outputs": [stored]}, "buffer_paths": []})
assert made > 100, made
display(w.Label("WHO widgets are there"))
"""
