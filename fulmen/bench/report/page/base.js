// Elements, numbers, and the rows as the sections need them. Text enters the page as text only: see `h` and `s`.

const DATA = JSON.parse(document.getElementById("data").textContent);
for (const kind of Object.keys(DATA.words)) DATA.words[kind] = Object.fromEntries(DATA.words[kind]);
const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const put = (node, ...children) => { node.replaceChildren(); return fill(node, {}, children); };
const link = (text, row) => h("button", { type: "button", class: "link", click: () => openDrawer(row) }, text);

// ------------------------------------------------------------------------------------------- numbers

const commas = (x) => x.toLocaleString("en-US");
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const format = (make) => (x, ...more) => (isNumber(x) ? make(x, ...more) : "");

const digits = format((x, significant = 4) => {
  const places = x === 0 ? 0 : significant - 1 - Math.floor(Math.log10(Math.abs(x)));
  if (places > 6) return x.toPrecision(significant);
  return x.toLocaleString("en-US", { minimumFractionDigits: Math.max(places, 0), maximumFractionDigits: Math.max(places, 0) });
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
const plain = (x) => (typeof x === "boolean" ? (x ? "yes" : "no") : isNumber(x) ? commas(x) : String(x));
const short = (n) => (n >= 1024 && n % 1024 === 0 ? n / 1024 + "K" : commas(n));
const plural = (n, one) => `${commas(n)} ${n === 1 ? one : one + "s"}`;

const sum = (values) => values.reduce((a, b) => a + b, 0);
const unique = (values) => [...new Set(values)];
const ascending = (values) => [...values].sort((a, b) => a - b);
const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined);
function median(values) {
  const ordered = ascending(values), m = ordered.length >> 1;
  return ordered.length % 2 ? ordered[m] : (ordered[m - 1] + ordered[m]) / 2;
}
function groups(values, key) {
  const found = new Map();
  for (const value of values) {
    const k = key(value);
    if (!found.has(k)) found.set(k, []);
    found.get(k).push(value);
  }
  return found;
}
function unpack(packed) {
  if (!packed) return [];
  const [unit, first, ...rest] = packed.split(" ").map(Number);
  return [first, ...rest.map((x) => x + first)].map((x) => x * unit);
}

// ---------------------------------------------------------------------------------------------- rows

const GLYPHS = { ok: "✓", flagged: "▲", failed: "✕", withheld: "⊘", oom: "□", unsupported: "–", timeout: "◷", interrupted: "‖", skipped: "·" };
const UNKNOWN = "A word that this report does not know.";
const FLAGGED = ["care", "read with care", "Measured, but with a flag that changes how the number is to be read."];
const statusWord = (status) => (status === "flagged" ? FLAGGED : own(DATA.words.status, status) || ["care", "unknown", UNKNOWN]);
const flagWord = (flag) => own(DATA.words.flag, flag) || ["care", flag.toLowerCase(), UNKNOWN];

const RUNS = new Map(DATA.runs.map((run) => [run.id, run]));
const ROWS = DATA.rows;
ROWS.forEach((row, id) => {
  row.id = id;
  row.flags ||= [];
  for (const name of ["memory", "correctness", "stats", "case"]) row[name] ||= {};
  row.timed = isNumber(row.median);
  row.flagged = row.flags.some(([flag]) => flagWord(flag)[0] !== "note");
  row.kind = row.timed ? (row.flagged ? "flagged" : "ok") : row.status;
  row.label = DATA.families[row.family].label;
  row.where = row.label + (isNumber(row.n) ? ` · N ${commas(row.n)}` : "");
});
const LIVE = ROWS.filter((row) => !row.replaced);
const SUITES = unique(ROWS.map((row) => row.suite));
const peak = (row) => (row.memory.peak ? row.memory.peak[0] : undefined);
const spread = (row) => (isNumber(row.low) && isNumber(row.high) ? (row.high - row.low) / 2 / row.median : undefined);
const rate = (row, what) => (row.timed && isNumber(row[what]) ? row[what] / row.median * 1e3 : undefined);
const interval = (row) => (isNumber(row.low) ? `95 % interval ${digits(row.low)} to ${digits(row.high)}` : "");

// What the charts show. Few competitors in all keep their colour everywhere; many are counted per suite.
const state = { suite: SUITES[0], pass: "", cache: "", baseline: {}, memoryN: {}, filter: {}, sort: null };
const COMPETITORS = unique(LIVE.map((row) => row.competitor));
const competitors = (suite) => unique(LIVE.filter((row) => row.suite === suite).map((row) => row.competitor));
const colourOf = (name) => Math.max(0, (COMPETITORS.length <= 8 ? COMPETITORS : competitors(state.suite)).indexOf(name));
const baseline = (suite) => own(state.baseline, suite) || own(DATA.baselines, suite) || competitors(suite)[0];
const visible = () => LIVE.filter((row) => row.suite === state.suite && row.pass === state.pass && row.cache === state.cache);

const place = (row) => [row.suite, row.family, row.n, row.pass, row.cache, row.run].join("\n");
const BY_PLACE = groups(LIVE, place);
function speedup(row) {
  const base = (BY_PLACE.get(place(row)) || []).find((other) => other.competitor === baseline(row.suite));
  if (!base || !base.timed || !row.timed) return null;
  const low = (base.low || base.median) / (row.high || row.median), high = (base.high || base.median) / (row.low || row.median);
  return { value: base.median / row.median, low, high, other: base.function !== row.function, base };
}
function speedupWords(row) {
  const gain = speedup(row);
  if (!gain) return row.timed ? "no baseline" : "";
  return gain.base === row ? "" : `${times(gain.value)} as fast as ${gain.base.competitor} (${times(gain.low)} to ${times(gain.high)})${gain.other ? ", another function" : ""}`;
}

// ------------------------------------------------------------------------------------- small pieces

const MARKS = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  (r) => `M${-r},${-r}H${r}V${r}H${-r}Z`,
  (r) => `M0,${-1.25 * r}L${1.2 * r},${r}H${-1.2 * r}Z`,
  (r) => `M0,${-1.4 * r}L${1.4 * r},0L0,${1.4 * r}L${-1.4 * r},0Z`,
  (r) => `M0,${1.25 * r}L${1.2 * r},${-r}H${-1.2 * r}Z`,
  (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
  (r) => `M${-1.3 * r},0H${1.3 * r}M0,${-1.3 * r}V${1.3 * r}`,
  (r) => `M0,${-1.4 * r}L${1.3 * r},${-0.4 * r}L${0.8 * r},${1.1 * r}H${-0.8 * r}L${-1.3 * r},${-0.4 * r}Z`,
];
const markPath = (index, r) => MARKS[(index + (index >> 3)) % 8](r);
const colourClass = (index) => "c" + (index % 8);
const key = (shape, text) => h("span", {}, s("svg", { class: "swatch", viewBox: "-12 -6 24 12", "aria-hidden": "true" }, shape), " ", text);
function swatch(competitor, text = competitor) {
  const i = colourOf(competitor);
  return key([s("path", { class: "line " + colourClass(i), d: "M-12,0H12" }), s("path", { class: "mark " + colourClass(i), d: markPath(i, 3.6) })], text);
}
const breakable = (name) => name.split(/(?<=[_\-/.])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));
const badge = (kind, text, title) => h("span", { class: "badge " + kind, title }, text);
const flagBadges = (row) => row.flags.map(([flag, why]) => badge(flagWord(flag)[0], flagWord(flag)[1], why));
const glyph = (kind) => h("span", { class: "glyph", "aria-hidden": "true" }, own(GLYPHS, kind) || "?");
function statusBadge(row) {
  const [severity, word, sentence] = statusWord(row.kind);
  return h("span", { class: `status ${severity}`, title: row.reason || sentence }, glyph(row.kind), word);
}
const agreement = (ok, text) => h("span", { class: `status ${ok ? "good" : "bad"}` }, `${ok ? "✓" : "✕"} ${text}`);

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== undefined && value !== null && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
// A table that scrolls. columns: [name or element, (line) => content, "number" or "key"].
function tableOf(kind, columns, lines, label) {
  const cell = (line, [, show, look], i) => h(look === "key" ? "th" : "td", { class: look, scope: look === "key" && "row" }, show ? show(line) : line[i]);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", { class: kind },
    h("thead", {}, h("tr", {}, columns.map(([name, , look]) => h("th", { scope: "col", class: look }, name)))),
    h("tbody", {}, lines.map((line) => h("tr", {}, columns.map((column, i) => cell(line, column, i)))))));
}

