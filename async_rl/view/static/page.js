// What every page does: switches the theme, and follows the run's changes by server-sent events.
const main = document.getElementById("main");
export const base = main.dataset.base || "";

export async function getJson(path) {
  const response = await fetch(path);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const listeners = [];

/** Call `listener` with a set of the files that changed: metrics, status, journal, timeline, or cells of a sweep. */
export function onChange(listener) {
  listeners.push(listener);
}

export function onTheme(listener) {
  document.addEventListener("theme-changed", listener);
}

document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("async-rl-theme", theme); } catch { /* storage may be off */ }
  document.dispatchEvent(new Event("theme-changed"));
});

async function replaceParts(changed) {
  for (const part of document.querySelectorAll("[data-live]")) {
    if (!part.dataset.on.split(" ").some((kind) => changed.has(kind))) continue;
    const response = await fetch(part.dataset.live);
    if (response.ok) part.innerHTML = await response.text(); // made by our templates, which escape all text
  }
  document.dispatchEvent(new Event("parts-replaced"));
}

function follow() {
  if (!main.dataset.events) return;
  const sign = document.getElementById("live");
  let events = null;
  let isNews = document.hidden; // the first change names every file: no news to a page that has just been loaded
  let working = Promise.resolve();
  const say = (text, state) => {
    sign.hidden = false;
    sign.textContent = text;
    sign.className = `live ${state}`;
  };
  const sayStanding = () => say(document.querySelector(".pill:is(.running, .waiting, .resuming)") ? "live" : "up to date", "on");
  const take = (event) => {
    if (!isNews) {
      isNews = true;
      return;
    }
    const changed = new Set(JSON.parse(event.data));
    working = working.then(() => Promise.all([replaceParts(changed), ...listeners.map((call) => call(changed))]))
      .then(() => events?.readyState === EventSource.OPEN && sayStanding()) // the run may have ended, or go on again
      .catch((error) => say(`not updated: ${error.message}`, "off"));
  };
  const close = () => {
    events?.close();
    events = null;
    isNews = true;
  };
  const open = () => {
    if (events || document.hidden) return;
    events = new EventSource(main.dataset.events);
    events.addEventListener("open", sayStanding);
    events.addEventListener("error", () => say("not connected", "off"));
    events.addEventListener("change", take);
  };
  // A browser has six connections to a server, for all of its tabs: one that nobody sees needs none.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open); // also if the browser had kept the page and goes back to it
}

follow();
