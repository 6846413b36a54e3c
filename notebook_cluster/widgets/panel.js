// The live panel. It draws the widget's `state` (see model.py) and sends {action, target, id, code}; it keeps no state of the
// cluster. Texts come from other machines: they only ever go through textContent and setAttribute, never through markup.

const SURE_MILLISECONDS = 4000;
const QUIET_MILLISECONDS = 500;
const SILENT_MILLISECONDS = 6000;
const MANY_STATES = 4; // that came while one was drawn
const ANSWER_LEVELS = { running: "info", done: "good", failed: "bad" };

/** An element with a class, attributes and children; a text child becomes a text node. */
function element(tag, className = "", attributes = {}, children = []) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Writes only what changed, so that selections, focus and screen readers are left alone. */
function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function writeAttribute(target, name, value) {
  if (target.getAttribute(name) !== value) target.setAttribute(name, value);
}

function show(target, visible) {
  if (target.hidden === visible) target.hidden = !visible;
}

/** Makes the children of `parent` match `rows` by key: elements of rows that stay are kept, with their focus. */
function reconcile(parent, rows, keyOf, make) {
  const kept = parent.nbcRows ?? new Map();
  const next = new Map();
  rows.forEach((row, index) => {
    const key = keyOf(row);
    const entry = kept.get(key) ?? make(row);
    entry.update(row);
    next.set(key, entry);
    if (parent.children[index] !== entry.root) parent.insertBefore(entry.root, parent.children[index] ?? null);
  });
  for (const [key, entry] of kept) if (!next.has(key)) entry.root.remove();
  parent.nbcRows = next;
}

/**
 * A button; with `sure` it asks once more by its own label before it acts. A press so soon after another one, or with a
 * key that is held down, is part of that one: it asks nothing and answers nothing. Escape takes the question back.
 */
function button(label, { className = "", sure = "", act }) {
  const made = element("button", `nbc-button ${className}`, { type: "button" }, [label]);
  let [asks, last, name, question] = [false, -Infinity, "", ""];
  let timers = [];
  const draw = () => {
    made.classList.toggle("nbc-sure", asks);
    write(made, asks ? sure : label);
    const said = asks ? question : name;
    if (said) writeAttribute(made, "aria-label", said);
    else made.removeAttribute("aria-label");
  };
  const calm = () => {
    timers.forEach(clearTimeout);
    document.removeEventListener("keydown", escape, true);
    asks = false;
    draw();
  };
  const escape = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    calm();
  };
  const ask = () => {
    timers.forEach(clearTimeout);
    made.classList.add("nbc-early");
    timers = [setTimeout(() => made.classList.remove("nbc-early"), QUIET_MILLISECONDS), setTimeout(calm, SURE_MILLISECONDS)];
    document.addEventListener("keydown", escape, true);
    asks = true;
    draw();
  };
  made.addEventListener("click", (event) => {
    const early = performance.now() - last < QUIET_MILLISECONDS || event.detail > 1;
    last = performance.now();
    if (sure && (early || !asks)) {
      if (asks || !early) ask();
      return;
    }
    calm();
    act();
  });
  made.addEventListener("keydown", (event) => event.repeat && event.preventDefault());
  made.addEventListener("blur", calm);
  /** What a screen reader says instead of the labels. */
  made.nbcName = (calmName, sureName) => {
    [name, question] = [calmName, sureName];
    draw();
  };
  return made;
}

function pill() {
  const root = element("span", "nbc-pill");
  return {
    root,
    update(level, text) {
      root.className = `nbc-pill nbc-${level}`;
      write(root, text);
    },
  };
}

function factTile() {
  const [label, value, note] = ["label", "value", "note"].map((part) => element("div", `nbc-fact-${part}`));
  return {
    root: element("div", "nbc-fact", {}, [label, value, note]),
    update(fact) {
      write(label, fact.label);
      write(value, fact.value);
      write(note, fact.note);
    },
  };
}

