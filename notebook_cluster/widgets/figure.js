// The figure of a live panel. anywidget gives a widget two seconds to begin, and never hands another message to one that took
// longer; plotly's script has 5 MB, which a busy computer does not read in that time. So this begins at once, keeps in their
// order the messages that come while the script is read, and hands them to plotly's own widget when it is there.

const MESSAGES = [
  "addTraces", "deleteTraces", "moveTraces", "restyle", "relayout", "update", "animate", "removeLayoutProps", "removeTraceProps",
].map((name) => `_py2js_${name}`);

/** One script for all figures of a page. */
const scripts = (globalThis[Symbol.for("notebook-cluster.scripts")] ??= new Map());

function read(text) {
  if (!scripts.has(text)) {
    const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
    const reading = import(address).finally(() => URL.revokeObjectURL(address));
    reading.catch(() => scripts.delete(text));
    scripts.set(text, reading);
  }
  return scripts.get(text);
}

/**
 * The model as plotly sees it. What plotly would report to the kernel, every redraw and hover, is dropped: nobody asked for
 * it, and it makes a busy kernel look idle.
 */
function heldModel(model) {
  const listeners = [];
  let said = {};
  return {
    get: (name) => (name in said ? said[name] : model.get(name)),
    set: (name, value) => name.startsWith("_js2py_") || model.set(name, value),
    save_changes() {},
    on: (name, callback) => listeners.push({ name, callback }),
    /** Hands `value` over as the message `name`. A view that fails keeps it from no other. */
    tell(name, value) {
      said = { [name]: value };
      for (const listener of listeners.filter((one) => one.name === `change:${name}`)) {
        try {
          listener.callback();
        } catch (error) {
          console.error("a view of the curves could not show a change", error);
        }
      }
      said = {};
    },
    /** Ends listening for all that `begin` registers. */
    during(begin) {
      const before = listeners.length;
      const ended = begin();
      const own = listeners.slice(before);
      return () => {
        for (const one of own) listeners.splice(listeners.indexOf(one), 1);
        ended?.();
      };
    },
  };
}

export default () => {
  let [held, reading] = [null, null];

  function initialize({ model }) {
    held = heldModel(model);
    let waiting = [];
    // A message is a value that is set and taken back.
    for (const name of MESSAGES) {
      model.on(`change:${name}`, () => {
        const value = model.get(name);
        if (value === null || value === undefined) return;
        if (waiting) waiting.push([name, value]);
        else held.tell(name, value);
      });
    }
    reading = read(model.get("_plotly")).then((plotly) => {
      const widget = plotly.default();
      widget.initialize({ model: held });
      for (const [name, value] of waiting) held.tell(name, value);
      waiting = null;
      return widget;
    });
    reading.catch(() => {}); // Each view says so.
  }

  /** A figure that is taken away while the script is read is not drawn. */
  function render({ el }) {
    let [gone, end] = [false, null];
    reading.then(
      (plotly) => {
        if (!gone) end = held.during(() => plotly.render({ el }));
      },
      (error) => {
        el.textContent = `The curves cannot be drawn here: plotly's script could not be read (${error}).`;
      }
    );
    return () => {
      gone = true;
      end?.();
    };
  }

  return { initialize, render };
};
