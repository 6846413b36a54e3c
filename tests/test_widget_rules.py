"""Which widgets of nodes are relayed, and what of them: no script, nothing that is not the node's, bounded."""

import json
from typing import Any

import pytest

from notebook_cluster.coordinator.kernels import widget_models
from notebook_cluster.coordinator.kernels.widget_models import Model, NodeModels
from notebook_cluster.security.widgets import KINDS, label_state, refusal, widget_kind

SCRIPT = "<img src=x onerror=alert(1)><b>bold</b>"


def state(model: str, module: str = "@jupyter-widgets/controls", **traits: Any) -> dict[str, Any]:
    return {"_model_module": module, "_model_name": model, "_model_module_version": "2.0.0", **traits}


def add(models: NodeModels, comm_id: str, traits: dict[str, Any]) -> Model:
    model = models.open(comm_id, traits)
    assert model is not None
    return model


def opened(model: str, **traits: Any) -> dict[str, Any]:
    """The state that views get of a widget that a node opens so."""
    return add(NodeModels("mini", 1, "salt"), "id", state(model, **traits)).state


def widget_classes() -> list[type]:
    import ipywidgets

    kinds = [value for value in vars(ipywidgets.widgets).values() if isinstance(value, type)]
    return sorted({kind for kind in kinds if issubclass(kind, ipywidgets.Widget)}, key=str)


@pytest.mark.parametrize("kind", widget_classes())
def test_a_relayed_widget_has_the_views_and_traits_of_ipywidgets(kind: Any) -> None:
    names = {name: trait.default_value for name, trait in kind.class_traits(sync=True).items()}
    known = KINDS.get((names["_model_module"], names["_model_name"]))
    if known is None or not known.traits:
        return
    for name, value in known.constants().items():
        assert value == names[name], name
    ours = {name for name in names if not name.startswith(("_model_", "_view_"))}
    assert ours <= {*known.traits, *known.references}


def test_the_core_controls_are_relayed_with_all_that_they_say() -> None:
    import ipywidgets as w

    options: dict[str, Any] = {"options": [("one", 1), ("two", 2)]}
    made = [
        w.IntSlider(3, description="steps"), w.FloatRangeSlider(), w.Checkbox(True), w.Text("a < b"),
        w.Dropdown(**options), w.SelectMultiple(**options, index=[1]), w.ToggleButtons(**options, icons=["check"]),
        w.DatePicker(), w.TagsInput(value=["x"]), w.ColorPicker(value="#ff0000"), w.Play(), w.Valid(False),
        w.Layout(width="50%", border="1px solid rgb(1, 2, 3)", margin="1px 2em"), w.IntProgress(4, bar_style="danger"),
    ]  # fmt: skip
    for widget in made:
        said = {name: value for name, value in widget.get_state().items() if not isinstance(value, bytes)}
        said = json.loads(json.dumps({name: value for name, value in said.items() if name not in ("layout", "style")}))
        assert (
            add(NodeModels("mini", 1, "salt"), "id", said).state.items()
            >= {
                name: value for name, value in said.items() if name not in ("_view_count", "description_allow_html")
            }.items()
        )


@pytest.mark.parametrize("model", ["HTMLModel", "HTMLMathModel"])
def test_html_values_are_cleaned(model: str) -> None:
    assert opened(model, value=SCRIPT)["value"] == "<img><b>bold</b>"


def test_mathematics_where_it_is_drawn_loads_nothing() -> None:
    hostile, plain = r"$\style{cursor:url(http://elsewhere/x),auto}{x}$", r"$\alpha^2$"
    for model, trait in (("LabelModel", "value"), ("ButtonModel", "description"), ("ValidModel", "readout")):
        assert "\\style" not in opened(model, **{trait: hostile})[trait]
        assert opened(model, **{trait: plain})[trait] == plain
    assert "\\style" not in opened("DropdownModel", _options_labels=[hostile])["_options_labels"][0]
    assert "\\style" not in label_state(hostile)["value"]
    assert "mathjax_ignore" in opened("HTMLMathModel", value=hostile)["value"]
    assert opened("HTMLMathModel", value=plain)["value"] == plain
    assert opened("TextareaModel", value=hostile)["value"] == hostile


def test_a_description_is_text_whatever_the_node_asks_for() -> None:
    safe = opened("CheckboxModel", description=SCRIPT, description_allow_html=True)
    assert (safe["description"], safe["description_allow_html"]) == (SCRIPT, False)