function memoryMeter() {
  const peak = element("div", "nbc-meter-peak");
  const used = element("div", "nbc-meter-used");
  const bar = element("div", "nbc-meter", { role: "meter", "aria-valuemin": "0", "aria-valuemax": "1" }, [peak, used]);
  const [now, most] = [element("span"), element("span", "nbc-muted")];
  return {
    roots: [bar, element("div", "nbc-memory", {}, [now, most])],
    update(memory) {
      const text = `${memory.kind} ${memory.used} of ${memory.total}`;
      peak.style.width = `${100 * memory.peak_fraction}%`;
      used.style.width = `${100 * memory.fraction}%`;
      writeAttribute(bar, "aria-valuenow", String(memory.fraction));
      writeAttribute(bar, "aria-valuetext", `${text}, peak ${memory.peak}`);
      writeAttribute(bar, "aria-label", memory.kind);
      write(now, text);
      write(most, `peak ${memory.peak}`);
    },
  };
}

function numbers() {
  const names = { step: "Step", loss: "Loss", round: "Round", wait: "Wait" };
  const cells = Object.entries(names).map(([key, label]) => [key, label, element("div", "nbc-number")]);
  const children = cells.map(([, label, value]) =>
    element("div", "", {}, [element("div", "nbc-number-label", {}, [label]), value])
  );
  return {
    root: element("div", "nbc-numbers", {}, children),
    update: (node) => cells.forEach(([key, label, value]) => {
      write(value, node[key]);
      writeAttribute(value, "title", `${label} ${node[key]}`);
    }),
  };
}

function nodeCard(ask) {
  let current = null;
  const [rank, name, condition] = [element("span", "nbc-rank", { title: "rank" }), element("span", "nbc-node-name nbc-cut nbc-grow"), pill()];
  const [device, meter, figures] = [element("div", "nbc-small nbc-muted nbc-cut"), memoryMeter(), numbers()];
  const vitals = element("div", "nbc-small nbc-muted");
  const [extra, checkpoint, waiting, replaying] = ["nbc-wide", "nbc-cut", "nbc-cut", "nbc-cut nbc-replaying"].map((kind) => element("div", `nbc-small nbc-muted ${kind}`));
  const [reason, leftOut, log] = [element("div", "nbc-reason"), element("div", "nbc-reason nbc-warning"), element("div", "nbc-log nbc-code")];
  const skip = button("Skip", { className: "nbc-quiet", act: () => ask("skip", current.name, `Skipping the cell that ${current.name} replays…`) });
  const restart = button("Restart", { className: "nbc-quiet", sure: "Restart?", act: () => ask("restart", current.name, `Restarting ${current.name}…`) });
  const remove = button("Remove", { className: "nbc-quiet nbc-danger", sure: "Remove?", act: () => ask("remove", current.name, `Removing ${current.name}…`) });
  const root = element("div", "nbc-node", { role: "listitem" }, [
    element("div", "nbc-row", {}, [rank, name, condition.root]), device, vitals, ...meter.roots, figures.root, checkpoint, waiting,
    replaying, reason, leftOut, log, element("div", "nbc-row nbc-wrap nbc-foot", {}, [extra, element("span", "nbc-row nbc-buttons", {}, [skip, restart, remove])]),
  ]);
  const update = (node) => {
    current = node;
    root.style.setProperty("--nbc-rank", node.colour);
    writeAttribute(root, "data-node", node.name);
    skip.nbcName(`Skip the cell that ${node.name} replays`, "");
    restart.nbcName(`Restart ${node.name}`, `Really restart ${node.name}?`);
    remove.nbcName(`Remove ${node.name}`, `Really remove ${node.name}?`);
    write(rank, node.rank);
    write(name, node.name);
    writeAttribute(name, "title", node.about);
    condition.update(node.level, node.condition);
    write(device, `${node.device} on ${node.peer}`);
    write(vitals, node.vitals);
    meter.update(node.memory);
    figures.update(node);
    write(extra, node.extra);
    writeAttribute(extra, "title", node.extra);
    write(checkpoint, node.checkpoint);
    writeAttribute(checkpoint, "title", node.checkpoint);
    write(waiting, `Waiting: ${node.waiting}`);
    write(reason, node.reason);
    reason.className = `nbc-reason nbc-${node.level}`;
    write(replaying, node.replaying);
    write(leftOut, node.left_out);
    write(log, node.log.join("\n"));
    const parts = [
      [vitals, node.vitals], [waiting, node.waiting], [replaying, node.replaying], [skip, node.replaying], [reason, node.reason],
      [leftOut, node.left_out], [log, node.log.length],
    ];
    for (const [part, visible] of parts) show(part, Boolean(visible));
  };
  return { root, update };
}

