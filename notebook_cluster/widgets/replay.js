// Plays a run in the panel of panel.js, which stands before this in the page. The element "run" has {pause, moments}: the longest pause in seconds; of each the
// time, how far the state differs from the one before, and a picture of the curves where there is another one.

const run = JSON.parse(document.getElementById("run").textContent);
const [play, slider, clock, speed] = ["play", "slider", "clock", "speed"].map((id) => document.getElementById(id));
const listeners = new Set();
let [place, state, timer] = [-1, null, 0];

/** `old` with a difference of `replay.py`: [value], or an object of the differences of its members. */
function changed(old, difference) {
  if (Array.isArray(difference)) return difference[0];
  const next = Array.isArray(old) ? [...old] : { ...old };
  for (const [key, one] of Object.entries(difference)) next[key] = changed(old[key], one);
  return next;
}

function duration(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  return (parts[0] ? parts : parts.slice(1)).map((part, index) => String(part).padStart(index ? 2 : 1, "0")).join(":");
}

function goTo(wanted) {
  const start = wanted < place ? 0 : place + 1;
  let picture = wanted < place ? "" : null;
  for (let at = start; at <= wanted; at++) {
    state = changed(at ? state : null, run.moments[at].state);
    picture = run.moments[at].curves ?? picture;
  }
  place = wanted;
  if (picture !== null) document.getElementById("curves").innerHTML = picture;
  const { time } = run.moments[place];
  slider.value = String(place);
  const [at, whole] = [time, run.moments.at(-1).time].map((one) => duration(one - run.moments[0].time));
  clock.textContent = `${at} of ${whole}`;
  slider.setAttribute("aria-valuetext", clock.textContent);
  listeners.forEach((listener) => listener());
}

function pause() {
  clearTimeout(timer);
  timer = 0;
  play.textContent = place === run.moments.length - 1 ? "Again" : "Play";
}

function next() {
  if (place + 1 >= run.moments.length) return pause();
  const gap = Math.min(run.moments[place + 1].time - run.moments[place].time, run.pause);
  timer = setTimeout(() => {
    goTo(place + 1);
    next();
  }, (1000 * gap) / Number(speed.value));
}

function begin() {
  if (place === run.moments.length - 1) goTo(0);
  play.textContent = "Pause";
  next();
}

play.addEventListener("click", () => (timer ? pause() : begin()));
speed.addEventListener("change", () => {
  if (!timer) return;
  clearTimeout(timer);
  next();
});
slider.addEventListener("input", () => {
  goTo(Number(slider.value));
  pause();
});
slider.max = String(run.moments.length - 1);
goTo(0);
const model = {
  get: () => state,
  on: (name, listener) => name === "change:state" && listeners.add(listener),
  off: (name, listener) => listeners.delete(listener),
  send: () => {},
};
render({ model, el: document.getElementById("panel") });
pause();
