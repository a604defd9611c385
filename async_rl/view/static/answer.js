// One answer token by token: coloured by version, importance ratio, behaviour logprob or mask; turns of others are folded.
import { base, element, getJson } from "./page.js";

const panel = document.getElementById("answer");
const MASKED_FOLD = 8; // shorter stretches of tokens that the model did not sample stay open
const RATIO_LEVELS = [0.5, 0.8, 0.95, 1.05, 1.25, 2];
let shown = null;
let chosen = 0;

const setting = (name) => document.querySelector(`input[name=${name}]:checked`).value;

/** exp(proximal - behaviour logprob) of a token: how much more likely it had become when it was trained on. */
const ratio = (at) => (shown.log_ratios?.[at] == null ? null : Math.exp(shown.log_ratios[at]));
const isTrained = (at) => shown.mask[at] && (!shown.log_ratios || ratio(at) !== null);

function tokenClass(at, coloring) {
  if (coloring === "version") return `v${(shown.versions[at] - Number(panel.dataset.startVersion)) % 8}`;
  if (coloring === "mask") return isTrained(at) ? "m1" : "m0";
  if (coloring === "ratio") return ratio(at) === null ? "m0" : `r${RATIO_LEVELS.filter((limit) => ratio(at) >= limit).length}`;
  if (!shown.mask[at]) return "m0";
  const probability = Math.exp(shown.logprobs[at]);
  return `p${[0.99, 0.9, 0.7, 0.5, 0.25, 0.1, 0.01].filter((limit) => probability < limit).length}`;
}

function legend(coloring) {
  const entry = (name, text) => element("li", {}, element("span", { className: `swatch ${name}` }), text);
  if (coloring === "version") {
    const start = Number(panel.dataset.startVersion);
    return [...new Set(shown.versions)].map((version) => {
      const age = shown.trained_at === null ? "" : `, staleness ${shown.trained_at - version}`;
      return entry(`v${(version - start) % 8}`, `version ${version}${age}`);
    });
  }
  if (coloring === "mask") return [entry("m1", "trained on"), entry("m0", "masked: not sampled by the model, or too old")];
  if (coloring === "ratio") return ratioLegend(entry);
  return ["above 99 %", "90 %", "70 %", "50 %", "25 %", "10 %", "1 %", "below 1 %"]
    .map((text, level) => entry(`p${level}`, text));
}

function ratioLegend(entry) {
  if (shown.trained_at === null) return [entry("m0", "the learner has not trained on this answer, so there is no ratio")];
  if (!shown.log_ratios) return [entry("m0", "the run directory does not hold the ratios of this answer")];
  const names = ["below 0.5", "0.5 to 0.8", "0.8 to 0.95", "about 1", "1.05 to 1.25", "1.25 to 2", "above 2"];
  const levels = names.map((text, level) => entry(`r${level}`, text));
  return isMasked() ? [...levels, entry("m0", "not trained on")] : levels;
}

const isMasked = () => shown.ids.some((_, at) => !isTrained(at));

function piece(at) {
  const text = shown.pieces ? shown.pieces[at] : String(shown.ids[at]);
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") || "·";
}

function tokenSpans(from, to, coloring) {
  const spans = document.createDocumentFragment();
  for (let at = from; at < to; at++) {
    const span = element("span", { className: `t ${tokenClass(at, coloring)}`, textContent: piece(at) });
    span.dataset.at = at;
    spans.append(span, ...(shown.pieces ? [] : [" "]));
  }
  return spans;
}

function draw() {
  const coloring = setting("color"), form = setting("form"), place = document.getElementById("tokens");
  place.className = `tokens ${form}`;
  document.getElementById("token-legend").replaceChildren(...(form === "tokens" ? legend(coloring) : []));
  if (form === "text") return place.replaceChildren(shown.text ?? "There is no tokenizer here, so there is no text.");
  if (form === "ids") return place.replaceChildren(shown.ids.join(" "));
  let turns = 0;
  place.replaceChildren(...shown.parts.map((part) => {
    const spans = tokenSpans(part.from, part.to, coloring), number = part.to - part.from;
    turns += part.is_sampled;
    if (part.is_sampled ? shown.parts.length === 1 : number < MASKED_FOLD) return spans;
    const what = part.is_sampled ? turnTitle(turns, part)
      : [part.said, `${number} tokens that are not trained on`].filter(Boolean).join(" · ");
    return element("details", { className: part.is_sampled ? "fold turn" : "fold", open: part.is_sampled },
      element("summary", { textContent: what, title: part.said }), spans);
  }));
  facts(0, false);
}

