// The page of a run: six charts and the lanes of the pools, drawn by Bokeh and kept up to date.
import { element, getJson, onChange } from "./page.js";

const place = document.getElementById("charts"), lanes = document.getElementById("lanes");
const problem = document.getElementById("lanes-problem");
const stateColors = JSON.parse(lanes.dataset.colors);
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
const FEWEST_WITHOUT_DOTS = 30;
const WAITS = {
  "batch/busy": "a batch, while rollout generated", "batch/sync": "a batch, while servers took new weights",
  "batch/wait_weights": "a batch, while no group was allowed to start", "batch/eval": "a batch, while servers evaluated",
  "batch/restart": "a batch, while a rollout server was started again",
  "batch/other": "a batch, while rollout did something else", drain: "running groups, before a push",
  "held push": "an evaluation, before a push", push: "a weight push", "eval push": "a push to the evaluation servers",
  "release memory": "the servers' memory", copy: "a checkpoint", save: "a checkpoint", write: "a checkpoint", other: "something else",
};

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());

function newFigure(options) {
  return Bokeh.Plotting.figure({ sizing_mode: "stretch_width", toolbar_location: null, outline_line_color: null,
    background_fill_alpha: 0, border_fill_alpha: 0, ...options });
}

/** Show a figure in the colours of the page, with a legend above it. */
function show(figure, items, card) {
  const muted = getComputedStyle(problem).color;
  for (const axis of [...figure.below, ...figure.left, ...figure.right]) Object.assign(axis, { axis_line_color: null,
    major_tick_line_color: null, minor_tick_line_color: null, major_label_text_color: muted, axis_label_text_color: muted });
  Object.assign(figure.grid, { grid_line_color: muted, grid_line_alpha: 0.15 });
  figure.add_layout(new Bokeh.Legend({ items, orientation: "horizontal", click_policy: "hide", ncols: innerWidth < 600 ? 3 : "auto",
    margin: 0, padding: 2, border_line_color: null, background_fill_alpha: 0, label_text_color: muted }), "above");
  card.replaceChildren();
  Bokeh.Plotting.show(figure, card);
}

/** Draw a chart. Returns a function that takes the same chart with newer points. */
function drawChart(card, chart) {
  const [start, end] = chart.axis;
  const ends = { ...(start === null ? {} : { start }), ...(end === null ? {} : { end }) };
  const figure = newFigure({ height: 220, tools: "xpan,xbox_zoom,reset", y_range: new Bokeh.DataRange1d(ends) });
  figure.yaxis.formatter = new Bokeh.NumeralTickFormatter({ format: chart.format });
  const items = [], sources = [];
  if (chart.lines.some((line) => line.is_right)) {
    figure.extra_y_ranges = { right: new Bokeh.DataRange1d() };
    figure.add_layout(new Bokeh.LinearAxis({ y_range_name: "right" }), "right");
  }
  chart.lines.forEach((line, index) => {
    const source = new Bokeh.ColumnDataSource({ data: columns(line) });
    const more = { source, name: line.name, ...(line.is_right ? { y_range_name: "right" } : {}) };
    const drawn = figure.line({ field: "step" }, { field: "value" }, { line_width: line.step.length < 150 ? 2 : 1, line_color: COLORS[index], ...more });
    const dots = figure.scatter({ field: "step" }, { field: "value" }, { size: { field: "size" }, color: COLORS[index], ...more });
    figure.add_tools(new Bokeh.HoverTool({ renderers: [drawn], mode: "vline", tooltips: [["step", "@step"], [line.name, "@value"]] }));
    items.push(new Bokeh.LegendItem({ label: line.name, renderers: [drawn, dots] }));
    sources.push(source);
  });
  show(figure, items, card);
  return (newer) => newer.lines.forEach((line, index) => { sources[index].data = columns(line); });
}

const columns = ({ step, value }) => ({ step, value, size: step.map(() => (step.length < FEWEST_WITHOUT_DOTS ? 5 : 0)) });

