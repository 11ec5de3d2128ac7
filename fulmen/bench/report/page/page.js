// Draws the page: the result, the sections of the suite, pass and cache that are chosen, and the table of all cells.
// Text enters as text only. content.py says what the blocks are.
(async () => { // one scope, closed to the page, and one catch
"use strict";
try {
const $ = (id) => document.getElementById(id);
if (!globalThis.DecompressionStream) throw new Error("this browser has no DecompressionStream; one of 2024 has");
const packed = new Blob([Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0))]);
const DATA = await new Response(packed.stream().pipeThrough(new DecompressionStream("deflate"))).json();
const ROWS = new Map(DATA.rows.map((row) => [row.id, row]));

function fill(node, attributes, ...children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const put = (id, ...children) => { $(id).replaceChildren(); return fill($(id), {}, children); };
const button = (attributes, ...children) => h("button", { type: "button", ...attributes }, children);

function show(entry) {
  if (Array.isArray(entry)) return entry.map(show);
  if (typeof entry !== "object") return entry;
  const { text, look, row, title, mark, bar, ticks = [] } = entry;
  const content = [mark && h("i", { class: "mark " + mark[0], "aria-hidden": "true" }, mark[1]), text];
  if (row) return h("a", { href: "#row=" + row, class: look }, content);
  if (!bar) return h("span", { class: look, title }, content);
  const part = ([kind, from, to]) => s("rect", { class: kind, x: `${from}%`, width: `${Math.max(0, to - from)}%` });
  return s("svg", { class: "bar", "aria-hidden": "true" }, bar.map(part),
    ticks.map((x) => s("line", { x1: `${x}%`, x2: `${x}%`, y2: "100%" })));
}

function table({ columns, lines, look }) {
  const cell = (entry, [, kind]) => h(kind === "key" ? "th" : "td", { class: kind, scope: kind === "key" && "row" },
    show(entry));
  const heading = (line, before) => columns[0][1] === "group" && line[0] !== before?.[0]
    && h("tr", {}, h("th", { colspan: columns.length }, line[0]));
  return h("div", { class: "scroll", tabindex: "0" }, h("table", { class: look },
    columns.some(([name]) => name) && h("thead", {}, h("tr", {}, columns.map(([name, kind]) =>
      h("th", { scope: "col", class: kind }, show(name))))),
    h("tbody", {}, lines.map((line, i) => [heading(line, lines[i - 1]),
      h("tr", {}, line.map((entry, j) => cell(entry, columns[j])))]))));
}

function command({ text }) {
  const copy = button({ class: "copy", async click() {
    await navigator.clipboard.writeText(text).catch(() => prompt("Press Ctrl+C to copy", text));
    copy.textContent = "Copied";
  } }, "Copy");
  return h("div", { class: "command" }, h("code", { tabindex: "0" }, text), copy);
}

const BLOCKS = {
  table,
  command,
  legend: ({ entries }) => h("p", { class: "legend" }, entries.map((one) => h("span", {}, show(one)))),
  facts: ({ facts }) => h("dl", { class: "facts" }, facts.map(([name, value]) =>
    h("div", { class: value.length > 60 && "wide" }, h("dt", {}, name), h("dd", {}, show(value))))),
  card: ({ title, blocks, folded }) => h(folded ? "details" : "figure", { class: "card" },
    h(folded ? "summary" : "figcaption", {}, title), blocks.map(draw)),
  figure: ({ svg }) => fill(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, { class: "chart" }),
};
const draw = (block) => BLOCKS[block.kind](block);

// What a link to a row shows: a tip under the pointer or the focus, and on a click the drawer with all samples.
function showTip({ target, clientX, clientY }) {
  const link = target.closest?.("a"), to = link?.getAttribute("href") ?? link?.getAttribute("xlink:href");
  const row = ROWS.get(to?.split("#row=")[1]), tip = $("tip");
  tip.hidden = !row;
  if (!row) return;
  put("tip", row.tip.map((line, i) => h(i ? "div" : "strong", {}, line)));
  const box = link.getBoundingClientRect(), { width, height } = tip.getBoundingClientRect();
  const x = clientX ?? box.left, y = clientY ?? box.bottom;
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18) + "px";
}
const hideTip = () => { $("tip").hidden = true; };
fill(document, { pointermove: showTip, focusin: showTip, focusout: hideTip });

// All samples in the order they were taken, the median and its interval. Places are per cent.
function strip({ samples, clocks, median, low, high }) {
  const least = Math.min(...samples), most = Math.max(...samples), range = most - least || 1;
  const x = (i) => `${1 + 84 * (i + 0.5) / samples.length}%`, y = (t) => 92 - 84 * (t - least) / range;
  const label = (t) => s("text", { x: "100%", y: `${y(t) + 2}%`, "text-anchor": "end" }, `${t.toPrecision(4)} ms`);
  const clock = (i) => (clocks.length === samples.length ? `, ${Math.round(clocks[i])} MHz` : "");
  return s("svg", { class: "strip s0", role: "img", "aria-label": `${samples.length} samples` },
    low && s("rect", { x: "1%", width: "84%", y: `${y(high)}%`, height: `${Math.max(0.5, y(low) - y(high))}%` }),
    s("line", { x1: "1%", x2: "85%", y1: `${y(median)}%`, y2: `${y(median)}%` }),
    samples.map((t, i) => s("circle", { cx: x(i), cy: `${y(t)}%`, r: 2 },
      s("title", {}, `sample ${i + 1}: ${t.toPrecision(4)} ms${clock(i)}`))), label(least), label(most));
}

const drawer = $("drawer");
function openLinked() {
  const row = ROWS.get(location.hash.split("#row=")[1]);
  if (!row) return drawer.close();
  const [name, where, time, ...more] = row.tip;
  const quiet = (label, text, click) => button({ class: "quiet", "aria-label": label, click }, text);
  put("drawer", h("header", {},
    h("div", {}, h("p", { class: "eyebrow" }, row.eyebrow), h("h2", { id: "drawer-title" }, name), h("p", {}, where)),
    h("div", {}, quiet("Previous row", "←", () => step(-1)), quiet("Next row", "→", () => step(1)),
      quiet("Close", "✕", () => drawer.close()))),
  h("p", { class: "big" }, time), more.map((line) => h("p", {}, line)),
  row.samples.length > 1 && [strip(row), h("p", { class: "legend" },
    "A dot is a sample, in the order taken. The line is the median, the band its interval.")], row.blocks.map(draw));
  if (!drawer.open) drawer.showModal(); // closing it gives the focus back
  hideTip();
  drawer.scrollTop = 0;
}
function step(by) {
  const links = [...document.querySelectorAll("#table tr:not([hidden]) a")].map((link) => link.hash);
  location.replace(links.at((links.indexOf(location.hash) + by) % links.length));
}
fill(drawer, {
  close: () => history.replaceState(null, "", location.pathname + location.search),
  click: (event) => event.target === drawer && drawer.close(),
  keydown({ key, target }) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (by && !target.closest("code, .scroll")) step(by);
  },
});
addEventListener("hashchange", openLinked);