/** The field for the code that a peer shows. It stays, with what was typed, until the peer is paired. */
function codeField(open, peerName, target) {
  let asked = "";
  let late = false; // no answer yet: it is still shown when it comes, but one may ask again
  const input = element("input", "nbc-input", { type: "text", autocomplete: "off", spellcheck: "false", maxlength: "64", placeholder: "tiger-lamp-42" });
  const said = element("span", "nbc-said", { role: "status", "aria-live": "polite" });
  const submit = () => {
    if (!input.value.trim() || (asked && !late)) return;
    asked = open.ask("add", target(), `Adding ${peerName()}…`, { code: input.value, inline: true });
    refresh();
  };
  const add = button("Add", { className: "nbc-primary", act: submit });
  const root = element("div", "nbc-pair", {}, [element("span", "nbc-small nbc-muted", {}, ["Its code"]), input, add, said]);
  root.hidden = true;
  input.addEventListener("keydown", (event) => {
    event.stopPropagation(); // JupyterLab has shortcuts on letters
    if (event.key === "Enter" && !event.repeat) submit();
    if (event.key === "Escape") show(root, false);
  });
  const refresh = () => {
    const answer = asked && open.answer(asked);
    if (answer) {
      write(said, answer.text);
      said.className = `nbc-said nbc-${ANSWER_LEVELS[answer.status]}`;
      late = Boolean(answer.late);
      if (answer.status !== "running" && !late) asked = "";
      if (answer.status === "failed" && !late) input.select();
      if (answer.status === "done") input.value = "";
    }
    add.disabled = Boolean(asked) && !late;
  };
  return {
    root,
    /** Stays open when asked again: the second click of a double click would close it. Escape does. */
    open() {
      show(root, true);
      input.focus();
    },
    update(needed) {
      writeAttribute(input, "aria-label", `Code of ${peerName()}`);
      writeAttribute(add, "aria-label", `Add ${peerName()} with this code`);
      refresh();
      if (!needed && !asked) show(root, false);
    },
  };
}

function peerRow(open) {
  let current = null;
  const [name, about, condition] = [element("span", "nbc-node-name nbc-cut"), element("span", "nbc-small nbc-muted"), pill()];
  const code = codeField(open, () => current.name, () => current.target);
  const lead = button("Lead", { act: () => open.ask("hand_over", current.target, `Handing the cluster over to ${current.name}…`) });
  const add = button("Add", { className: "nbc-primary", act: () => current.needs_code ? code.open() : open.ask("add", current.target, `Adding ${current.name}…`) });
  return {
    root: element("div", "nbc-peer", { role: "listitem" }, [name, about, condition.root, element("span", "nbc-row", {}, [lead, add]), code.root]),
    update(peer) {
      current = peer;
      code.update(peer.needs_code);
      const why = peer.condition === "connected" ? "" : peer.blocked;
      write(name, peer.name);
      const how = peer.needs_code ? "shows a code" : "";
      write(about, [peer.device, peer.address, why || peer.found, how].filter(Boolean).join(" · "));
      condition.update(peer.level, peer.condition);
      show(lead, peer.can_move);
      const where = peer.name === "local" ? "this machine" : peer.name;
      writeAttribute(lead, "title", `Lead the cluster from ${where}; what runs goes on`);
      lead.nbcName(`Lead the cluster from ${where}`, "");
      add.disabled = Boolean(peer.blocked);
      writeAttribute(add, "title", peer.blocked || `Add ${peer.name} to the cluster`);
      writeAttribute(add, "aria-label", peer.blocked ? `Add ${peer.name}: ${peer.blocked}` : `Add ${peer.name}`);
    },
  };
}