def test_the_node_does_not_choose_the_view() -> None:
    safe = opened("TextModel", value=SCRIPT, _view_name="HTMLView", _view_module="evil", _view_module_version="9")
    assert (safe["_view_name"], safe["_view_module"]) == ("TextView", "@jupyter-widgets/controls")
    assert safe["_view_module_version"] == "2.0.0"


@pytest.mark.parametrize(
    "value",
    ["url(https://evil.example/x)", "URL(x)", "u\\72l(x)", "image-set('x' 1x)", "red;background:url(x)", "a/*b*/", 7,
     "expression(alert(1))", "x" * 400],
)  # fmt: skip
def test_a_style_that_could_load_something_is_left_out(value: Any) -> None:
    safe = opened("CheckboxStyleModel", background=value, description_width="5em")
    assert "background" not in safe
    assert safe["description_width"] == "5em"


@pytest.mark.parametrize("value", ["-500px", "calc(0px - 500px)", "1px -2px"])
def test_a_layout_does_not_move_over_other_parts_of_the_page(value: str) -> None:
    module = "@jupyter-widgets/base"
    model = add(NodeModels("mini", 1, ""), "id", state("LayoutModel", module, margin=value, top=value, width="3px"))
    assert not {"margin", "top"} & set(model.state)
    assert model.state["width"] == "3px"


def test_traits_of_the_wrong_type_and_unknown_ones_are_left_out() -> None:
    safe = opened("IntSliderModel", value="<b>", max=[1], min=True, step=1 << 70, x="x", disabled="yes", readout=None)
    assert not {"value", "max", "min", "step", "x", "disabled"} & set(safe)
    assert safe["readout"] is None


def test_a_picture_is_not_svg_and_no_address() -> None:
    assert opened("ImageModel", format="svg+xml", value=b"<svg>").keys() & {"format"} == set()
    assert "format" not in opened("ImageModel", format="url", value=b"https://evil.example")
    assert opened("ImageModel", format="png", value=b"\x89PNG")["value"] == b"\x89PNG"


def test_classes_of_the_page_are_not_borrowed() -> None:
    safe = opened("BoxModel", _dom_classes=["jp-Dialog", "widget-interact", "x y"])
    assert safe["_dom_classes"] == ["widget-interact"]


@pytest.mark.parametrize(
    "traits",
    [
        state("AnyModel", "anywidget", _esm="export default {}"),
        state("ControllerModel"),
        state("LinkModel"),
        {**state("IntSliderModel"), "_model_module_version": "1.5.0"},
        state("HTMLModel", "evil-widgets"),
        {"_model_module": ["x"], "_model_name": {}},
    ],
)
def test_other_kinds_are_replaced_by_a_label_that_says_so(traits: dict[str, Any]) -> None:
    models = NodeModels("mini", 1, "salt")
    model = add(models, "id", traits)
    assert model.state["_model_name"] == "LabelModel"
    assert "is not relayed from nodes" in model.state["value"]
    with pytest.raises(ValueError, match="is not relayed from nodes"):
        models.view("id")
    assert models.update("id", {"value": SCRIPT, "_view_name": "HTMLView"}) is None


def test_the_name_of_a_refused_kind_is_one_short_line() -> None:
    text = refusal(state("Evil\n\x1b[31mModel" * 100, "m" * 1000))
    assert not {"\n", "\x1b"} & set(text)
    assert len(text) < 250


def test_children_are_the_nodes_own_widgets_under_the_ids_of_views() -> None:
    models = NodeModels("mini", 1, "salt")
    child = add(models, "a", state("IntSliderModel"))
    box = add(models, "b", state("VBoxModel", children=["IPY_MODEL_a", "IPY_MODEL_0123456789abcdef", "x"]))
    assert "children" not in box.state  # not a list of references
    children = ["IPY_MODEL_a", "IPY_MODEL_0123456789abcdef"]
    changed = models.update("b", {"children": children, "layout": "IPY_MODEL_nothing"})
    assert changed is not None
    assert box.state["children"] == [f"IPY_MODEL_{child.public}"]
    assert box.state["layout"] is None


def test_the_same_id_on_two_nodes_and_in_two_kernels_is_another_widget() -> None:
    ids = set()
    for node, incarnation, salt in (("mini", 1, "x"), ("desk", 1, "x"), ("mini", 2, "x"), ("mini", 1, "y")):
        model = add(NodeModels(node, incarnation, salt), "id", state("ButtonModel"))
        ids.add(model.public)
    assert len(ids) == 4


