// What every page does: it follows the run's files, and shows what is known of a token that is pointed at.
const { base = "", changes } = document.body.dataset;
let seen = JSON.parse(document.body.dataset.seen); // by kind of file, a text that differs after each change
const LOOK_EVERY_MS = 1000;
const ask = (url) => fetch(url, { signal: AbortSignal.timeout(30000) }); // a tunnel may be dead: nothing answers then

export async function getJson(path) {
  const response = await ask(base + path);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const listeners = [];

/** Call `listener` with the kinds of files that changed: a set of metrics, status, timeline. */
export const onChange = (listener) => listeners.push(listener);

/** Ask for this page again, and take over its parts with data-live that name a kind of file that changed. */
async function replaceParts(changed) {
  const parts = [...document.querySelectorAll("[data-live]")].filter((part) => part.dataset.live.split(" ").some((kind) => changed.has(kind)));
  if (!parts.length) return;
  const response = await ask(location.href);
  if (!response.ok) throw new Error(response.statusText);
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const part of parts) part.replaceWith(fresh.getElementById(part.id));
}

const sign = document.getElementById("live");

async function look() {
  try {
    if (!document.hidden) {
      const now = await (await ask(changes)).json();
      const changed = new Set(Object.keys(now).filter((kind) => now[kind] !== seen[kind]));
      if (changed.size) await Promise.all([replaceParts(changed), ...listeners.map((call) => call(changed))]);
      seen = now; // only then: what could not be shown is asked for again
      sign.textContent = document.querySelector(".pill:is(.running, .resuming, .paused)") ? "live" : "up to date";
      sign.className = "live on";
    }
  } catch (error) {
    sign.textContent = `not updated: ${error.message}`;
    sign.className = "live";
  }
  sign.hidden = false;
  setTimeout(look, LOOK_EVERY_MS);
}

const tokens = document.getElementById("tokens");

function choose(span) {
  if (!span?.classList.contains("t")) return;
  tokens.querySelector(".chosen")?.classList.remove("chosen");
  span.classList.add("chosen");
  document.getElementById("token-facts").textContent = span.dataset.facts;
}

tokens?.addEventListener("mouseover", (event) => choose(event.target));
tokens?.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move) return;
  event.preventDefault();
  const spans = [...tokens.querySelectorAll(".t")], at = spans.findIndex((span) => span.classList.contains("chosen"));
  choose(spans[Math.max(0, Math.min(at + move, spans.length - 1))]);
  tokens.querySelector(".chosen").scrollIntoView({ block: "nearest" });
});
look();