function invitation() {
  const [code, command] = [element("div", "nbc-invited-code"), element("div", "nbc-small nbc-code nbc-command")];
  const words = element("div", "", {}, [element("div", "nbc-small nbc-muted", {}, ["A machine joins this cluster with the code"]), code, command]);
  const root = element("div", "nbc-invitation", { role: "note", "aria-label": "Invitation" }, [words]);
  let picture = null;
  return {
    root,
    update(invited) {
      write(code, invited.code);
      write(command, invited.command);
      if (!invited.qr.startsWith("data:image/svg+xml")) return;
      if (!picture) root.prepend((picture = element("img", "", { alt: "QR code of the command" })));
      writeAttribute(picture, "src", invited.qr);
    },
  };
}

/** A row of the class: who, whether in, what became of the last cell. */
function pupilRow(ask) {
  let current = null;
  const [name, why, did] = [element("span", "nbc-node-name"), element("div", "nbc-small nbc-muted nbc-why"), element("span", "nbc-did")];
  const standing = pill();
  const act = (action, label, doing, sure = "") => button(label, { className: sure ? "nbc-quiet" : "nbc-primary", sure, act: () => ask(action, current.target, `${doing} ${current.name}…`) });
  const buttons = { add: act("add", "Add", "Adding"), restart: act("restart", "Restart", "Restarting", "Restart?"), remove: act("remove", "Remove", "Removing", "Remove?") };
  buttons.remove.classList.add("nbc-danger");
  const cells = [element("th", "", { scope: "row" }, [name]), element("td", "", {}, [standing.root, why]), element("td", "", {}, [did]),
    element("td", "", {}, [element("span", "nbc-row nbc-buttons", {}, Object.values(buttons))])];
  return {
    root: element("tr", "", {}, cells),
    update(row) {
      current = row;
      write(name, row.name);
      standing.update(row.level, row.standing);
      write(why, row.why);
      write(did, row.cell);
      did.className = `nbc-did nbc-${row.cell_level}`;
      show(why, Boolean(row.why));
      for (const [action, one] of Object.entries(buttons)) {
        const label = action[0].toUpperCase() + action.slice(1);
        one.nbcName(`${label} ${row.name}`, `Really ${action} ${row.name}?`);
        show(one, row.can.includes(action));
      }
    },
  };
}

/** The class: how to come in, as large as a board wants it, and a row for each machine. */
function classBoard(ask) {
  const [code, command] = [element("div", "nbc-board-code"), element("div", "nbc-code nbc-command")];
  const step = (text, line) => element("div", "nbc-board-step", {}, [element("div", "", {}, [text]), line]);
  const share = element("div", "nbc-code nbc-command", {}, ["notebook-cluster share --code"]);
  const words = element("div", "nbc-grow", {}, [element("div", "", {}, ["The code of this class"]), code,
    step("On each laptop", command), step("or, where that does not get through, this and then the code", share)]);
  const invited = element("div", "nbc-board", { role: "note", "aria-label": "How to come in" }, [words]);
  const closed = element("div", "nbc-small nbc-muted", {}, ["Nobody new can come in now: %cluster class start opens it, with a code."]);
  const [said, cell] = [element("span", "nbc-board-said"), element("span", "nbc-muted")];
  const heard = element("div", "nbc-small nbc-warning nbc-heard", { role: "list", "aria-label": "Attempts to come in that failed" });
  const heads = ["Machine", "In the class", "Last cell", "Actions"].map((text) => element("th", "", { scope: "col" }, [text]));
  const rows = element("tbody");
  const table = element("table", "nbc-table nbc-class", { "aria-label": "The class" }, [element("thead", "", {}, [element("tr", "", {}, heads)]), rows]);
  const summary = element("div", "nbc-row nbc-wrap nbc-board-line", { role: "status", "aria-live": "polite" }, [said, cell]);
  const root = element("div", "nbc-class-board", {}, [invited, closed, summary, heard, element("div", "nbc-scroll nbc-class-rows", { tabindex: "0", role: "group", "aria-label": "Machines of the class" }, [table])]);
  const attempt = () => {
    const line = element("div", "", { role: "listitem" });
    return { root: line, update: (one) => write(line, one.text) };
  };
  let picture = null;
  return {
    root,
    update(board) {
      show(invited, Boolean(board.invited));
      show(closed, !board.invited);
      if (board.invited) {
        write(code, board.invited.code);
        write(command, board.invited.command);
        if (!picture) invited.append((picture = element("img", "", { alt: "QR code of the line to type" })));
        if (board.invited.qr.startsWith("data:image/svg+xml")) writeAttribute(picture, "src", board.invited.qr);
      }
      write(said, board.said);
      write(cell, board.cell);
      reconcile(heard, board.heard.map((text) => ({ text })), (one) => one.text, attempt);
      show(heard, Boolean(board.heard.length));
      reconcile(rows, board.rows, (row) => row.key, () => pupilRow(ask));
    },
  };
}

