// The lanes of both pools over a window of steps, what the learner waited for, and the simulator's prediction.
import { dress, newFigure } from "./charts.js";
import { base, color, element, getJson, onChange, onTheme } from "./page.js";

const form = document.getElementById("window");
const place = document.getElementById("lanes");
const problem = document.getElementById("lanes-problem");
const WAITS = {
  "batch/busy": "a batch, while rollout generated", "batch/sync": "a batch, while servers took new weights",
  "batch/wait_weights": "a batch, while no group was allowed to start", "batch/eval": "a batch, while servers evaluated",
  "batch/restart": "a batch, while a rollout server was started again",
  "batch/other": "a batch, while rollout did something else", drain: "running groups, before a push",
  "held push": "an evaluation, before a push", push: "a weight push", "eval push": "a push to the evaluation servers",
  "release memory": "the servers' memory",
  copy: "a checkpoint", save: "a checkpoint", write: "a checkpoint", other: "other work",
};
const MOST_STEPS_NAMED = 28;
let shown = null;
let follows = form.dataset.follows === "1";

const stateColor = (state) => color(`state-${state}`) || color("muted");
const percent = (share) => (share ? `${(100 * share).toFixed(1)} %` : "–");

async function show() {
  problem.hidden = true;
  try {
    shown = await getJson(`${base}/data/window?from=${form.elements.from.value}&to=${form.elements.to.value}`);
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
    return;
  }
  if (shown.last_step < Number(form.elements.to.value)) form.elements.to.value = shown.last_step;
  await draw();
  writeTables();
  document.body.dataset.ready = "1";
}

async function draw() {
  place.replaceChildren();
  const pools = Object.keys(shown.lanes).reverse();
  const figure = newFigure({ height: 74 + 46 * pools.length, x_range: [0, shown.duration_s],
    y_range: [-0.6, pools.length - 0.4] });
  dress(figure);
  figure.add_tools(new Bokeh.PanTool({ dimensions: "width" }), new Bokeh.WheelZoomTool({ dimensions: "width" }));
  figure.toolbar.active_scroll = figure.toolbar.tools[1];
  for (const grid of figure.center) grid.grid_line_color = null;
  figure.below[0].axis_label = "seconds in this window";
  figure.left[0].ticker = new Bokeh.FixedTicker({ ticks: pools.map((_, row) => row) });
  figure.left[0].major_label_overrides = new Map(pools.map((pool, row) => [row, pool]));
  figure.left[0].major_label_text_color = color("text");
  figure.left[0].major_label_text_font_size = "12px";
  const data = { left: [], right: [], bottom: [], top: [], fill: [], what: [], pool: [], lasted: [] };
  pools.forEach((pool, row) => shown.lanes[pool].forEach((segment) => {
    data.left.push(segment.start_s);
    data.right.push(segment.end_s);
    data.bottom.push(row - 0.36);
    data.top.push(row + 0.36);
    data.fill.push(stateColor(segment.state));
    data.what.push(segment.state.replace("_", " ") + (segment.name ? `: ${segment.name}` : ""));
    data.pool.push(pool);
    const lasted = segment.end_s - segment.start_s;
    data.lasted.push(lasted < 1 ? `${(1000 * lasted).toFixed(0)} ms` : `${lasted.toFixed(2)} s`);
  }));
  const bars = figure.quad({ field: "left" }, { field: "right" }, { field: "bottom" }, { field: "top" },
    { source: new Bokeh.ColumnDataSource({ data }), fill_color: { field: "fill" }, line_color: null });
  figure.add_tools(new Bokeh.HoverTool({ renderers: [bars],
    tooltips: [["pool", "@pool"], ["does", "@what"], ["for", "@lasted"]] }));
  shown.step_ends_s.forEach((end) => figure.add_layout(new Bokeh.Span({
    dimension: "height", location: end, line_color: color("text"), line_alpha: 0.7, line_width: 1, line_dash: [2, 3] })));
  nameSteps(figure, pools.length);
  const seen = new Set(Object.values(shown.lanes).flat().map((segment) => segment.state));
  for (const item of document.querySelectorAll("#legend li")) item.hidden = !seen.has(item.dataset.state);
  await Bokeh.Plotting.show(figure, place);
}

