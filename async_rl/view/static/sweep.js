// The page of a sweep: metrics over axes with error bars as cells arrive, and chosen cells side by side.
import { dress, fitAxis, formatted, newFigure, seriesColor, smoothed } from "./charts.js";
import { color, element, getJson, onChange, onTheme } from "./page.js";

const metric = document.getElementById("any-metric");
const axis = document.getElementById("any-axis");
const button = document.getElementById("compare");

async function drawPoints(card) {
  const { metric: key, axis: over } = card.dataset;
  if (!key || !over) return;
  const found = await getJson(`/sweep/data/points?metric=${encodeURIComponent(key)}&axis=${encodeURIComponent(over)}`);
  const place = card.querySelector(".plot");
  place.replaceChildren();
  const labels = [...new Set(found.lines.flatMap((line) => line.labels))];
  const areNumbers = labels.every((label) => label !== "" && !Number.isNaN(Number(label)));
  const figure = newFigure({ height: card.id === "any" ? 300 : 220, ...(areNumbers ? {} : { x_range: labels }) });
  dress(figure);
  const drawn = found.lines.flatMap((line) => line.mean.flatMap((value, at) => [value - line.error[at], value + line.error[at]]));
  fitAxis(figure, drawn, /^(learner|rollout|occupancy|gpu_\w+|truncated)$|utilisation/.test(key) ? "%" : "");
  figure.below[0].axis_label = over;
  if (areNumbers) figure.below[0].ticker = new Bokeh.FixedTicker({ ticks: labels.map(Number) });
  found.lines.forEach((line, index) => drawLine(figure, line, areNumbers, seriesColor(index)));
  if (found.lines.length > 1) nameLines(card, found.lines);
  if (!found.lines.length) place.textContent = "No finished cell measured this.";
  else await Bokeh.Plotting.show(figure, place);
}

function drawLine(figure, line, areNumbers, fill) {
  const data = { x: areNumbers ? line.labels.map(Number) : line.labels, y: line.mean,
    low: line.mean.map((value, at) => value - line.error[at]), high: line.mean.map((value, at) => value + line.error[at]),
    text: line.mean.map((value, at) => `${formatted(value)} ± ${formatted(line.error[at])} (${line.seeds[at]} seeds)`) };
  const source = new Bokeh.ColumnDataSource({ data });
  const [x, y, low, high] = ["x", "y", "low", "high"].map((field) => ({ field }));
  figure.segment(x, low, x, high, { source, line_color: fill, line_width: 1.5, line_alpha: 0.8 });
  figure.line(x, y, { source, line_color: fill, line_width: 1.6 });
  const dots = figure.scatter(x, y, { source, size: 7, fill_color: fill, line_color: color("surface") });
  figure.add_tools(new Bokeh.HoverTool({ renderers: [dots], tooltips: [["at", "@x"], ["value", "@text"]] }));
}

function nameLines(card, lines) {
  card.querySelector(".legend")?.remove();
  card.append(element("ul", { className: "legend" }, ...lines.map((line, index) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = seriesColor(index);
    return element("li", {}, swatch, line.name);
  })));
}

async function drawAll() {
  for (const card of document.querySelectorAll(".sweep-chart")) await drawPoints(card);
  document.body.dataset.ready = "1";
}

function chooseAny() {
  Object.assign(document.getElementById("any").dataset, { metric: metric.value, axis: axis.value });
}

const chosenCells = () => [...document.querySelectorAll("input[name=cell]:checked")].map((box) => box.value);

/** Draw each of the compared metrics once, with a line for every chosen cell. */
async function compare() {
  const cells = chosenCells().slice(0, 6), place = document.getElementById("compared");
  const keys = JSON.parse(place.dataset.keys);
  const query = keys.map((key) => `key=${encodeURIComponent(key)}`).join("&");
  const found = await Promise.all(cells.map((cell) => getJson(`/cells/${encodeURIComponent(cell)}/data/series?${query}`)));
  document.getElementById("side-by-side").hidden = !cells.length;
  place.replaceChildren();
  for (const key of keys) {
    const plot = element("div", { className: "plot" });
    const card = element("figure", { className: "card" }, element("figcaption", {}, element("h2", { textContent: key })), plot);
    place.append(card);
    const figure = newFigure();
    dress(figure);
    const drawn = [];
    found.forEach(({ series }, index) => {
      const { step, value, weight } = series[key];
      const data = { step, value: smoothed(value.map((each) => each ?? NaN), weight, key.startsWith("eval") ? 0 : 0.6) };
      drawn.push(...data.value);
      figure.line({ field: "step" }, { field: "value" },
        { source: new Bokeh.ColumnDataSource({ data }), line_color: seriesColor(index), line_width: 1.6 });
    });
    fitAxis(figure, drawn, key.startsWith("utilisation") ? "%" : "");
    nameLines(card, cells.map((name) => ({ name })));
    if (!found.some(({ series }) => series[key].step.length)) {
      plot.textContent = "No chosen cell measured this.";
      continue;
    }
    await Bokeh.Plotting.show(figure, plot);
  }
  history.replaceState(null, "", `?${cells.map((cell) => `cell=${encodeURIComponent(cell)}`).join("&")}`);
}

function watchBoxes() {
  if (button) button.disabled = !chosenCells().length;
}

for (const input of [metric, axis]) {
  input.addEventListener("change", () => { chooseAny(); drawPoints(document.getElementById("any")); });
}
document.getElementById("cells").addEventListener("change", watchBoxes);
button?.addEventListener("click", compare);
const offered = () => document.querySelector("table.cells").dataset.offered;
const offeredAtLoad = offered();
// Cells that finish may bring metrics that nothing had measured when the page was made.
document.addEventListener("parts-replaced", () => offered() !== offeredAtLoad && location.reload());
onChange((changed) => changed.has("cells") && drawAll());
onTheme(async () => { await drawAll(); if (!document.getElementById("side-by-side").hidden) await compare(); });
chooseAny();
watchBoxes();
await drawAll();
if (chosenCells().length) await compare();