function launchLine() {
  const root = element("div", "nbc-small nbc-launch", { role: "listitem" });
  return { root, update: (launch) => write(root, launch.text) };
}

function eventLine() {
  const [clock, text] = [element("span", "nbc-muted"), element("span", "nbc-event-text")];
  const root = element("div", "nbc-event", {}, [clock, text]);
  return {
    root,
    update(event) {
      root.className = `nbc-event nbc-${event.level}`;
      write(clock, event.clock);
      write(text, event.text);
    },
  };
}

function waitLine() {
  const [name, said, lane] = [element("span", "nbc-cut"), element("span"), element("div", "nbc-lane", { "aria-hidden": "true" })];
  const bar = () => {
    const root = element("div");
    return {
      root,
      update([left, width, text]) {
        Object.assign(root.style, { left: `${left}%`, width: `${width}%` });
        writeAttribute(root, "title", text);
      },
    };
  };
  return {
    root: element("div", "nbc-wait", { role: "listitem" }, [name, lane, said]),
    update(wait) {
      write(name, wait.name);
      write(said, wait.said);
      lane.style.setProperty("--nbc-rank", wait.colour);
      reconcile(lane, wait.bars, (one) => one[2], bar);
    },
  };
}

/** Which number the curves show, and how: a list and two switches above the figure; and a button for their points. */
function curveChoice(choose, savePoints) {
  const metric = element("select", "nbc-input", { "aria-label": "Number that the curves show" });
  const [smooth, log] = ["Smoothed", "Logarithmic"].map((label) => {
    const box = element("input", "", { type: "checkbox" });
    return [box, element("label", "nbc-switch", {}, [box, label])];
  });
  const save = button("CSV", { act: savePoints });
  writeAttribute(save, "aria-label", "Save the points of these curves as CSV");
  writeAttribute(save, "title", "Save the points of these curves; %cluster export saves all points");
  const act = () => choose({ metric: metric.value, smooth: smooth[0].checked, log: log[0].checked });
  [metric, smooth[0], log[0]].forEach((control) => control.addEventListener("change", act));
  metric.addEventListener("keydown", (event) => event.stopPropagation()); // JupyterLab has shortcuts on letters
  let [offered, shown] = ["", ""];
  return {
    root: element("div", "nbc-row nbc-wrap nbc-choice", { role: "group", "aria-label": "Curves" }, [metric, smooth[1], log[1], save]),
    /** Only what changed at the kernel: until it has answered, what was chosen here stays. */
    update(curves) {
      const names = JSON.stringify(curves.metrics);
      if (names !== offered) {
        const chosen = metric.value;
        metric.replaceChildren(...curves.metrics.map(([value, label]) => element("option", "", { value }, [label])));
        metric.value = chosen || curves.metric;
        offered = names;
      }
      const now = JSON.stringify([curves.metric, curves.smooth, curves.log]);
      if (now === shown) return;
      shown = now;
      metric.value = curves.metric;
      smooth[0].checked = curves.smooth;
      log[0].checked = curves.log;
    },
  };
}

