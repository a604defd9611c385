// The overview: the charts, and one more for each metric that is asked for by its key.
import { addChart, drawCharts } from "./charts.js";
import { element } from "./page.js";

const input = document.getElementById("metric");
const list = document.getElementById("metric-keys");
const more = document.getElementById("more");

function offer({ keys }) {
  if (list.childElementCount !== keys.length) {
    list.replaceChildren(...keys.map((key) => element("option", { value: key })));
  }
}

input.addEventListener("change", async () => {
  const key = input.value.trim();
  if (![...list.children].some((option) => option.value === key)) return;
  input.value = "";
  const card = element("figure", { className: "card chart", tabIndex: 0 },
    element("figcaption", {}, element("h2", { textContent: key })),
    element("div", { className: "readout" }), element("div", { className: "plot" }));
  card.setAttribute("aria-label", `${key}: a chart over the steps`);
  more.append(card);
  await addChart(card, { title: key, keys: [[key, key.split("/").at(-1)]], unit: "" });
});

drawCharts(offer);
