// Elements, numbers, rows, and the small pieces that all sections use. Text enters the page as text only: see `h`.

const $ = (id) => document.getElementById(id);
if (!globalThis.DecompressionStream) throw new Error("this browser has no DecompressionStream; one of 2024 has");
const inflate = (blob, format) => new Response(blob.stream().pipeThrough(new DecompressionStream(format)));
const packed = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
const DATA = await inflate(new Blob([packed]), "deflate").json();

function fill(node, attributes, ...children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") node.style.cssText = value; // the policy of this page forbids style attributes
    else if (![undefined, null, false].includes(value)) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const put = (id, ...children) => { $(id).replaceChildren(); return fill($(id), {}, children); };
const button = (attributes, ...children) => h("button", { type: "button", ...attributes }, children);
const link = (text, row) => button({ class: "link", click: () => openDrawer(row) }, text);

// ------------------------------------------------------------------------------------------- numbers

const commas = (x) => x.toLocaleString("en-US");
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const format = (make) => (x, ...more) => (isNumber(x) ? make(x, ...more) : "");
const digits = format((x, significant = 4) => {
  const places = x === 0 ? 0 : significant - 1 - Math.floor(Math.log10(Math.abs(x))), fraction = Math.max(places, 0);
  if (places > 6) return x.toPrecision(significant);
  return x.toLocaleString("en-US", { minimumFractionDigits: fraction, maximumFractionDigits: fraction });
});
const ms = format((x) => digits(x) + " ms");
const percent = format((x, places = 0) => (100 * x).toFixed(places) + " %");
const times = format((x) => digits(x, 3) + "×");
const error = format((x) => x.toExponential(1));
const flops = format((x) => `${digits(x / DATA.flops_unit[0], 3)} ${DATA.flops_unit[1]}`);
const traffic = format((x) => digits(x / 1e9) + " GB/s");
const bytes = format((x) => {
  const power = x ? Math.min(3, Math.max(0, Math.floor(Math.log2(Math.abs(x)) / 10))) : 0;
  return `${digits(x / 1024 ** power, power ? 4 : 1)} ${["B", "KiB", "MiB", "GiB"][power]}`;
});
const plain = (x) => (typeof x === "boolean" ? (x ? "yes" : "no") : isNumber(x) ? commas(x) : String(x ?? ""));
const short = (n) => (n >= 1024 && n % 1024 === 0 ? n / 1024 + "K" : commas(n));
const plural = (n, one) => `${commas(n)} ${n === 1 ? one : one + "s"}`;
const dated = (time, length) => time.slice(0, length).replace("T", " ");

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const unique = (values) => [...new Set(values)];
const ascending = (values) => [...values].sort((a, b) => a - b);
const median = (values) => { const x = ascending(values), n = x.length; return (x[(n - 1) >> 1] + x[n >> 1]) / 2; };
const groups = (values, key) => [...Map.groupBy(values, key)];
const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined);

// ---------------------------------------------------------------------------------------------- rows

const GLYPHS = { ok: "✓", flagged: "▲", failed: "✕", withheld: "⊘", oom: "□", unsupported: "–", timeout: "◷",
  interrupted: "‖", skipped: "·" };
const WORDS = Object.fromEntries(DATA.words.map(([kind, words]) => [kind, Object.fromEntries(words)]));
const wordOf = (kind, name) =>
  own(WORDS[kind], name) || ["care", name.toLowerCase(), "A word that this report does not know."];
const RUNS = new Map(DATA.runs.map((run) => [run.id, run]));
// A cell of a results file, in the words of this page.
const rowOf = ({ run_id: run, config_hash: hash, pass_: pass, samples_ms: samples, clocks_mhz: clocks, ...cell }) =>
  ({ ...cell, run, hash, pass, samples, clocks, timed: cell.median > 0 });
const ROWS = DATA.rows.map((cell, id) => ({ ...rowOf(cell), id }));
const LIVE = ROWS.filter((row) => !row.replaced);
const SUITES = unique(ROWS.map((row) => row.suite));
const COMPETITORS = unique(LIVE.map((row) => row.competitor));
const sizeOf = (row, part = "peak", what = "bytes") => [row.memory[part]?.[what]].find(isNumber);
const interval = (row) => (isNumber(row.low) ? `95 % interval ${digits(row.low)} to ${digits(row.high)}` : "");