// ------------------------------------------------------------------------------------------- the result

put("headline", DATA.title);
put("subject", DATA.subject);
put("notes", DATA.notes.map((note) => h("p", { class: "error" }, note)));
put("headlines", DATA.headlines.map(draw));

// ------------------------------------------------------------------------------------------- sections

const headings = DATA.headings.map(([id, title, lead]) =>
  h("section", { id }, h("h2", {}, title), h("p", { class: "lead" }, lead), h("div", { class: "grid" })));
put("sections", headings);
$("glossary").before($("cells"));
put("nav", [...document.querySelectorAll("main section")].map(({ id }) => h("a", { href: "#" + id }, id)));

const chosen = { suite: "", pass_: "", cache: "" }, names = Object.keys(chosen);
const matches = (section, some) => some.every((name) => !section[name] || section[name] === chosen[name]);
function drawSections() {
  put("controls", names.map((name, i) => { // what the choices before it leave; else the first of them
    const some = DATA.sections.filter((one) => one[name] && matches(one, names.slice(0, i)));
    const values = [...new Set(some.map((one) => one[name]))];
    if (!values.includes(chosen[name])) [chosen[name]] = values;
    return values.length > 1 && h("fieldset", { class: "segments" }, values.map((value) => h("label", {},
      h("input", { type: "radio", name, value, checked: value === chosen[name] }), h("span", {}, value))));
  }));
  for (const section of headings) {
    const some = DATA.sections.filter((one) => one.name === section.id && matches(one, names));
    section.hidden = !some.length;
    section.lastChild.replaceChildren(...some.flatMap((one) => one.blocks).map(draw));
  }
}
$("controls").addEventListener("change", ({ target: { name, value } }) => {
  chosen[name] = value;
  drawSections();
  document.querySelector(`input[name="${name}"]:checked`).focus({ preventScroll: true });
});
drawSections();