let updates = null, shape = "";

async function showCharts() {
  const charts = await getJson("/data/charts");
  const found = JSON.stringify(charts.map((chart) => chart.lines.map((line) => line.name)));
  if (found === shape) return updates.forEach((update, index) => update(charts[index]));
  shape = found; // a metric is measured for the first time
  place.replaceChildren();
  updates = charts.map((chart) => {
    const card = element("div", { className: "plot" });
    place.append(element("figure", { className: "card" }, element("h2", { textContent: chart.title }), card));
    if (chart.lines.length) return drawChart(card, chart);
    card.append(element("p", { className: "muted", textContent: "Not measured yet." }));
    return () => {};
  });
}

async function showLanes() {
  try {
    const shown = await getJson("/data/lanes");
    problem.textContent = "";
    drawLanes(shown);
    writeWaits(shown);
  } catch (error) {
    problem.textContent = error.message;
  }
}

function drawLanes(shown) {
  const pools = Object.keys(shown.lanes).reverse();
  const figure = newFigure({ height: 90 + 42 * pools.length, x_range: [0, shown.duration_s], y_range: pools, tools: "xpan,reset" });
  const starts = [0, ...shown.step_ends_s];
  const middles = shown.step_ends_s.map((end, index) => (starts[index] + end) / 2);
  figure.xaxis.ticker = new Bokeh.FixedTicker({ ticks: middles });
  figure.xaxis.major_label_overrides = new Map(middles.map((at, index) => [at, String(shown.first_step + index)]));
  figure.xaxis.axis_label = `step (${shown.duration_s.toFixed(1)} s in all)`;
  figure.grid.visible = false;
  const items = [];
  for (const [state, color] of Object.entries(stateColors)) {
    const data = { pool: [], left: [], right: [], what: [], lasted: [] };
    for (const pool of pools) for (const segment of shown.lanes[pool].filter((each) => each.state === state)) {
      data.pool.push(pool);
      data.left.push(segment.start_s);
      data.right.push(segment.end_s);
      data.what.push(state.replace("_", " ") + (segment.name ? `: ${segment.name}` : ""));
      data.lasted.push(segment.end_s - segment.start_s);
    }
    if (!data.pool.length) continue;
    const bars = figure.hbar({ y: { field: "pool" }, left: { field: "left" }, right: { field: "right" }, height: 0.75,
      source: new Bokeh.ColumnDataSource({ data }), fill_color: color, line_color: null });
    figure.add_tools(new Bokeh.HoverTool({ renderers: [bars], tooltips: [["pool", "@pool"], ["does", "@what"], ["for", "@lasted{0.000} s"]] }));
    items.push(new Bokeh.LegendItem({ label: state.replace("_", " "), renderers: [bars] }));
  }
  shown.step_ends_s.forEach((location) => figure.add_layout(new Bokeh.Span({ dimension: "height", location, line_color: "#888888", line_dash: [2, 3] })));
  show(figure, items, lanes);
}

function writeWaits({ waits_s, duration_s }) {
  const sums = {};
  for (const [name, seconds] of Object.entries(waits_s)) sums[WAITS[name] || name] = (sums[WAITS[name] || name] || 0) + seconds;
  const table = document.getElementById("waits"), cell = (text) => element("td", { className: "num", textContent: text });
  table.replaceChildren(table.caption, element("tbody", {}, ...Object.entries(sums).sort((a, b) => b[1] - a[1]).map(([what, seconds]) =>
    element("tr", {}, element("th", { scope: "row", textContent: `the learner waited for ${what}` }), cell(`${seconds.toFixed(2)} s`), cell(`${(100 * seconds / duration_s).toFixed(1)} %`)))));
}

onChange((changed) => changed.has("metrics") && showCharts());
onChange((changed) => changed.has("timeline") && showLanes());
await Promise.all([showCharts(), showLanes()]);
document.body.dataset.ready = "1";
