// Two runs against each other, by the rules of `fulmen bench compare`: see fulmen/bench/comparing.py.

const RULE = { p: 0.002, change: 0.02, equal: 0.01, room: 0.05, clock: 0.01, few: 5, most: 250 };
const sources = DATA.runs.map((run) => ({ run, name: "this report", rows: ROWS.filter((row) => row.run === run.id) }));
const chosen = { before: null, after: null, verdict: "" };

// What was measured, whoever measured it; equal for cells that may be compared.
function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (value === null || typeof value !== "object") return typeof value === "number" ? Number(value.toPrecision(6)) : value;
  return Object.keys(value).sort().map((key) => [key, sorted(value[key])]);
}
const identity = (row) => JSON.stringify([row.op, row.function, sorted(row.case), row.competitor, row.pass, row.cache]);

// ------------------------------------------------------------------------------------------- reading

class BadResults extends Error {}
function readResults(text, name) {
  const runs = new Map(), cells = new Map();
  text.split("\n").forEach((line, i) => {
    if (!line.trim()) return;
    const where = `${name}:${i + 1}`;
    let value;
    try { value = JSON.parse(line); } catch { throw new BadResults(`${where}: not JSON; was the file cut off?`); }
    if (value === null || typeof value !== "object" || value.schema !== DATA.schema) {
      const found = value && typeof value === "object" ? value.schema : typeof value;
      throw new BadResults(`${where}: schema ${JSON.stringify(found ?? null)}, this report reads ${JSON.stringify(DATA.schema)}`);
    }
    if (value.kind === "run") runs.set(String(value.run_id), { id: String(value.run_id), time: String(value.time ?? ""), protocol: String(value.protocol ?? ""), environment: value.environment || {} });
    else if (value.kind === "cell") {
      if (!runs.has(String(value.run_id))) throw new BadResults(`${where}: a cell of run ${JSON.stringify(value.run_id)} comes before that run's record`);
      const row = foreignRow(value, where);
      cells.set(row.run + identity(row), row);
    } else throw new BadResults(`${where}: kind ${JSON.stringify(value.kind ?? null)}, must be "run" or "cell"`);
  });
  if (!cells.size) throw new BadResults(`${name}: no cell in it; nothing was measured`);
  return [...runs.values()].map((run) => ({ run: { ...run, device: String(run.environment.device ?? ""), cpu: String(run.environment.cpu ?? ""), arch: run.environment.arch },
    name, rows: [...cells.values()].filter((row) => row.run === run.id) }));
}
function foreignRow(cell, where) {
  const numbers = (values) => Array.isArray(values) && values.every(isNumber);
  for (const key of ["competitor", "pass_", "status", "op", "function"]) {
    if (typeof cell[key] !== "string") throw new BadResults(`${where}: ${key} must be a string`);
  }
  if (!cell.case || typeof cell.case !== "object") throw new BadResults(`${where}: case must be an object`);
  if (!numbers(cell.samples_ms || []) || !numbers(cell.clocks_mhz || [])) throw new BadResults(`${where}: samples_ms and clocks_mhz must be numbers`);
  const ok = cell.status === "ok", samples = ok ? cell.samples_ms || [] : [];
  const middle = ok ? (isNumber(cell.stats?.median) ? cell.stats.median : samples.length ? median(samples) : undefined) : undefined;
  return { run: String(cell.run_id), suite: String(cell.suite ?? ""), op: cell.op, function: cell.function, case: cell.case, competitor: cell.competitor, pass: cell.pass_,
    cache: cell.cache || "cold", status: cell.status, reason: String(cell.reason ?? ""), median: middle, timed: isNumber(middle) && middle > 0, raw: samples, rawClocks: cell.clocks_mhz || [] };
}
const samplesOf = (row) => row.raw || unpack(row.samples);
const clocksOf = (row) => row.rawClocks || unpack(row.clocks);

// ---------------------------------------------------------------------------------------- statistics

