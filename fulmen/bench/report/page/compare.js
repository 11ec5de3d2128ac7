// Two runs against each other, by the rules of `fulmen bench compare`: see fulmen/bench/comparing.py.

const RULE = { p: 0.002, change: 0.02, equal: 0.01, room: 0.05, clock: 0.01, few: 5, most: 250, shortest: 1e-12 };
const sources = DATA.runs.map((run) => ({ run, name: "this report", rows: ROWS.filter((row) => row.run === run.id) }));
const selected = { before: null, after: null, verdict: "" };

// What was measured, whoever measured it; equal for cells that may be compared.
function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (value === null || typeof value !== "object") return typeof value === "number" ? Number(value.toPrecision(6)) : value;
  return Object.keys(value).sort().map((name) => [name, sorted(value[name])]);
}
const identity = (row) => JSON.stringify([row.op, row.function, sorted(row.case), row.competitor, row.pass, row.cache]);

// ------------------------------------------------------------------------------------------- reading

class BadResults extends Error {}
function readResults(text, name) {
  const runs = new Map(), cells = new Map(), lines = text.split("\n").filter((line) => line.trim());
  lines.forEach((line, i) => {
    const where = `${name}:${i + 1}`, demand = (right, what) => { if (!right) throw new BadResults(`${where}: ${what}`); };
    let value;
    try {
      value = JSON.parse(line);
    } catch {
      demand(i > 0 && i === lines.length - 1 && !text.endsWith("\n"), "not JSON; was the file cut off?");
      complain(`${where}: the file was cut off here; this line is skipped.`);
      return;
    }
    const found = value && typeof value === "object" ? value.schema : typeof value;
    demand(found === DATA.schema, `schema ${JSON.stringify(found ?? null)}, this report reads ${JSON.stringify(DATA.schema)}`);
    demand(["run", "cell"].includes(value.kind), `kind ${JSON.stringify(value.kind ?? null)}, must be "run" or "cell"`);
    const id = String(value.run_id);
    if (value.kind === "run") {
      const { device = "", cpu = "", arch } = value.environment || {};
      runs.set(id, { id, time: String(value.time ?? ""), protocol: String(value.protocol ?? ""), device: String(device), cpu: String(cpu), arch });
      return;
    }
    demand(runs.has(id), `a cell of run ${JSON.stringify(value.run_id)} comes before that run's record`);
    const row = foreignRow(value, id, demand);
    cells.set(id + identity(row), row);
  });
  if (!cells.size) throw new BadResults(`${name}: no cell in it; nothing was measured`);
  return [...runs.values()].map((run) => ({ run, name, rows: [...cells.values()].filter((row) => row.run === run.id) }));
}
function foreignRow(cell, run, demand) {
  const ok = cell.status === "ok", samples = cell.samples_ms || [], clocks = cell.clocks_mhz || [];
  for (const name of ["competitor", "pass_", "status", "op", "function"]) demand(typeof cell[name] === "string", `${name} must be a string`);
  demand(cell.case && typeof cell.case === "object", "case must be an object");
  demand([samples, clocks].every((values) => Array.isArray(values) && values.every(isNumber)), "samples_ms and clocks_mhz must be numbers");
  const middle = ok ? cell.stats?.median ?? (samples.length ? median(samples) : undefined) : undefined;
  return { ...cell, run, pass: cell.pass_, cache: cell.cache || "cold", reason: String(cell.reason ?? ""), median: middle, timed: isNumber(middle) && middle > 0,
    raw: ok ? samples : [], rawClocks: clocks };
}

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
  const ordered = ascending(values), n = ordered.length, reach = 0.98 * Math.sqrt(n);
  return [ordered[Math.max(0, Math.floor((n - 1) / 2 - reach))], ordered[Math.min(n - 1, Math.ceil((n - 1) / 2 + reach))]];
}
const thin = (values) => (values.length <= RULE.most ? values : Array.from({ length: RULE.most }, (_, i) => values[Math.floor(i * values.length / RULE.most)]));

