// Elements, numbers, and the rows as the sections need them. Text enters the page as text only: see `h` and `s`.

const DATA = JSON.parse(document.getElementById("data").textContent);
for (const kind of Object.keys(DATA.words)) DATA.words[kind] = Object.fromEntries(DATA.words[kind]);
const SVG = "http://www.w3.org/2000/svg";
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
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const put = (node, ...children) => { node.replaceChildren(); return fill(node, {}, children); };

// ------------------------------------------------------------------------------------------- numbers

const commas = (x) => x.toLocaleString("en-US");
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

function digits(x, significant = 4) {
  if (!isNumber(x)) return "";
  if (x === 0) return "0";
  const places = Math.min(Math.max(significant - 1 - Math.floor(Math.log10(Math.abs(x))), 0), 6);
  return x.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}
const ms = (x) => (isNumber(x) ? digits(x) + " ms" : "");
const percent = (x, places = 0) => (isNumber(x) ? (100 * x).toFixed(places) + " %" : "");
const times = (x) => (isNumber(x) ? (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2)) + "×" : "");
const error = (x) => (isNumber(x) ? x.toExponential(1) : "");
const plain = (x) => (typeof x === "boolean" ? (x ? "yes" : "no") : isNumber(x) ? commas(x) : String(x));
function bytes(x) {
  if (!isNumber(x)) return "";
  const units = ["B", "KiB", "MiB", "GiB"];
  let i = 0;
  while (Math.abs(x) >= 1024 && i < 3) { x /= 1024; i += 1; }
  return digits(x, i ? 4 : 1) + " " + units[i];
}
const short = (n) => (n >= 1024 && n % 1024 === 0 ? n / 1024 + "K" : commas(n));
const plural = (n, one, many = one + "s") => `${commas(n)} ${n === 1 ? one : many}`;

function median(values) {
  const ordered = [...values].sort((a, b) => a - b), m = ordered.length >> 1;
  return ordered.length % 2 ? ordered[m] : (ordered[m - 1] + ordered[m]) / 2;
}
const unique = (values) => [...new Set(values)];
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

const GLYPHS = { ok: "✓", flagged: "▲", failed: "✕", withheld: "⊘", oom: "□", unsupported: "–", timeout: "◷",
  interrupted: "‖", skipped: "·" };
const UNKNOWN = ["care", "unknown", "A word that this report does not know."];
const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined);
const statusWord = (status) => status === "flagged"
  ? ["care", "read with care", "Measured, but with a flag that changes how the number is to be read."]
  : own(DATA.words.status, status) || UNKNOWN;
const flagWord = (flag) => own(DATA.words.flag, flag) || ["care", flag.toLowerCase(), UNKNOWN[2]];

const RUNS = new Map(DATA.runs.map((run) => [run.id, run]));
const ROWS = DATA.rows;
ROWS.forEach((row, id) => {
  row.id = id;
  for (const name of ["flags"]) row[name] ||= [];
  for (const name of ["memory", "correctness", "stats", "case"]) row[name] ||= {};
  row.timed = isNumber(row.median);
  row.flagged = row.flags.some(([flag]) => flagWord(flag)[0] !== "note");
  row.kind = row.timed ? (row.flagged ? "flagged" : "ok") : row.status;
  row.label = DATA.families[row.family].label;
});
const LIVE = ROWS.filter((row) => !row.replaced);
const SUITES = unique(ROWS.map((row) => row.suite));
const peak = (row) => (row.memory.peak ? row.memory.peak[0] : undefined);
const spread = (row) => (isNumber(row.low) && isNumber(row.high) ? (row.high - row.low) / 2 / row.median : undefined);
const rate = (row, what) => (row.timed && isNumber(row[what]) ? row[what] / row.median * 1e3 : undefined);
const interval = (row) => (isNumber(row.low) ? `${digits(row.low)} to ${digits(row.high)}` : "");

