/* What docs/check_site.py asks of a page, from inside it. Each function gives a list of what is wrong. */

function look() {
  const wrong = [], host = location.origin;
  for (const entry of performance.getEntriesByType("resource"))
    if (!entry.name.startsWith(host) && !entry.name.startsWith("data:")) wrong.push("asks for " + entry.name);
  for (const node of document.querySelectorAll(".math")) {
    if (!node.querySelector("mjx-container svg")) wrong.push("formula not set: " + node.textContent.slice(0, 40));
    if (node.querySelector("[data-mjx-error]")) wrong.push("formula in error: " + node.textContent.slice(0, 40));
  }
  for (const figure of document.querySelectorAll("figure.statescan")) {
    const svg = figure.querySelector("svg");
    if (!svg || svg.getBoundingClientRect().width < 20) wrong.push("figure not drawn");
    else if (!svg.querySelector("title") || !svg.querySelector("desc")) wrong.push("figure without words");
  }
  for (const image of document.images) if (!image.naturalWidth) wrong.push("image not loaded: " + image.src);
  const over = document.documentElement.scrollWidth - innerWidth;
  if (over > 1) wrong.push("wider than the screen by " + over);
  return wrong;
}

function step() {
  const section = document.querySelector("section.stepper[data-from]");
  if (!section) return [];
  const wrong = [], frames = Number(section.dataset.frames);
  if (section.dataset.wrong !== undefined && section.dataset.wrong !== "0")
    wrong.push("stepper: " + section.querySelector(".verdict").textContent);
  if (frames > 1) {
    const press = (key) => section.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    press("ArrowRight");
    if (section.dataset.at !== "1") wrong.push("stepper: right does not step");
    if (!section.querySelector("[aria-live]").textContent) wrong.push("stepper: says nothing of what changed");
    press("End");
    if (Number(section.dataset.at) !== frames - 1) wrong.push("stepper: End is not the last");
    section.querySelector("button").click();
    if (section.dataset.at !== "0") wrong.push("stepper: the first button does not go first");
  } else if (!section.textContent) wrong.push("stepper: empty");
  return wrong;
}

function contrast(theme) {
  document.body.dataset.theme = theme;
  const parse = (text) => text.match(/[\d.]+/g).map(Number);
  const light = (c) => [0, 1, 2].map((i) => c[i] / 255).map((x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => { for (; node; node = node.parentElement) {
    const c = parse(getComputedStyle(node).backgroundColor); if (c.length < 4 || c[3] > 0.9) return c; } return [255, 255, 255]; };
  const wrong = new Map();
  for (const node of document.querySelectorAll("article p, article td, article th, article a, article code, article span, article li, article h1, .sidebar-tree a")) {
    if (!node.offsetParent || ![...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    if (node.closest("mjx-container, button:disabled, .none, .headerlink, .highlight")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) wrong.set(node.tagName + "." + node.className, ratio.toFixed(2) + " of " + node.textContent.slice(0, 30));
  }
  return [...wrong].slice(0, 5).map(([what, how]) => theme + ": contrast " + how + " (" + what + ")");
}