def test_a_box_in_itself_and_one_of_endlessly_many_widgets_stay_empty() -> None:
    models = NodeModels("mini", 1, "salt")
    models.open("a", state("BoxModel"))
    last = "a"
    for number in range(40):
        models.open(f"c{number}", state("BoxModel", children=[f"IPY_MODEL_{last}"] * 2))
        last = f"c{number}"
    sizes = [model.state.get("children") for model in models.all()]
    assert None in sizes  # beyond some depth they were left out
    box = add(models, "b", state("BoxModel", children=["IPY_MODEL_a"]))
    assert box.state["children"]
    assert models.update("a", {"children": ["IPY_MODEL_b"]}) is None


def test_a_link_in_the_browser_carries_numbers_only() -> None:
    models = NodeModels("mini", 1, "salt")
    for name in ("Play", "IntSlider", "Text", "HTML"):
        models.open(name, state(f"{name}Model"))
    ends: dict[str, Any] = {"source": ["IPY_MODEL_Play", "value"], "target": ["IPY_MODEL_IntSlider", "value"]}
    good = add(models, "1", state("LinkModel", **ends))
    assert not good.refusal
    assert good.state["target"][0] != "IPY_MODEL_IntSlider"
    for source, target in (("Text", "HTML"), ("IntSlider", "HTML"), ("HTML", "IntSlider"), ("IntSlider", "unknown")):
        ends = {"source": [f"IPY_MODEL_{source}", "value"], "target": [f"IPY_MODEL_{target}", "value"]}
        bad = add(models, "2", state("DirectionalLinkModel", **ends))
        assert bad.refusal, (source, target)
        if source != "HTML":
            assert models.update("1", {"source": ends["source"], "target": ends["target"]}) is None
    assert models.update("1", {"target": ["IPY_MODEL_IntSlider", "description_allow_html"]}) is None


def test_an_id_that_is_opened_again_as_another_kind_is_another_widget_for_who_refers_to_it() -> None:
    models = NodeModels("mini", 1, "salt")
    first = add(models, "x", state("IntSliderModel"))
    second = add(models, "x", state("HTMLModel"))
    assert first.public != second.public


def test_the_outputs_of_an_output_widget_are_cleaned_and_it_catches_nothing_of_the_notebook() -> None:
    bad = {"output_type": "display_data", "data": {"text/html": SCRIPT, "application/javascript": "x"}, "metadata": {}}
    models = NodeModels("mini", 1, "salt")
    traits = state("OutputModel", "@jupyter-widgets/output", msg_id="of-the-notebook", outputs=[bad, {"x": "y"}])
    model = add(models, "id", {**traits, "_model_module_version": "1.0.0"})
    assert model.state["msg_id"] == ""
    assert model.state["outputs"] == [
        {"output_type": "display_data", "data": {"text/html": "<img><b>bold</b>"}, "metadata": {}}
    ]


def test_the_number_of_widgets_and_their_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widget_models, "MOST_MODELS", 3)
    monkeypatch.setattr(widget_models, "MOST_MODEL_BYTES", 2000)
    models = NodeModels("mini", 1, "salt")
    assert add(models, "0", state("TextModel", value="x" * 3000)).refusal
    for number in range(5):
        models.open(str(number), state("TextModel", value="x" * 500))
    assert len(list(models.all())) == 3
    with pytest.raises(ValueError, match="over 3 widgets are open on mini"):
        models.view("4")
    assert models.update("1", {"value": "y" * 3000}) is None
    models.close("1")
    assert models.open("4", state("TextModel")) is not None


def test_what_is_not_a_state_names_no_kind() -> None:
    assert widget_kind({}) is None
    assert widget_kind(state("IntSliderModel", _model_module_version=None)) is None
    assert widget_kind(state("IntSliderModel", _model_module_version="^2.0.0")) is not None


def test_a_layout_is_a_layout_and_a_style_a_style() -> None:
    models = NodeModels("mini", 1, "salt")
    models.open("slider", state("IntSliderModel"))
    models.open("layout", state("LayoutModel", "@jupyter-widgets/base"))
    refers = {"layout": "IPY_MODEL_slider", "style": "IPY_MODEL_layout"}
    assert models.update("slider", refers) is not None
    model = models.get("slider")
    assert model is not None
    assert (model.state["layout"], model.state["style"]) == (None, None)
    assert add(models, "box", state("BoxModel", children=["IPY_MODEL_layout"])).state["children"] == []


def test_bytes_of_a_picture_travel_beside_its_state() -> None:
    model = add(NodeModels("mini", 1, "salt"), "id", state("ImageModel", format="png", value=b"\x89PNG"))
    event = model.event("open", model.state)
    assert (event.buffer_paths, event.buffers) == ([["value"]], [b"\x89PNG"])
    assert "value" not in event.state