// --------------------------------------------------------------------------------------------- cells

const filter = { kind: "", words: [] }, order = { column: -1, down: false };
put("table", table(DATA.cells));
const body = $("table").querySelector("tbody"), headers = [...$("table").querySelectorAll("thead th")];
const lines = [...body.rows].map((tr, i) => {
  const row = DATA.rows[i];
  tr.classList.toggle("replaced", row.replaced);
  return { tr, row, entries: DATA.cells.lines[i], text: `${tr.textContent} ${row.find}`.toLowerCase() };
});
put("tiles", DATA.tiles.map(([kind, glyph, count, severity, word, title]) => button({
  class: "tile " + severity, title, "data-kind": kind,
  click() { filter.kind = filter.kind === kind ? "" : kind; drawTable(); },
}, glyph, h("strong", {}, count.toLocaleString("en-US")), h("span", { class: "word" }, word))));
headers.forEach((th, column) => th.replaceChildren(button({ class: "sort", click() {
  const again = order.column === column;
  Object.assign(order, again && order.down ? { column: -1, down: false } : { column, down: again });
  drawTable();
} }, th.textContent)));

const valueOf = (entry) => entry.sort ?? entry.text ?? [entry].flat().map((one) => one.text ?? one).join(" ");
function compare(one, two) { // what has no value comes last, either way
  const [a, b] = [one, two].map(({ entries }) => valueOf(entries[order.column]));
  if (a === "" || b === "") return (a === "") - (b === "");
  const by = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return order.down ? -by : by;
}
function drawTable() {
  for (const { tr, row, text } of lines) {
    tr.hidden = (filter.kind && row.kind !== filter.kind) || !filter.words.every((word) => text.includes(word));
  }
  body.append(...(order.column < 0 ? lines : lines.toSorted(compare)).map(({ tr }) => tr));
  const sorted = (i) => (order.column !== i ? "none" : order.down ? "descending" : "ascending");
  headers.forEach((th, i) => th.setAttribute("aria-sort", sorted(i)));
  for (const tile of $("tiles").children) tile.setAttribute("aria-pressed", String(tile.dataset.kind === filter.kind));
  put("shown", `${lines.filter(({ tr }) => !tr.hidden).length} of ${lines.length} cells.`,
    " Click a heading to sort, an implementation to see its samples.");
}
$("search").addEventListener("input", ({ target }) => {
  filter.words = target.value.toLowerCase().split(/\s+/).filter(Boolean);
  drawTable();
});
drawTable();

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((box) => { box.open = true; }));
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || drawer.open || event.target.closest("input")) return;
  event.preventDefault();
  $("search").focus();
});
if (location.hash.startsWith("#row=")) openLinked();
document.documentElement.dataset.ready = "yes";
} catch (problem) {
  const trouble = document.getElementById("trouble");
  trouble.hidden = false;
  trouble.textContent = `This report could not be drawn: ${problem.message}. report.md holds the same numbers.`;
  console.error(problem);
}
})();