/** The heading of a turn. Its reward is known if the journal has it: an episode's row names the ends of its turns. */
function turnTitle(number, part) {
  const known = shown.turn_ends.indexOf(part.to - 1);
  return [`turn ${number}`, `${part.to - part.from} tokens`, part.calls.length ? `calls ${part.calls.join(", ")}` : "",
    known < 0 ? "" : `reward ${shown.turn_rewards[known].toFixed(3)}`].filter(Boolean).join(" · ");
}

function facts(at, isChosen = true) {
  chosen = at;
  document.querySelector(".t.chosen")?.classList.remove("chosen");
  if (!isChosen) return;
  const span = document.querySelector(`.t[data-at="${at}"]`);
  span?.classList.add("chosen");
  span?.scrollIntoView({ block: "nearest" });
  const staleness = shown.trained_at === null ? "not trained on" : `staleness ${shown.trained_at - shown.versions[at]}`;
  const parts = [`token ${at}`, `id ${shown.ids[at]}`, shown.pieces ? JSON.stringify(shown.pieces[at]) : "",
    `version ${shown.versions[at]}`, staleness, `logprob ${shown.logprobs[at].toFixed(4)}`,
    `probability ${(100 * Math.exp(shown.logprobs[at])).toFixed(2)} %`, isTrained(at) ? "" : "masked",
    ratio(at) === null ? "" : `importance ratio ${ratio(at).toFixed(4)}`,
    shown.learner_log_ratios?.[at] == null ? "" : `learner / proximal ${Math.exp(shown.learner_log_ratios[at]).toFixed(4)}`,
    shown.old_kv[at] ? "sampled on KV of older weights" : ""];
  document.getElementById("token-facts").textContent = parts.filter(Boolean).join("  ·  ");
}

async function load(number) {
  const problem = document.getElementById("answer-problem");
  problem.hidden = true;
  try {
    shown = await getJson(`${base}/data/answers/${panel.dataset.group}/${number}`);
  } catch (error) {
    problem.textContent = error.message;
    problem.hidden = false;
    return;
  }
  document.getElementById("answer-number").textContent = number;
  panel.setAttribute("aria-labelledby", `tab-${number}`);
  draw();
  document.body.dataset.ready = String(number);
}

function choose(tab, isFocused) {
  for (const other of document.querySelectorAll(".sibling")) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
  }
  if (isFocused) tab.focus();
  remember();
  return load(tab.dataset.answer);
}

function remember() {
  const tab = document.querySelector(".sibling[aria-selected=true]");
  history.replaceState(null, "", `?answer=${tab.dataset.answer}&color=${setting("color")}`);
}

function setUp() {
  const tabs = [...document.querySelectorAll(".sibling")];
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab, false));
    tab.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) choose(tabs[(at + move + tabs.length) % tabs.length], true);
    });
  });
  for (const input of document.querySelectorAll("input[name=color], input[name=form]")) {
    input.addEventListener("change", () => {
      remember();
      if (shown) draw(); // else `load` draws it so, when the answer has come
    });
  }
  const place = document.getElementById("tokens");
  place.addEventListener("mouseover", (event) => event.target.dataset.at && facts(Number(event.target.dataset.at)));
  place.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!move || !shown) return;
    event.preventDefault();
    facts(Math.min(Math.max(0, chosen + move), shown.ids.length - 1));
  });
  return load(document.querySelector(".sibling[aria-selected=true]").dataset.answer);
}

document.getElementById("copy").addEventListener("click", async () => {
  const sign = document.getElementById("copied");
  try {
    await navigator.clipboard.writeText(location.href);
    sign.textContent = "Copied. It works for everyone who shows this run directory on the same port.";
  } catch {
    sign.textContent = location.href; // the browser refuses the clipboard outside of localhost and https
  }
});
if (panel) setUp();