function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "copy", title: text, async click(event) {
    event.stopPropagation();
    const done = await copy(text);
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = label; }, 1600);
  } }, label);
  return button;
}
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no permission: the old way
    const area = h("textarea", { class: "offscreen" }, text);
    ($("drawer").open ? $("drawer") : document.body).append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
const command = (text) => h("div", { class: "command" }, h("code", { tabindex: "0" }, text), copyButton(text));

// One tip for everything that has more to say than it shows.
const tip = $("tip");
function showTip(x, y, lines) {
  put(tip, lines.filter(Boolean).map((line, i) => h(i ? "div" : "strong", {}, line)));
  tip.hidden = false;
  const host = $("drawer").open ? $("drawer") : document.body;
  if (tip.parentNode !== host) host.append(tip);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18) + "px";
}
const hideTip = () => { tip.hidden = true; };

function tipLines(row) {
  const [, word, sentence] = statusWord(row.status);
  return [row.competitor, `${row.where} · ${row.pass}`,
    row.timed ? [ms(row.median), interval(row)].filter(Boolean).join(", ") : `${word}: ${row.reason || sentence}`,
    speedupWords(row), row.timed && isNumber(row.efficiency) && `${percent(row.efficiency)} of what is possible`,
    ...row.flags.filter(([flag]) => flag !== "ANOTHER-FUNCTION").map(([flag, why]) => `${flagWord(flag)[1]}: ${why}`)].filter(Boolean);
}

// One of several options, as radio buttons: arrow keys work as they should.
function radios(label, name, options, selected, select) {
  return h("fieldset", { class: "segments" }, h("legend", {}, label), options.map((option) => h("label", {},
    h("input", { type: "radio", name, value: option, checked: option === selected, change: () => select(option) }),
    h("span", {}, option))));
}
function dropdown(label, id, options, selected, select) {
  const box = h("select", { id, change: () => select(box.value) }, options.map((option) => {
    const [value, text] = Array.isArray(option) ? option : [option, option];
    return h("option", { value, selected: String(value) === String(selected) }, text);
  }));
  return h("label", { class: "field", for: id }, h("span", {}, label), box);
}
