// Sets the theme before the page is drawn, so that it does not flash. Without a choice the system's theme counts.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("async-rl-theme"); } catch { /* storage may be off */ }
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