/** Have the browser save a file that the kernel made. */
function saveFile({ name, text }) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  element("a", "", { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}

/** What is folded, with what is said of it while it is. */
function fold(name, content) {
  const said = element("span", "nbc-fold-said nbc-cut");
  const summary = element("summary", "nbc-fold", {}, [element("span", "nbc-heading", {}, [name]), said]);
  const root = element("details", "", {}, [summary, content]);
  let touched = false;
  summary.addEventListener("click", () => (touched = true));
  return {
    root,
    update(fold) {
      write(said, fold.said);
      if (!touched && root.open !== fold.open) root.open = fold.open;
    },
  };
}

function answerLine() {
  const root = element("div", "nbc-answer");
  return {
    root,
    update(answer) {
      root.className = `nbc-answer nbc-${ANSWER_LEVELS[answer.status]}`;
      write(root, answer.text);
    },
  };
}

/**
 * What was asked for here and not answered yet: shown at once, replaced by the kernel's answer with the same id. Those
 * asked `inline` are shown by who asked, with answer(), and not in the list.
 */
function questions(model, redraw) {
  let asked = [];
  const inline = new Set();
  const forget = (answers) => {
    const known = new Set(answers.map((answer) => answer.id));
    asked = asked.filter((question) => !known.has(question.id));
  };
  return {
    ask(action, target, text, { code = "", inline: shownElsewhere = false } = {}) {
      const id = `${Date.now()}-${Math.random().toString(36).slice(2)}`;
      if (shownElsewhere) inline.add(id);
      asked.push({ id, text, status: "running" });
      model.send(code ? { action, target, id, code } : { action, target, id });
      redraw();
      setTimeout(() => {
        const silent = asked.find((question) => question.id === id);
        if (silent) Object.assign(silent, { status: "failed", late: true, text: `${text} No answer from the notebook's kernel yet.` });
        if (silent) redraw();
      }, SILENT_MILLISECONDS);
      return id;
    },
    answer(id) {
      return [...model.get("state").answers, ...asked].find((answer) => answer.id === id);
    },
    shown(answers) {
      forget(answers);
      return [...answers, ...asked].filter((answer) => !inline.has(answer.id));
    },
  };
}

/** A figure that was drawn before it was in the page has plotly's own width: tell plotly, which listens to the window. */
function fitFigures(el) {
  const plots = [...(el.closest(".widget-vbox")?.querySelectorAll(".js-plotly-plot") ?? [])];
  const isOff = (plot) => plot.clientWidth > 0 && Math.abs(plot.clientWidth - (plot._fullLayout?.width ?? plot.clientWidth)) > 1;
  if (plots.some(isOff)) window.dispatchEvent(new Event("resize"));
}

/**
 * Draws the newest state, then lets the page rest for as long as that took: of what comes in this time the last one is drawn. A
 * page in which many have piled up tells the kernel that it is behind, which then waits for each state to be drawn (subshell.py).
 */
function drawNewest(model, draw) {
  const view = Math.random().toString(36).slice(2);
  let [resting, come] = [0, 0];
  const drawOnce = () => {
    const { tell } = model.get("state");
    const isBehind = come >= MANY_STATES && !document.hidden; // a page that nobody sees is slow by intention
    const began = performance.now();
    const rested = () => {
      resting = 0;
      if (Number.isInteger(tell) && isBehind) model.send({ action: "behind", view });
      if (tell) model.send({ action: "drawn", view, number: tell });
      if (come) drawOnce();
    };
    come = 0;
    try {
      draw();
    } finally {
      resting = setTimeout(rested, performance.now() - began);
    }
  };
  return {
    take() {
      come += 1;
      if (!resting) drawOnce();
    },
    end: () => clearTimeout(resting),
  };
}

function render({ model, el }) {
  const resized = new ResizeObserver(() => fitFigures(el));
  resized.observe(el);
  const open = questions(model, () => update());
  const ask = open.ask;
  const [name, status] = [element("span", "nbc-title nbc-cut"), pill()];
  const stopCell = button("Stop cell", { act: () => ask("interrupt", "", "Interrupting the running cell…") });
  const save = button("Checkpoint now", { act: () => ask("checkpoint", model.get("state").checkpoint_name, "Saving a checkpoint…") });
  const stop = button("Stop cluster", { className: "nbc-danger", sure: "End all its kernels?", act: () => ask("stop", "", "Stopping the cluster…") });
  const head = element("div", "nbc-row nbc-wrap", {}, [name, status.root, element("span", "nbc-row nbc-wrap nbc-buttons", {}, [stopCell, save, stop])]);
  const answers = element("div", "nbc-answers", { role: "status", "aria-live": "polite" });
  const notice = element("div", "nbc-answer nbc-warning", { role: "note" });
  const [invited, board] = [invitation(), classBoard(ask)];
  const launches = element("div", "nbc-launches", { role: "list", "aria-label": "Machines from engines" });
  const facts = element("div", "nbc-facts");
  const [cellWord, cellSource] = [element("span", "nbc-muted"), element("span", "nbc-code nbc-cut nbc-grow")];
  const cell = element("div", "nbc-cell nbc-row", {}, [cellWord, cellSource]);
  const nodes = element("div", "nbc-nodes", { role: "list", "aria-label": "Nodes" });
  const how = element("span", "nbc-how", {}, ["Add a peer below, or run %cluster start --local 1."]);
  const none = element("div", "nbc-empty", {}, ["No nodes yet. ", how]);
  const waits = element("div", "nbc-waits", { role: "list", "aria-label": "Rounds, and who was waited for" });
  const peers = element("div", "nbc-peers", { role: "list", "aria-label": "Peers" });
  const events = element("div", "nbc-events", { role: "log", "aria-live": "polite", "aria-label": "Events", tabindex: "0" });
  const folds = { waits: fold("Rounds, and who was waited for", waits), peers: fold("Peers", peers), events: fold("Events", events) };
  const choice = curveChoice((chosen) => model.send({ action: "curves", ...chosen }), () => model.send({ action: "points" }));
  const root = element("div", "nbc-panel", { role: "region" }, [
    head, answers, notice, invited.root, board.root, facts, launches, cell, nodes, none, ...Object.values(folds).map((one) => one.root), choice.root,
  ]);

  function update() {
    const state = model.get("state");
    fitFigures(el);
    writeAttribute(root, "aria-label", `Cluster ${state.name}`);
    write(name, state.name);
    stop.nbcName("", `Really stop cluster ${state.name} and end all its kernels?`);
    status.update(state.level, state.status);
    stopCell.disabled = !state.can_interrupt;
    save.disabled = !state.can_checkpoint;
    writeAttribute(save, "title", state.can_checkpoint ? `Save ${state.checkpoint_name}` : "No training has begun: nothing to save");
    reconcile(answers, open.shown(state.answers), (answer) => answer.id, answerLine);
    write(notice, state.notice);
    if (state.invitation) invited.update(state.invitation);
    if (state.board) board.update(state.board);
    reconcile(launches, state.launches.map((text) => ({ text })), (launch) => launch.text.split(":")[0], launchLine);
    reconcile(facts, state.facts, (fact) => fact.label, factTile);
    if (state.cell) write(cellWord, `Cell ${state.cell.id} ${state.cell.status} ${state.cell.time}`);
    if (state.cell) write(cellSource, state.cell.source);
    nodes.classList.toggle("nbc-compact", state.compact);
    reconcile(nodes, state.board ? [] : state.nodes, (node) => node.name, () => nodeCard(ask));
    reconcile(peers, state.peers, (peer) => `${peer.key} ${peer.name}`, () => peerRow(open));
    reconcile(waits, state.waits.map((wait, place) => ({ ...wait, place })), (wait) => wait.place, waitLine);
    reconcile(events, [...state.events].reverse(), (event) => `${event.time} ${event.text}`, eventLine);
    for (const [part, visible] of [[notice, state.notice], [invited.root, state.invitation && !state.board], [board.root, state.board], [nodes, !state.board], [launches, state.launches.length], [cell, state.cell], [none, !state.board && !state.nodes.length], [choice.root, state.curves]]) show(part, Boolean(visible));
    for (const [name, one] of Object.entries(folds)) {
      one.update(state.folds[name]);
      show(one.root, Boolean(state[name].length));
    }
    if (state.curves) choice.update(state.curves);
  }

  // How the panel looks, for the file: JupyterLab's part (panelPlace.ts) writes it into the output around this panel.
  const keep = ({ picture, points }) => {
    if (points) saveFile(points);
    if (picture) el.dispatchEvent(new CustomEvent("notebook-cluster-picture", { detail: picture, bubbles: true }));
  };
  model.on("msg:custom", keep);
  const drawing = drawNewest(model, update);
  model.on("change:state", drawing.take);
  update();
  el.append(root);
  return () => {
    resized.disconnect();
    model.off("msg:custom", keep);
    model.off("change:state", drawing.take);
    drawing.end();
  };
}

export default { render };