function normalTail(z) { // of both sides; Abramowitz and Stegun 7.1.26 is good to 1e-7
  const x = Math.abs(z) / Math.SQRT2, t = 1 / (1 + 0.3275911 * x);
  return t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * Math.exp(-x * x);
}
function mannWhitney(a, b) {
  const all = [...a.map((v) => [v, 0]), ...b.map((v) => [v, 1])].sort((p, q) => p[0] - q[0]), n = all.length;
  let rank = 0, ties = 0;
  for (let i = 0; i < n;) {
    let j = i;
    while (j < n && all[j][0] === all[i][0]) j += 1;
    for (let k = i; k < j; k += 1) if (!all[k][1]) rank += (i + j + 1) / 2;
    ties += (j - i) ** 3 - (j - i);
    i = j;
  }
  const mean = a.length * b.length / 2, u = rank - a.length * (a.length + 1) / 2;
  const sigma = Math.sqrt(a.length * b.length / 12 * (n + 1 - ties / (n * (n - 1))));
  return sigma ? Math.min(1, normalTail(Math.max(0, Math.abs(u - mean) - 0.5) / sigma)) : 1;
}
function medianInterval(values) {
  const ordered = [...values].sort((a, b) => a - b), n = ordered.length, reach = 0.98 * Math.sqrt(n);
  return [ordered[Math.max(0, Math.floor((n - 1) / 2 - reach))], ordered[Math.min(n - 1, Math.ceil((n - 1) / 2 + reach))]];
}
const thin = (values) => (values.length <= RULE.most ? values : Array.from({ length: RULE.most }, (_, i) => values[Math.floor(i * values.length / RULE.most)]));

// b against a: the median of all quotients, its 95 % interval, p, and whether the medians' intervals are apart.
function effect(before, after) {
  const a = thin(before), b = thin(after), la = a.map(Math.log), lb = b.map(Math.log), size = a.length * b.length;
  const quotients = new Float64Array(size);
  lb.forEach((y, i) => la.forEach((x, j) => { quotients[i * a.length + j] = y - x; }));
  quotients.sort();
  const low = Math.max(0, Math.floor(size / 2 - 1.96 * Math.sqrt(size * (a.length + b.length + 1) / 12)));
  const ratio = Math.exp((quotients[(size - 1) >> 1] + quotients[size >> 1]) / 2);
  const [al, ah] = medianInterval(a), [bl, bh] = medianInterval(b);
  const found = { ratio, low: Math.exp(quotients[low]), high: Math.exp(quotients[size - 1 - low]), p: mannWhitney(a, b), apart: ah < bl || bh < al };
  const same = Math.abs(ratio - 1) < RULE.equal && found.low > 1 - RULE.room && found.high < 1 + RULE.room;
  found.verdict = found.p < RULE.p && Math.abs(ratio - 1) >= RULE.change && found.apart ? (ratio < 1 ? "FASTER" : "SLOWER") : same ? "SAME" : "INCONCLUSIVE";
  return found;
}
const signed = (x) => (x >= 0 ? "+" : "−") + Math.abs(100 * x).toFixed(1) + " %";
const effectWords = (e) => `${signed(e.ratio - 1)} (${signed(e.low - 1)} to ${signed(e.high - 1)})`;