// What the charts show. Few competitors in all keep their colour everywhere; many are counted per suite.
const state = { suite: SUITES[0], pass: "", cache: "", baseline: {}, filter: {}, sort: null };
const competitors = (suite) => unique(LIVE.filter((row) => row.suite === suite).map((row) => row.competitor));
const colourOf = (name) =>
  Math.max(0, (COMPETITORS.length <= 8 ? COMPETITORS : competitors(state.suite)).indexOf(name));
const baseline = (suite) => own(state.baseline, suite) || own(DATA.baselines, suite) || competitors(suite)[0];
const visible = () => LIVE.filter((row) => ["suite", "pass", "cache"].every((name) => row[name] === state[name]));

const place = (row) => [row.family, row.n, row.pass, row.cache, row.run].join("\n");
const BY_PLACE = Map.groupBy(LIVE.filter((row) => row.timed), place);
function speedup(row) {
  const base = row.timed && BY_PLACE.get(place(row))?.find((other) => other.competitor === baseline(row.suite));
  return base ? { value: base.median / row.median, other: base.function !== row.function, base } : null;
}
function speedupWords(row) {
  const gain = speedup(row);
  if (!gain || gain.base === row) return gain || !row.timed ? "" : "no baseline";
  return `${times(gain.value)} as fast as ${gain.base.competitor}${gain.other ? ", another function" : ""}`;
}

// ------------------------------------------------------------------------------------- small pieces

const MARKS = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", "M-4,-4H4V4H-4Z", "M0,-5L4.8,4H-4.8Z", "M0,-5.6L5.6,0L0,5.6L-5.6,0Z",
  "M0,5L4.8,-4H-4.8Z", "M-4,-4L4,4M-4,4L4,-4", "M-5.2,0H5.2M0,-5.2V5.2", "M0,-5.6L5.2,-1.6L3.2,4.4H-3.2L-5.2,-1.6Z",
];
const tint = (index) => `--c: var(--s${index % 8})`;
const mark = (index, more) => s("path",
  { class: `mark ${more || ""}`, style: tint(index), d: MARKS[(index + (index >> 3)) % 8] });
const key = (shape, text) => h("span", {},
  s("svg", { class: "swatch", viewBox: "-12 -6 24 12", "aria-hidden": "true" }, shape), " ", text);
const swatch = (name, text = name) => key([s("path", { class: "line", style: tint(colourOf(name)), d: "M-12,0H12" }),
  mark(colourOf(name))], text);
const partKeys = (parts) => Object.entries(parts).map(([part, name]) =>
  key(s("rect", { class: "part " + part, x: -12, y: -6, width: 24, height: 12 }), name));
const badge = ([severity, word, sentence], title = sentence) => h("span", { class: "badge " + severity, title }, word);
const flagBadges = (row) => row.flags.map(([flag, why]) => badge(wordOf("flag", flag), why));
function statusBadge(row) {
  const [severity, word, sentence] = wordOf("status", row.kind);
  return h("span", { class: `status ${severity}`, title: row.reason || sentence },
    h("span", { class: "glyph" }, own(GLYPHS, row.kind)), word);
}
const agreement = (ok, text) => h("span", { class: `status ${ok ? "good" : "bad"}` }, `${ok ? "✓" : "✕"} ${text}`);
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value || value === 0)
  .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
const card = (title, ...content) => h("div", { class: "card" }, title && h("h3", {}, title), content);
const tile = (glyph, count, [severity, word, title], more) => button({ class: "tile " + severity, title, ...more },
  glyph, h("span", { class: "count" }, commas(count)), h("span", { class: "word" }, word));

