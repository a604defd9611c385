// Line charts over the steps, drawn by Bokeh, with one cursor for all of them and a smoothing that is set once.
import { base, color, element, getJson, onChange, onTheme } from "./page.js";

const charts = [];
let smoothing = 0.6;
let lastStep = -1;
let generation = 0;
let linesRead = 0; // of metrics.jsonl
const MAX_KEYS = 60; // of one request, which the server limits
const FEWEST_WITHOUT_DOTS = 40;
const FEWEST_SMOOTHED = 25; // a line with fewer points, e.g. of evaluations, is drawn as it is

export function formatted(value, unit) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  if (unit === "%") return `${(100 * value).toFixed(1)} %`;
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 0.001) return value.toExponential(1);
  return value.toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Exponential moving average, without the bias of its start; each value counts by its weight, e.g. the step's time. */
export function smoothed(values, weights, memory) {
  let sum = 0, total = 0;
  return values.map((value, at) => {
    if (Number.isNaN(value)) return value;
    sum = memory * sum + (1 - memory) * weights[at] * value;
    total = memory * total + (1 - memory) * weights[at];
    return total > 0 ? sum / total : value;
  });
}

const LEAST_SPAN = 1e-3; // of the largest value: less than this is rounding or nothing to look at, and is drawn flat
const PADDING = 0.06;
const MOST_TICKS = 7;
const SUFFIXES = [[1e10, 1e9, "G"], [1e7, 1e6, "M"], [1e4, 1e3, "k"]]; // from which size on, divided by what

/** The ends of an axis on which all values lie, at least LEAST_SPAN of their size apart. */
export function axisRange(values) {
  const known = values.filter(Number.isFinite);
  if (!known.length) return [0, 1];
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  const least = LEAST_SPAN * Math.max(Math.abs(low), Math.abs(high)) || 1;
  const missing = Math.max(0, least - (high - low)) / 2;
  const padding = PADDING * Math.max(least, high - low);
  return [low - missing - padding, high + missing + padding];
}

/** Round values between the ends of an axis, in steps of 1, 2 or 5 times a power of ten. */
export function axisTicks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / MOST_TICKS));
  const step = power * [1, 2, 5, 10].find((times) => (high - low) / (times * power) <= MOST_TICKS);
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return { step, ticks: Array.from({ length: last - first + 1 }, (_, at) => (first + at) * step) };
}

/** The texts of an axis, with as many digits as its steps need to differ. */
export function axisLabels({ step, ticks }, unit) {
  const digits = (size) => Math.max(0, -Math.floor(Math.log10(size) + 1e-9));
  if (unit === "%") return ticks.map((tick) => `${plain(100 * tick, digits(100 * step))} %`);
  const largest = Math.max(...ticks.map(Math.abs));
  if (largest < 1e-3) {
    const power = Math.floor(Math.log10(largest) + 1e-9), unit10 = 10 ** power;
    return ticks.map((tick) => (Math.abs(tick) < step / 2 ? "0" : `${plain(tick / unit10, digits(step / unit10))}e${power}`));
  }
  const [, divisor, suffix] = SUFFIXES.find(([size]) => largest >= size) ?? [0, 1, ""];
  return ticks.map((tick) => `${plain(tick / divisor, digits(step / divisor))}${suffix}`);
}

const plain = (value, digits) => value.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1"); // no "-0"

/** Fit the left axis of a Bokeh figure to the values that are drawn. */
export function fitAxis(figure, values, unit) {
  const [low, high] = axisRange(values);
  const marks = axisTicks(low, high), labels = axisLabels(marks, unit);
  Object.assign(figure.y_range, { start: low, end: high });
  const ticker = new Bokeh.FixedTicker({ ticks: marks.ticks });
  for (const each of [figure.left[0], ...figure.center.filter((grid) => grid.dimension === 1)]) each.ticker = ticker;
  figure.left[0].major_label_overrides = new Map(marks.ticks.map((tick, at) => [tick, labels[at]]));
}

/** Give a Bokeh figure this page's colours and no frame. */
export function dress(figure) {
  const muted = color("muted"), grid = color("grid");
  figure.background_fill_alpha = 0;
  figure.border_fill_alpha = 0;
  figure.outline_line_alpha = 0;
  for (const axis of [...figure.below, ...figure.left]) {
    if (axis.axis_line_color === undefined) continue;
    Object.assign(axis, {
      axis_line_color: null, major_tick_line_color: null, minor_tick_line_color: null,
      major_label_text_color: muted, major_label_text_font_size: "11px", axis_label_text_color: muted,
      axis_label_text_font_style: "normal", axis_label_text_font_size: "11px",
    });
  }
  for (const line of figure.center) {
    if (line.grid_line_color === undefined) continue;
    Object.assign(line, { grid_line_color: line.dimension === 0 ? null : grid });
  }
}