function cycles(row, times_) {
  const clocks = clocksOf(row);
  if (!clocks.length || clocks.length > times_.length || !clocks.every((c) => c > 0)) return null;
  return { values: times_.map((t, i) => t * clocks[Math.floor(i * clocks.length / times_.length)]), clock: median(clocks) };
}
function differences(a, b) {
  if (a.protocol !== b.protocol) return `measured by protocols ${a.protocol} and ${b.protocol}`;
  for (const fact of a.arch ? ["device"] : ["device", "cpu"]) if (a[fact] !== b[fact]) return `measured on ${a[fact] || "?"} and on ${b[fact] || "?"}`;
  return "";
}
function judge(before, after, why) {
  if (why) return { verdict: "INCOMPARABLE", why };
  for (const [row, which] of [[before, "before"], [after, "after"]]) {
    if (!row.timed) return { verdict: "INCOMPARABLE", why: `no time ${which}: ${statusWord(row.status)[1]}${row.reason ? ", " + row.reason : ""}` };
  }
  const a = samplesOf(before), b = samplesOf(after);
  if (a.length < RULE.few || b.length < RULE.few || [...a, ...b].some((x) => x <= 0)) return { verdict: "INCOMPARABLE", why: `fewer than ${RULE.few} usable samples` };
  const time = effect(a, b), found = { verdict: time.verdict, why: effectWords(time), time };
  const ca = cycles(before, a), cb = cycles(after, b);
  if (!ca || !cb || time.verdict === "SAME") return found;
  const inCycles = effect(ca.values, cb.values);
  if (inCycles.verdict === time.verdict) return found;
  const clocks = `the clock moved from ${Math.round(ca.clock)} to ${Math.round(cb.clock)} MHz`;
  if (inCycles.verdict === "SAME" && Math.abs(cb.clock / ca.clock - 1) >= RULE.clock) {
    return { verdict: "SAME", why: `in cycles ${effectWords(inCycles)}; ${clocks}`, time };
  }
  if (time.verdict !== "INCONCLUSIVE") return { verdict: "INCONCLUSIVE", why: `${effectWords(time)}, but in cycles ${effectWords(inCycles)}: ${clocks}`, time };
  return found;
}

// --------------------------------------------------------------------------------------------- page

function complain(message) {
  $("compare-error").hidden = !message;
  put($("compare-error"), message || "");
}
async function load(file) {
  complain("");
  try {
    const found = readResults(await file.text(), file.name);
    sources.push(...found);
    const other = found[0], mine = sources.find((source) => source.name === "this report" && source.run.id !== other.run.id) || sources[0];
    const late = other.run.time >= mine.run.time;
    Object.assign(chosen, { before: late ? mine : other, after: late ? other : mine, verdict: "" });
    drawCompare();
  } catch (problem) {
    complain(problem instanceof BadResults ? problem.message : `${file.name}: cannot be read: ${problem.message}`);
  }
  $("compare").scrollIntoView();
}
function compared(before, after) {
  const old = new Map(before.rows.map((row) => [identity(row), row])), now = new Map(after.rows.map((row) => [identity(row), row]));
  const why = differences(before.run, after.run), lines = [];
  const neither = (a, b) => a.status === b.status && ["unsupported", "skipped"].includes(a.status); // nobody could measure it
  for (const [key, a] of old) if (now.has(key) && !neither(a, now.get(key))) lines.push({ a, b: now.get(key), ...judge(a, now.get(key), why) });
  const lost = (line) => (line.a.timed && line.b.timed ? line.b.median - line.a.median : 0);
  for (const line of lines) line.lost = lost(line);
  lines.sort((x, y) => Math.abs(y.lost) - Math.abs(x.lost));
  return { lines, gone: [...old.keys()].filter((key) => !now.has(key)).length, added: [...now.keys()].filter((key) => !old.has(key)).length };
}