// A table that scrolls. columns: [name or element, (line) => content, "number" or "key" or a class].
function tableOf(kind, columns, lines, label) {
  const cell = (line, [, show, look], i) => h(look === "key" ? "th" : "td",
    { class: look, scope: look === "key" && "row" }, show ? show(line) : line[i]);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: kind },
    h("thead", {}, h("tr", {}, columns.map(([name, , look]) => h("th", { scope: "col", class: look }, name)))),
    h("tbody", {}, lines.map((line) => h("tr", {}, columns.map((column, i) => cell(line, column, i)))))));
}
function copyButton(text, label = "Copy") {
  const node = button({ class: "copy", title: text, async click() {
    const done = await navigator.clipboard.writeText(text).then(() => true, () => prompt("Press Ctrl+C to copy", text));
    if (done) node.textContent = "Copied";
    setTimeout(() => { node.textContent = label; }, 1600);
  } }, label);
  return node;
}
const command = (text) => h("div", { class: "command" }, h("code", { tabindex: "0" }, text), copyButton(text));

// One of several options, as radio buttons, whose arrow keys work as they should, or as a list.
const radios = (label, name, options, chosen, select) => h("fieldset", { class: "segments" }, h("legend", {}, label),
  options.map((value) => h("label", {}, h("input",
    { type: "radio", name, value, checked: value === chosen, change: () => select(value) }), h("span", {}, value))));
const dropdown = (label, id, options, chosen, select) => h("label", { class: "field", for: id }, h("span", {}, label),
  h("select", { id, change: (event) => { select(event.target.value); $(id)?.focus(); } }, options.map(
    ([value, text = value]) => h("option", { value, selected: String(value) === String(chosen) }, text))));

// ---------------------------------------------------------------------------------------- stops and tips

// A stop is a mark of a chart or a cell of a heatmap that has more to say than it shows. The pointer or the focus
// shows the lines, a click or Enter opens the row. A `walk`, chart or heatmap, is one stop of the tab key: the arrows
// move within it, up and down by as many stops as it has `data-across`.
const STOPS = new WeakMap();
function stop(node, lines, row) {
  STOPS.set(node, { lines, row });
  node.classList.add("stop");
  return fill(node, { tabindex: "-1" });
}
const tip = $("tip");
const hideTip = () => { tip.hidden = true; };
const stopOf = (event) => event.target.closest?.(".stop");
function showTip(node, x, y) {
  put("tip", STOPS.get(node).lines().filter(Boolean).map((line, i) => h(i ? "div" : "strong", {}, line)));
  tip.hidden = false;
  ($("drawer").open ? $("drawer") : document.body).append(tip);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18) + "px";
}
function tipLines(row) {
  const [, word, sentence] = wordOf("status", row.status);
  const flags = row.flags.filter(([flag]) => flag !== "ANOTHER-FUNCTION");
  return [row.competitor, `${row.where} · ${row.pass}`,
    row.timed ? [ms(row.median), interval(row)].filter(Boolean).join(", ") : `${word}: ${row.reason || sentence}`,
    speedupWords(row), row.timed && isNumber(row.efficiency) && `${percent(row.efficiency)} of what is possible`,
    ...flags.map(([flag, why]) => `${wordOf("flag", flag)[1]}: ${why}`)];
}
function openStop(node) {
  const row = node && STOPS.get(node).row;
  if (!row) return;
  hideTip();
  openDrawer(row);
}
function walk(event) {
  const box = event.target.closest?.(".walk"), across = Number(box?.dataset.across || 1);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
  if (box && event.key === "Enter" && event.target.tagName !== "BUTTON") openStop(stopOf(event));
  if (!box || !step) return;
  event.preventDefault();
  const places = [...box.querySelectorAll(".place")], inside = (x) => x && [x, x.firstChild].find((y) => STOPS.has(y));
  let at = places.findIndex((x) => x.contains(event.target)) + step;
  while (places[at] && !inside(places[at])) at += step;
  inside(places[at])?.focus();
}
fill(document, {
  keydown: walk,
  click: (event) => openStop(stopOf(event)),
  pointermove: (event) => (stopOf(event) ? showTip(stopOf(event), event.clientX, event.clientY) : hideTip()),
  focusout: hideTip,
  wheel: hideTip, // not "scroll": focus scrolls, too
  touchmove: hideTip,
  focusin(event) {
    const node = stopOf(event), { left, bottom } = event.target.getBoundingClientRect();
    if (node) showTip(node, left, bottom - 10);
  },
});
