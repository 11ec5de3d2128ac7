// The data of the report, and how its blocks become elements; content.py says what they are. Text enters as text only.

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