// b against a: the median of all quotients, its 95 % interval, p, and whether the medians' intervals are apart.
function effect(before, after) {
  const a = thin(before), b = thin(after), size = a.length * b.length, logs = a.map(Math.log);
  const quotients = Float64Array.from(b.flatMap((y) => { const log = Math.log(y); return logs.map((x) => log - x); })).sort();
  const rank = Math.max(0, Math.floor(size / 2 - 1.96 * Math.sqrt(size * (a.length + b.length + 1) / 12)));
  const ratio = Math.exp((quotients[(size - 1) >> 1] + quotients[size >> 1]) / 2), low = Math.exp(quotients[rank]), high = Math.exp(quotients[size - 1 - rank]);
  const [aLow, aHigh] = medianInterval(a), [bLow, bHigh] = medianInterval(b), apart = aHigh < bLow || bHigh < aLow;
  const changed = mannWhitney(a, b) < RULE.p && Math.abs(ratio - 1) >= RULE.change && apart;
  const same = Math.abs(ratio - 1) < RULE.equal && low > 1 - RULE.room && high < 1 + RULE.room;
  const signed = (x) => (x >= 1 ? "+" : "−") + Math.abs(100 * (x - 1)).toFixed(1) + " %";
  return { verdict: changed ? (ratio < 1 ? "FASTER" : "SLOWER") : same ? "SAME" : "INCONCLUSIVE", why: `${signed(ratio)} (${signed(low)} to ${signed(high)})` };
}
function cycles(row, samples) {
  const clocks = row.rawClocks || unpack(row.clocks);
  if (!clocks.length || clocks.length > samples.length || !clocks.every((c) => c > 0)) return null;
  return { values: samples.map((t, i) => t * clocks[Math.floor(i * clocks.length / samples.length)]), clock: median(clocks) };
}
function differences(a, b) {
  if (a.protocol !== b.protocol) return `measured by protocols ${a.protocol} and ${b.protocol}`;
  const fact = (a.arch ? ["device"] : ["device", "cpu"]).find((name) => a[name] !== b[name]);
  return fact ? `measured on ${a[fact] || "?"} and on ${b[fact] || "?"}` : "";
}
function judge(before, after, why) {
  if (why) return { verdict: "INCOMPARABLE", why };
  for (const [row, which] of [[before, "before"], [after, "after"]]) {
    if (!row.timed) return { verdict: "INCOMPARABLE", why: `no time ${which}: ${statusWord(row.status)[1]}${row.reason ? ", " + row.reason : ""}` };
  }
  const [a, b] = [before, after].map((row) => row.raw || unpack(row.samples));
  if (Math.min(a.length, b.length) < RULE.few || [...a, ...b].some((x) => x < RULE.shortest)) return { verdict: "INCOMPARABLE", why: `fewer than ${RULE.few} usable samples` };
  const time = effect(a, b), ca = cycles(before, a), cb = cycles(after, b);
  if (!ca || !cb || time.verdict === "SAME") return time;
  const inCycles = effect(ca.values, cb.values), clocks = `the clock moved from ${Math.round(ca.clock)} to ${Math.round(cb.clock)} MHz`;
  if (inCycles.verdict === time.verdict) return time;
  if (inCycles.verdict === "SAME" && Math.abs(cb.clock / ca.clock - 1) >= RULE.clock) return { verdict: "SAME", why: `in cycles ${inCycles.why}; ${clocks}` };
  return time.verdict === "INCONCLUSIVE" ? time : { verdict: "INCONCLUSIVE", why: `${time.why}, but in cycles ${inCycles.why}: ${clocks}` };
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
    const [before, after] = other.run.time >= mine.run.time ? [mine, other] : [other, mine];
    Object.assign(selected, { before, after, verdict: "" });
    drawCompare();
  } catch (problem) {
    complain(problem instanceof BadResults ? problem.message : `${file.name}: cannot be read: ${problem.message}`);
  }
  $("compare").scrollIntoView();
}
function compared(before, after) {
  const [old, now] = [before, after].map((source) => new Map(source.rows.map((row) => [identity(row), row]))), why = differences(before.run, after.run);
  const neither = (a, b) => a.status === b.status && ["unsupported", "skipped"].includes(a.status); // nobody could measure it
  const lines = [...old].filter(([name, a]) => now.has(name) && !neither(a, now.get(name))).map(([name, a]) => {
    const b = now.get(name);
    return { a, b, ...judge(a, b, why), lost: a.timed && b.timed ? b.median - a.median : 0 };
  }).sort((x, y) => Math.abs(y.lost) - Math.abs(x.lost));
  return { before, after, lines, gone: [...old.keys()].filter((name) => !now.has(name)).length, added: [...now.keys()].filter((name) => !old.has(name)).length };
}