export function newFigure(options = {}) {
  return Bokeh.Plotting.figure({
    height: 190, sizing_mode: "stretch_width", tools: [], toolbar_location: null, min_border: 2,
    y_range: [0, 1], ...options,
  });
}

export const seriesColor = (index) => color(`series-${index % 8}`);

class LineChart {
  constructor(card, spec) {
    this.card = card;
    this.spec = spec;
    this.lines = spec.keys.map(([key, name]) => ({ key, name, step: [], value: [], weight: [], stride: 1 }));
    this.readout = card.querySelector(".readout");
    card.addEventListener("keydown", (event) => this.moveByKey(event));
  }

  draw() {
    const plot = this.card.querySelector(".plot");
    plot.replaceChildren();
    const figure = newFigure({ x_range: [0, lastShownStep()] });
    dress(figure);
    const measured = this.lines.filter((line) => line.step.length);
    this.lines.forEach((line, index) => {
      line.color = seriesColor(index);
      line.source = new Bokeh.ColumnDataSource({ data: this.columns(line) });
      const [x, raw, smooth, dot] = ["step", "value", "smooth", "dot"].map((field) => ({ field }));
      figure.line(x, raw, { source: line.source, line_color: line.color, line_alpha: 0.22, line_width: 1 });
      figure.line(x, smooth, { source: line.source, line_color: line.color, line_width: 1.8 });
      figure.scatter(x, dot, { source: line.source, size: 4, fill_color: line.color, line_color: null });
    });
    this.fit(figure);
    this.span = new Bokeh.Span({ dimension: "height", line_color: color("muted"), line_width: 1, visible: false });
    figure.add_layout(this.span);
    figure.on_event("mousemove", (event) => moveCursor(Math.round(event.x)));
    figure.on_event("mouseleave", () => moveCursor(null));
    this.figure = figure;
    this.read(null);
    this.card.classList.toggle("empty", !measured.length);
    return Bokeh.Plotting.show(figure, plot);
  }

  columns(line) {
    const memory = line.step.length < FEWEST_SMOOTHED ? 0 : smoothing;
    const points = { step: line.step, value: line.value, weight: line.weight };
    const { step, value, weight } = withGaps(points, this.distance(line));
    const smooth = smoothed(value, weight, memory);
    const isAlone = (at) => !Number.isFinite(value[at - 1] ?? NaN) && !Number.isFinite(value[at + 1] ?? NaN);
    const dot = smooth.map((each, at) => (line.step.length < FEWEST_WITHOUT_DOTS || isAlone(at) ? each : NaN));
    return { step, value, smooth, dot };
  }

  /** The usual distance of two points of a line: further apart, they are not joined. */
  distance(line) {
    if (this.spec.each_step) return line.stride;
    const distances = line.step.slice(1).map((step, at) => step - line.step[at]).sort((a, b) => a - b);
    return 1.5 * Math.max(line.stride, distances[distances.length >> 1] ?? 1);
  }

  fit(figure) {
    fitAxis(figure, this.lines.flatMap((line) => [...line.source.data.value, ...line.source.data.smooth]), this.spec.unit);
  }

  add(series) {
    let grew = false;
    for (const line of this.lines) {
      const found = series[line.key];
      if (!found || !found.step.length) continue;
      grew = true;
      Object.assign(line, mergedBySteps(line, { ...found, value: found.value.map((value) => value ?? NaN) }));
      line.stride = Math.max(line.stride, found.stride);
    }
    if (grew && this.figure) this.refresh();
  }

  clear() {
    for (const line of this.lines) Object.assign(line, { step: [], value: [], weight: [], stride: 1 });
  }

  refresh() {
    this.figure.x_range.end = lastShownStep();
    for (const line of this.lines) line.source.data = this.columns(line);
    this.fit(this.figure);
    this.card.classList.toggle("empty", !this.lines.some((line) => line.step.length));
    this.read(null);
  }

  /** Write each line's value at a step, or at its last one, into the legend. */
  read(step) {
    this.readout.replaceChildren(...this.lines.filter((line) => line.step.length).map((line) => {
      const at = step === null ? line.step.length - 1 : nearest(line.step, step);
      const isMissing = step !== null && this.spec.each_step && Math.abs(line.step[at] - step) >= line.stride;
      const value = isMissing ? NaN : line.value[at];
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = line.color;
      const isFar = step !== null && !isMissing && Math.abs(line.step[at] - step) > lastStep / 50; // e.g. the nearest evaluation
      return element("span", { className: "entry" }, swatch, `${line.name} `,
        element("b", { textContent: formatted(value, this.spec.unit) }), isFar ? ` at step ${line.step[at]}` : "");
    }));
    if (!this.readout.childElementCount) this.readout.textContent = "not measured";
  }

  moveByKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    moveCursor(Math.max(0, (cursor ?? lastStep) + move));
  }
}

/** Return the columns of the points of both in the order of their steps; of two of one step that of `more` counts. */
export function mergedBySteps(columns, more) {
  const points = new Map();
  for (const { step, value, weight } of [columns, more]) step.forEach((each, at) => points.set(each, [value[at], weight[at]]));
  const steps = [...points.keys()].sort((a, b) => a - b);
  return { step: steps, value: steps.map((step) => points.get(step)[0]), weight: steps.map((step) => points.get(step)[1]) };
}

/** Return columns of points with a point without a value between two whose steps are further apart than `distance`. */
export function withGaps(columns, distance) {
  const { step: steps } = columns;
  const gaps = new Set(steps.map((_, at) => at).filter((at) => at && steps[at] - steps[at - 1] > distance));
  const before = (name, at) => (name === "step" ? (steps[at] + steps[at - 1]) / 2 : NaN);
  return Object.fromEntries(Object.entries(columns).map(([name, values]) => [
    name, values.flatMap((value, at) => (gaps.has(at) ? [before(name, at), value] : [value])),
  ]));
}

const lastShownStep = () => 1.01 * Math.max(1, lastStep); // the last point is not cut in half

/** Index of the step that is nearest to `step`, in an ascending list. */
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

let cursor = null;
let isDrawing = false;

function moveCursor(step) {
  cursor = step === null ? null : Math.min(step, lastStep);
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    const sign = document.getElementById("cursor-step");
    if (sign) sign.textContent = cursor === null ? "Point at a chart to read all of them at one step." : `step ${cursor}`;
    for (const chart of charts) {
      chart.span.visible = cursor !== null;
      if (cursor !== null) chart.span.location = cursor;
      chart.read(cursor);
    }
  });
}

function wanted() {
  return [...new Set(charts.flatMap((chart) => chart.spec.keys.map(([key]) => key)))];
}

/** Return the values of metrics behind line `after` of metrics.jsonl, asked for in parts of at most MAX_KEYS keys. */
async function load(keys, after) {
  const parts = [];
  for (let at = 0; at < Math.max(1, keys.length); at += MAX_KEYS) parts.push(keys.slice(at, at + MAX_KEYS));
  const found = await Promise.all(parts.map((part) => {
    const query = part.map((key) => `key=${encodeURIComponent(key)}`).join("&");
    return getJson(`${base}/data/series?after=${after}&${query}`);
  }));
  if (new Set(found.map((each) => each.generation)).size > 1) return load(keys, after); // a resume came between them
  const lines = Math.min(...found.map((each) => each.lines)); // what only some of them have read is asked for again
  return { ...found[0], lines, series: Object.assign({}, ...found.map((each) => each.series)) };
}

/** Draw a chart in every card with data-chart, and keep them up to date. Calls `more` with each answer. */
export async function drawCharts(more = () => {}) {
  for (const card of document.querySelectorAll("[data-chart]")) {
    charts.push(new LineChart(card, JSON.parse(card.dataset.chart)));
  }
  await reload(more);
  setUpSmoothing();
  onTheme(() => charts.forEach((chart) => chart.draw()));
  onChange(async (changed) => {
    if (!changed.has("metrics")) return;
    const found = await load(wanted(), linesRead);
    if (found.generation !== generation) return reload(more); // a resume replaced the file
    linesRead = found.lines;
    lastStep = Math.max(lastStep, found.last_step);
    charts.forEach((chart) => chart.add(found.series));
    more(found);
  });
}

async function reload(more) {
  const found = await load(wanted(), 0);
  ({ generation, lines: linesRead } = found);
  lastStep = found.last_step;
  for (const chart of charts) {
    chart.clear();
    chart.add(found.series);
    await chart.draw();
  }
  more(found);
  document.body.dataset.ready = "1";
}

export async function addChart(card, spec) {
  const chart = new LineChart(card, spec);
  chart.add((await load(spec.keys.map(([key]) => key), 0)).series);
  charts.push(chart);
  return chart.draw();
}

function setUpSmoothing() {
  const slider = document.getElementById("smoothing");
  if (!slider) return;
  slider.addEventListener("input", () => {
    smoothing = Number(slider.value);
    document.getElementById("smoothing-value").textContent = smoothing.toFixed(2);
    charts.forEach((chart) => chart.refresh());
  });
}