// What the charts show. Few competitors in all keep their colour everywhere; many are counted per suite.
const state = { suite: SUITES[0], pass: "", cache: "", baseline: {}, memoryN: {}, filter: {}, sort: null };
const COMPETITORS = unique(LIVE.map((row) => row.competitor));
function colourOf(competitor) {
  const among = COMPETITORS.length <= 8 ? COMPETITORS : competitors(state.suite);
  return Math.max(0, among.indexOf(competitor));
}
const competitors = (suite) => unique(LIVE.filter((row) => row.suite === suite).map((row) => row.competitor));
const baseline = (suite) => own(state.baseline, suite) || own(DATA.baselines, suite) || competitors(suite)[0];

function visible(suite = state.suite) {
  return LIVE.filter((row) => row.suite === suite && row.pass === state.pass && row.cache === state.cache);
}
const PLACE = (row) => [row.suite, row.family, row.n, row.pass, row.cache, row.run].join("\n");
const BY_PLACE = groups(LIVE, PLACE);
function baseOf(row) {
  return (BY_PLACE.get(PLACE(row)) || []).find((other) => other.competitor === baseline(row.suite));
}
function speedup(row) {
  const base = baseOf(row);
  if (!base || !base.timed || !row.timed) return null;
  const low = (base.low || base.median) / (row.high || row.median);
  const high = (base.high || base.median) / (row.low || row.median);
  return { value: base.median / row.median, low, high, other: base.function !== row.function, base };
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

function swatch(competitor) {
  const i = colourOf(competitor);
  return s("svg", { class: "swatch", viewBox: "-12 -6 24 12", "aria-hidden": "true" },
    s("path", { class: "line " + colourClass(i), d: "M-12,0H12" }),
    s("path", { class: "mark " + colourClass(i), d: markPath(i, 3.6) }));
}
const breakable = (name) => name.split(/(?<=[_\-/.])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));
function badge(kind, text, title) {
  return h("span", { class: "badge " + kind, title }, text);
}
function statusBadge(row) {
  const [severity, word, sentence] = statusWord(row.kind);
  return h("span", { class: `status ${severity}`, title: row.reason || sentence },
    h("span", { class: "glyph", "aria-hidden": "true" }, own(GLYPHS, row.kind) || "?"), word);
}
const flagBadges = (row) => row.flags.map(([flag, why]) => badge(flagWord(flag)[0], flagWord(flag)[1], why));

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
function command(text) {
  return h("div", { class: "command" }, h("code", { tabindex: "0" }, text), copyButton(text));
}

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
  const gain = speedup(row), lines = [row.competitor, `${row.label} · N ${commas(row.n ?? 0)} · ${row.pass}`];
  if (row.timed) lines.push(`${ms(row.median)}${row.low ? `, 95 % interval ${interval(row)}` : ""}`);
  else lines.push(`${statusWord(row.status)[1]}: ${row.reason || statusWord(row.status)[2]}`);
  if (gain && gain.base !== row) {
    lines.push(`${times(gain.value)} as fast as ${gain.base.competitor} (${times(gain.low)} to ${times(gain.high)})`);
    if (gain.other) lines.push("another function: a choice of model, not of kernel");
  }
  if (row.timed && isNumber(row.efficiency)) lines.push(`floor ${ms(row.floor_ms)}: ${percent(row.efficiency)} of what is possible`);
  for (const [flag, why] of row.flags) if (flag !== "ANOTHER-FUNCTION") lines.push(`${flagWord(flag)[1]}: ${why}`);
  return lines;
}

// A group of choices of which one holds, as radio buttons: arrow keys work as they should.
function choices(label, name, options, chosen, pick) {
  return h("fieldset", { class: "segments" }, h("legend", {}, label), options.map((option) => h("label", {},
    h("input", { type: "radio", name, value: option, checked: option === chosen, change: () => pick(option) }),
    h("span", {}, option))));
}
function dropdown(label, id, options, chosen, pick) {
  const select = h("select", { id, change: () => pick(select.value) }, options.map((option) => {
    const [value, text] = Array.isArray(option) ? option : [option, option];
    return h("option", { value, selected: String(value) === String(chosen) }, text);
  }));
  return h("label", { class: "field", for: id }, h("span", {}, label), select);
}