let latest = {};
function drawCompare() {
  const { before, after, verdict } = selected;
  if (latest.before !== before || latest.after !== after) latest = compared(before, after);
  const { lines, gone, added } = latest, found = groups(lines, (line) => line.verdict), count = (name) => (found.get(name) || []).length;
  const some = verdict ? found.get(verdict) || [] : lines, shown = some.slice(0, 500);
  const names = sources.map((source, i) => [i, `${source.name} · ${source.run.time.slice(0, 16).replace("T", " ")} · ${source.run.id}`]);
  const side = (label, name) => dropdown(label, "compare-" + name, names, sources.indexOf(selected[name]), (value) => { selected[name] = sources[Number(value)]; drawCompare(); $("compare-" + name).focus(); });
  const tile = ([name, [, word, sentence]]) => h("button", { type: "button", class: `tile v-${name}`, "data-verdict": name, title: sentence, "aria-pressed": String(verdict === name),
    click: () => { selected.verdict = verdict === name ? "" : name; drawCompare(); document.querySelector(`[data-verdict="${name}"]`).focus(); } },
  h("span", { class: "count" }, commas(count(name))), h("span", { class: "word" }, word));
  put($("compare-result"), h("div", { class: "controls inline wide" }, side("Before", "before"), side("After", "after")),
    h("div", { class: "tiles", role: "group", "aria-label": "Show one verdict" }, Object.entries(DATA.words.verdict).map(tile)),
    h("p", { class: "lead" }, lines.length ? `${plural(lines.length, "cell")} in both, those that changed by the most milliseconds first.` : "No cell is in both runs.",
      gone + added > 0 && ` ${plural(gone, "cell")} only before, ${commas(added)} only after.`, shown.length < some.length && ` The first ${shown.length} are shown.`),
    lines.length > 0 && tableOf("cells diff", DIFF_COLUMNS, shown, "Comparison"));
}
const labelOf = ({ label, case: of }) => label || Object.entries(of).filter(([name]) => name !== "N").map(([name, value]) => `${name} ${plain(value)}`).join(" ");
const DIFF_COLUMNS = [
  ["Verdict", ({ verdict }) => badge(`${DATA.words.verdict[verdict][0]} v-${verdict}`, DATA.words.verdict[verdict][1], DATA.words.verdict[verdict][2])],
  ["Implementation", ({ a, b }) => { const row = [b, a].find((one) => "id" in one); return row ? link(a.competitor, row) : a.competitor; }, "key"],
  ["Case", ({ a, b }) => labelOf("label" in b ? b : a)],
  ["N", ({ a }) => plain(a.case.N ?? ""), "number"],
  ["Pass", ({ a }) => a.pass + (a.cache === "hot" ? ", hot" : "")],
  ["Before ms", ({ a }) => digits(a.median), "number"],
  ["After ms", ({ b }) => digits(b.median), "number"],
  ["Difference ms", ({ a, b, lost }) => a.timed && b.timed && (lost >= 0 ? "+" : "−") + digits(Math.abs(lost), 3), "number"],
  ["Change, 95 % interval", ({ why }) => why],
];

function setupCompare() {
  $("file").addEventListener("change", (event) => { if (event.target.files[0]) load(event.target.files[0]); event.target.value = ""; });
  let depth = 0;
  const veil = (change) => { depth = change ? depth + change : 0; $("veil").hidden = depth <= 0; };
  const on = (type, act) => addEventListener(type, (event) => { if (event.dataTransfer && [...event.dataTransfer.types].includes("Files")) act(event); });
  on("dragenter", () => veil(1));
  on("dragleave", () => veil(-1));
  on("dragover", (event) => event.preventDefault());
  on("drop", (event) => {
    event.preventDefault();
    veil(0);
    if (event.dataTransfer.files[0]) load(event.dataTransfer.files[0]);
  });
  // Of several runs in this report, the latest two that measured the same.
  const late = [...sources].sort((a, b) => (a.run.time < b.run.time ? 1 : -1));
  const pairs = late.flatMap((after, i) => late.slice(i + 1).map((before) => ({ before, after })));
  const common = pairs.find(({ before, after }) => { const known = new Set(after.rows.map(identity)); return before.rows.some((row) => known.has(identity(row))); });
  Object.assign(selected, common);
  if (common) drawCompare();
}