/** Write the number of each step above its part of the lanes, where it has room. */
function nameSteps(figure, rows) {
  const starts = [0, ...shown.step_ends_s];
  const middle = (index) => (starts[index] + starts[index + 1]) / 2;
  let last = -Infinity;
  const at = shown.step_ends_s.map((_, index) => index).filter((index) => {
    if (middle(index) - last < shown.duration_s / MOST_STEPS_NAMED) return false;
    last = middle(index);
    return true;
  });
  const data = { x: at.map(middle), y: at.map(() => rows - 0.5),
    text: at.map((index) => String(shown.first_step + index)) };
  figure.text({ field: "x" }, { field: "y" }, { field: "text" }, { source: new Bokeh.ColumnDataSource({ data }),
    text_color: color("muted"), text_font_size: "11px", text_align: "center", text_baseline: "middle" });
}

function row(cells, tag = "td") {
  const [first, ...others] = cells;
  return element("tr", {}, element("th", { scope: tag === "th" ? "col" : "row", textContent: first }),
    ...others.map((text) => element(tag, { className: "num", textContent: text })));
}

function writeTables() {
  const measured = new Set(Object.values(shown.shares).flatMap(Object.keys));
  const states = [...document.querySelectorAll("#legend li")].map((item) => item.dataset.state).filter((s) => measured.has(s));
  const shares = document.getElementById("shares");
  shares.replaceChildren(shares.caption, element("thead", {}, row(["pool", ...states.map((s) => s.replace("_", " "))], "th")),
    element("tbody", {}, ...Object.entries(shown.shares).map(([pool, of]) => row([pool, ...states.map((s) => percent(of[s]))]))));
  const sums = {};
  for (const [name, seconds] of Object.entries(shown.waits_s)) sums[WAITS[name] || name] = (sums[WAITS[name] || name] || 0) + seconds;
  writeSeconds(document.getElementById("waits"), sums);
}

/** Write seconds by what they were spent on into a table, the most first. */
function writeSeconds(table, sums) {
  const ordered = Object.entries(sums).sort((a, b) => b[1] - a[1]);
  table.replaceChildren(table.caption, element("thead", {}, row(["what", "seconds", "of the window"], "th")),
    element("tbody", {}, ...ordered.map(([what, seconds]) => row([what, seconds.toFixed(2), percent(seconds / shown.duration_s)]))));
}

async function predict() {
  let found = await getJson(`${base}/data/prediction`);
  while (found?.pending) found = await getJson(`${base}/data/prediction`); // each waits for the simulator for a while
  const target = document.getElementById("prediction");
  if (!found) {
    target.replaceChildren(element("p", { className: "muted",
      textContent: "There is no prediction: fewer than five steps are measured, or the simulator does not cover this run's rules." }));
    return;
  }
  const rows = [["learner, busy", ...found.learner.map(percent)], ["rollout, busy", ...found.rollout.map(percent)],
    ["staleness, mean", ...found.staleness.map((value) => value.toFixed(2))]];
  target.replaceChildren(element("table", {}, element("thead", {}, row(["over the run so far", "measured", "predicted"], "th")),
    element("tbody", {}, ...rows.map((cells) => row(cells)))),
  element("p", { className: "note", textContent: "The simulator is given the measured durations and this run's rules. "
    + `Learner and rollout together could be busy for at most ${percent(found.bound)} of the time of one.` }));
}

function move(by) {
  const [from, to] = [form.elements.from, form.elements.to];
  const start = Math.max(1, Number(from.value) + by * (Number(to.value) - Number(from.value) + 1));
  to.value = start + Number(to.value) - Number(from.value);
  from.value = start;
  follows = false;
  show();
}

async function newest() {
  const width = Number(form.elements.to.value) - Number(form.elements.from.value);
  const { last_step: last } = await getJson(`${base}/data/series`);
  form.elements.to.value = Math.max(1, last - 1);
  form.elements.from.value = Math.max(1, last - 1 - width);
  follows = true;
  await show();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  follows = false;
  history.replaceState(null, "", `?from=${form.elements.from.value}&to=${form.elements.to.value}`);
  show();
});
document.getElementById("earlier").addEventListener("click", () => move(-1));
document.getElementById("later").addEventListener("click", () => move(1));
document.getElementById("newest").addEventListener("click", newest);
onChange((changed) => changed.has("timeline") && follows && newest());
onTheme(() => shown && draw());
await show();
await predict();