let lastCompared = null;
function drawCompare() {
  const { before, after } = chosen, names = sources.map((source, i) => [i, `${source.name} · ${source.run.time.slice(0, 16).replace("T", " ")} · ${source.run.id}`]);
  const pick = (side) => (value) => { chosen[side] = sources[Number(value)]; lastCompared = null; drawCompare(); $("compare-" + side).focus(); };
  if (!before || !after) return put($("compare-result"));
  if (!lastCompared || lastCompared.before !== before || lastCompared.after !== after) lastCompared = { before, after, ...compared(before, after) };
  const { lines, gone, added } = lastCompared, found = groups(lines, (line) => line.verdict);
  const show = chosen.verdict || "", shown = lines.filter((line) => !show || line.verdict === show).slice(0, 500);
  return put($("compare-result"),
    h("div", { class: "controls inline wide" }, dropdown("Before", "compare-before", names, sources.indexOf(before), pick("before")), dropdown("After", "compare-after", names, sources.indexOf(after), pick("after"))),
    h("div", { class: "tiles", role: "group", "aria-label": "Show one verdict" }, Object.keys(DATA.words.verdict).map((name) => h("button", { type: "button", class: `tile v-${name}`, "data-verdict": name,
      title: DATA.words.verdict[name][2], "aria-pressed": String(show === name), click: () => { chosen.verdict = show === name ? "" : name; drawCompare(); document.querySelector(`[data-verdict="${name}"]`).focus(); } },
    h("span", { class: "count" }, commas((found.get(name) || []).length)), h("span", { class: "word" }, DATA.words.verdict[name][1])))),
    h("p", { class: "lead" }, lines.length ? `${plural(lines.length, "cell")} in both, those that changed by the most milliseconds first.` : "No cell is in both runs.",
      gone || added ? ` ${plural(gone, "cell")} only before, ${commas(added)} only after.` : "", shown.length < (show ? (found.get(show) || []).length : lines.length) ? ` The first ${shown.length} are shown.` : ""),
    lines.length > 0 && h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Comparison" }, h("table", { class: "cells diff" },
      h("thead", {}, h("tr", {}, ["Verdict", "Implementation", "Case", "N", "Pass", "Before ms", "After ms", "Difference ms", "Change, 95 % interval"].map((name, i) =>
        h("th", { scope: "col", class: i === 3 || (i >= 5 && i < 8) ? "number" : "" }, name)))),
      h("tbody", {}, shown.map(diffLine)))));
}
function diffLine(line) {
  const own_ = ROWS.includes(line.b) ? line.b : ROWS.includes(line.a) ? line.a : null, word = DATA.words.verdict[line.verdict];
  const lost = line.a.timed && line.b.timed ? (line.lost >= 0 ? "+" : "−") + digits(Math.abs(line.lost), 3) : "";
  const name = own_ ? h("button", { type: "button", class: "link", click: () => openDrawer(own_) }, line.a.competitor) : line.a.competitor;
  return h("tr", {}, h("td", {}, h("span", { class: `badge ${word[0]} v-${line.verdict}`, title: word[2] }, word[1])), h("th", { scope: "row", class: "key" }, name), h("td", {}, caseWords(line.a.case)),
    h("td", { class: "number" }, plain(line.a.case.N ?? "")), h("td", {}, line.a.pass + (line.a.cache === "hot" ? ", hot" : "")), h("td", { class: "number" }, digits(line.a.median)), h("td", { class: "number" }, digits(line.b.median)),
    h("td", { class: "number" }, lost), h("td", {}, line.why));
}
function caseWords(of) {
  const mine = ROWS.find((row) => row.case === of);
  return mine ? mine.label : Object.entries(of).filter(([name]) => name !== "N").map(([name, value]) => `${name} ${plain(value)}`).join(" ");
}

function setupCompare() {
  $("file").addEventListener("change", (event) => { if (event.target.files[0]) load(event.target.files[0]); event.target.value = ""; });
  let depth = 0;
  const veil = (on) => { $("veil").hidden = !on; };
  const files = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  addEventListener("dragenter", (event) => { if (files(event)) { depth += 1; veil(true); } });
  addEventListener("dragleave", (event) => { if (files(event)) { depth -= 1; veil(depth > 0); } });
  addEventListener("dragover", (event) => { if (files(event)) event.preventDefault(); });
  addEventListener("drop", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    depth = 0;
    veil(false);
    if (event.dataTransfer.files[0]) load(event.dataTransfer.files[0]);
  });
  latestPair();
}
// Of several runs in this report, the latest two that measured the same.
function latestPair() {
  const late = [...sources].sort((a, b) => (a.run.time < b.run.time ? 1 : -1));
  for (const after of late) {
    const keys = new Set(after.rows.map(identity));
    const before = late.slice(late.indexOf(after) + 1).find((other) => other.rows.some((row) => keys.has(identity(row))));
    if (before) {
      Object.assign(chosen, { before, after });
      drawCompare();
      return;
    }
  }
}
