// The page on staleness: a stacked histogram over the steps, and the charts by bucket.
import { dress, drawCharts, fitAxis, newFigure } from "./charts.js";
import { base, color, element, getJson, onChange, onTheme } from "./page.js";

const place = document.getElementById("histogram");
let found = null;

const bucketColor = (bucket) => color(`stale-${Math.min(Number(bucket), 8)}`);

async function draw() {
  place.replaceChildren();
  const figure = newFigure({ height: 210, x_range: [found.first[0] - 0.5, found.last.at(-1) + 0.5] });
  dress(figure);
  fitAxis(figure, [0, 1], "%");
  Object.assign(figure.y_range, { start: 0, end: 1 });
  const totals = found.first.map((_, at) => Object.values(found.episodes).reduce((sum, list) => sum + list[at], 0));
  let bottom = totals.map(() => 0);
  for (const [bucket, list] of Object.entries(found.episodes)) {
    const top = list.map((number, at) => bottom[at] + (totals[at] ? number / totals[at] : 0));
    const data = { left: found.first.map((step) => step - 0.5), right: found.last.map((step) => step + 0.5), bottom, top };
    figure.quad({ field: "left" }, { field: "right" }, { field: "bottom" }, { field: "top" }, {
      source: new Bokeh.ColumnDataSource({ data }), fill_color: bucketColor(bucket), line_color: color("surface"),
      line_width: found.first.length > 120 ? 0 : 0.5,
    });
    bottom = top;
  }
  document.getElementById("histogram-legend").replaceChildren(...Object.keys(found.episodes).map((bucket) => {
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = bucketColor(bucket);
    return element("li", {}, swatch, `staleness ${bucket}`);
  }));
  await Bokeh.Plotting.show(figure, place);
}

async function load() {
  found = await getJson(`${base}/data/histogram`);
  if (found.first.length) await draw();
  else place.textContent = "No episode has been trained on yet.";
}

await load();
await drawCharts();
onTheme(() => found.first.length && draw());
onChange((changed) => changed.has("metrics") && load());
