// Two runs against each other, by the rules of `fulmen bench compare`: see fulmen/bench/comparing.py.

const RULE = DATA.rule, sources = DATA.runs.map((run) =>
  ({ run, name: "this report", rows: ROWS.filter((row) => row.run === run.id) }));
const selected = { before: null, after: null, verdict: "" };

// ------------------------------------------------------------------------------------------- reading

class BadResults extends Error {}
function readResults(text, name) {
  const runs = new Map(), cells = new Map(), lines = text.split("\n").filter((line) => line.trim());
  lines.forEach((line, i) => {
    const where = `${name}:${i + 1}`, demand = (right,
      what) => { if (!right) throw new BadResults(`${where}: ${what}`); };
    let value;
    try {
      value = JSON.parse(line);
    } catch {
      demand(i > 0 && i === lines.length - 1 && !text.endsWith("\n"), "not JSON; was the file cut off?");
      complain(`${where}: the file was cut off here; this line is skipped.`);
      return;
    }
    const [theirs, ours] = [value?.schema ?? null, DATA.schema].map((x) => JSON.stringify(x));
    demand(theirs === ours, `schema ${theirs}, this report reads ${ours}`);
    const { run_id: id, environment, stats, ...cell } = value;
    if (value.kind === "run") return runs.set(id, { ...environment, ...cell, id, time: String(cell.time) });
    demand(runs.has(id), `a cell of run ${JSON.stringify(id)} comes before that run's record`);
    demand([cell.samples_ms, cell.clocks_mhz].every((x) => Array.isArray(x) && x.every(isNumber)),
      "samples_ms and clocks_mhz must be numbers");
    const strings = ["competitor", "pass_", "status", "config_hash", "cache", "reason"];
    demand(strings.every((key) => typeof cell[key] === "string") && typeof (cell.case ?? 0) === "object",
      "not a cell as fulmen writes it");
    const label = Object.entries(cell.case).filter(([key]) => key !== "N").map(([key, x]) => `${key} ${plain(x)}`);
    const middle = cell.status === "ok" && cell.samples_ms.length ? stats?.median ?? median(cell.samples_ms) : null;
    cells.set(id + cell.config_hash, { ...rowOf({ ...cell, run_id: id, median: middle }), label: label.join(" ") });
    return undefined;
  });
  if (!cells.size) throw new BadResults(`${name}: no cell in it; nothing was measured`);
  return [...runs.values()].map((run) => ({ run, name,
    rows: [...cells.values()].filter((row) => row.run === run.id) }));
}

// ---------------------------------------------------------------------------------------- statistics

function normalTail(z) { // of both sides; Abramowitz and Stegun 7.1.26 is good to 1e-7
  const x = z / Math.SQRT2, t = 1 / (1 + 0.3275911 * x);
  const factors = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592];
  return factors.reduce((total, factor) => t * (total + factor), 0) * Math.exp(-x * x);
}
function medianInterval(values) {
  const ordered = ascending(values), n = ordered.length, reach = 0.98 * Math.sqrt(n);
  return [ordered[Math.max(0, Math.floor((n - 1) / 2 - reach))],
    ordered[Math.min(n - 1, Math.ceil((n - 1) / 2 + reach))]];
}
// b against a: the median of all quotients with its 95 % interval, and the verdict, as `Effect` in Python.
function effect(...both) {
  const [a, b] = both.map((x) => x.filter((_, i) => i % Math.ceil(x.length / RULE.most) === 0));
  const n = a.length + b.length, size = a.length * b.length;
  const logs = a.map(Math.log), quotients = Float64Array.from(b.flatMap((y) =>
    logs.map((x) => Math.log(y) - x))).sort();
  const rank = Math.max(0, Math.floor(size / 2 - 1.96 * Math.sqrt(size * (n + 1) / 12)));
  const [ratio, low, high] = [(quotients[(size - 1) >> 1] + quotients[size >> 1]) / 2, quotients[rank],
    quotients[size - 1 - rank]].map(Math.exp);
  const [[aLow, aHigh], [bLow, bHigh]] = [a, b].map(medianInterval);
  const ties = groups([...a, ...b], (x) => x).reduce((total, [, same]) => total + same.length ** 3 - same.length, 0);
  const greater = quotients.reduce((total, q) => total + (q > 0 ? 1 : q === 0 ? 0.5 : 0), 0);
  const sigma = Math.sqrt(size / 12 * (n + 1 - ties / (n * (n - 1))));
  const p = sigma ? normalTail(Math.max(0, Math.abs(greater - size / 2) - 0.5) / sigma) : 1;
  const changed = p < RULE.p && Math.abs(ratio - 1) >= RULE.change && (aHigh < bLow || bHigh < aLow);
  const same = Math.abs(ratio - 1) < RULE.equal && low > 1 - RULE.room && high < 1 + RULE.room;
  const signed = (x) => (x >= 1 ? "+" : "−") + Math.abs(100 * (x - 1)).toFixed(1) + " %";
  return { verdict: changed ? (ratio < 1 ? "FASTER" : "SLOWER") : same ? "SAME" : "INCONCLUSIVE",
    why: `${signed(ratio)} (${signed(low)} to ${signed(high)})` };
}
function differences(a, b) {
  if (a.protocol !== b.protocol) return `measured by protocols ${a.protocol} and ${b.protocol}`;
  const fact = (a.arch ? ["device"] : ["device", "cpu"]).find((name) => a[name] !== b[name]);
  return fact ? `measured on ${a[fact]} and on ${b[fact]}` : "";
}
function judge(before, after, why) {
  const both = [before, after], bad = both.find((row) => !row.timed);
  const no = (text) => ({ verdict: "INCOMPARABLE", why: text });
  if (why) return no(why);
  const reasons = bad && [wordOf("status", bad.status)[1], bad.reason].filter(Boolean).join(", ");
  if (bad) return no(`no time ${bad === before ? "before" : "after"}: ${reasons}`);
  if (both.some(({ samples }) => samples.length < RULE.few
    || Math.min(...samples) < RULE.shortest)) return no(`fewer than ${RULE.few} usable samples`);
  const time = effect(before.samples, after.samples);
  const clocked = both.every(({ samples: x, clocks: c }) => c.length && c.length <= x.length && Math.min(...c) > 0);
  if (!clocked || time.verdict === "SAME") return time;
  const cycles = effect(...both.map(({ samples: x, clocks: c }) =>
    x.map((t, i) => t * c[Math.floor(i * c.length / x.length)])));
  const [old, now] = both.map((row) => median(row.clocks));
  const clocks = `the clock moved from ${Math.round(old)} to ${Math.round(now)} MHz`;
  if (cycles.verdict === time.verdict) return time;
  if (cycles.verdict === "SAME" && Math.abs(now / old - 1) >= RULE.clock) return { verdict: "SAME",
    why: `in cycles ${cycles.why}; ${clocks}` };
  return time.verdict === "INCONCLUSIVE" ? time
    : { verdict: "INCONCLUSIVE", why: `${time.why}, but in cycles ${cycles.why}: ${clocks}` };
}

// --------------------------------------------------------------------------------------------- page

function complain(message) {
  $("compare-error").hidden = !message;
  put("compare-error", message);
}
async function load(file) {
  complain("");
  try {
    const found = readResults(await (file.name.endsWith(".gz") ? inflate(file, "gzip") : file).text(), file.name);
    const [other] = found;
    sources.push(...found);
    const mine = sources.find(({ name, run }) => name === "this report" && run.id !== other.run.id) || sources[0];
    const [before, after] = other.run.time >= mine.run.time ? [mine, other] : [other, mine];
    Object.assign(selected, { before, after, verdict: "" });
    drawCompare();
  } catch (problem) {
    complain(problem instanceof BadResults ? problem.message : `${file.name}: cannot be read: ${problem.message}`);
  }
  $("compare").scrollIntoView();
}
let latest = {};
function compared(before, after) {
  if (latest.before === before && latest.after === after) return latest;
  const [old, now] = [before, after].map((source) => new Map(source.rows.map((row) => [row.hash, row])));
  const why = differences(before.run, after.run);
  const neither = (a, b) => a.status === b.status
    && ["unsupported", "skipped"].includes(a.status); // nobody could measure it
  const lines = [...old].map(([hash, a]) => [a, now.get(hash)]).filter(([a, b]) => b && !neither(a, b))
    .map(([a, b]) => ({ a, b, ...judge(a, b, why), lost: a.timed && b.timed ? b.median - a.median : 0 }))
    .sort((x, y) => Math.abs(y.lost) - Math.abs(x.lost));
  const only = (one, other) => [...one.keys()].filter((hash) => !other.has(hash)).length;
  latest = { before, after, lines, gone: only(old, now), added: only(now, old) };
  return latest;
}
function drawCompare() {
  const { before, after, verdict } = selected, { lines, gone, added } = compared(before, after);
  const some = lines.filter((line) => !verdict || line.verdict === verdict), shown = some.slice(0, 500);
  const names = sources.map(({ name, run }, i) => [i, `${name} · ${dated(run.time, 16)} · ${run.id}`]);
  const side = (label, name) => dropdown(label, "compare-" + name, names, sources.indexOf(selected[name]),
    (i) => { selected[name] = sources[i]; drawCompare(); });
  const counter = ([name, word]) => tile("", lines.filter((line) => line.verdict === name).length, word,
    { "data-verdict": name,
    "aria-pressed": String(verdict === name),
      click: () => { selected.verdict = verdict === name ? "" : name; drawCompare(); } });
  put("compare-result", h("div", { class: "controls inline wide" }, side("Before", "before"), side("After", "after")),
    h("div", { class: "tiles", role: "group", "aria-label": "Show one verdict" },
      Object.entries(WORDS.verdict).map(counter)),
    h("p", { class: "lead" }, lines.length > 0 && plural(lines.length, "cell"), lines.length
      ? " in both, those that changed by the most milliseconds first." : "No cell is in both runs.",
      gone + added > 0 && ` ${plural(gone, "cell")} only before, ${commas(added)} only after.`,
        shown.length < some.length && ` The first ${shown.length} are shown.`),
    lines.length > 0 && tableOf("cells diff", [
      ["Verdict", (line) => badge(WORDS.verdict[line.verdict])],
      ["Implementation", ({ a, b }) => { const row = [b, a].find((one) => "id" in one); return row
        ? link(a.competitor, row) : a.competitor; }, "key"],
      ["Case", ({ a, b }) => ("id" in b ? b : a).label], ["N", ({ a }) => plain(a.case.N), "number"],
      ["Pass", ({ a }) => a.pass + (a.cache === "hot" ? ", hot" : "")],
      ["Before ms", ({ a }) => digits(a.median), "number"], ["After ms", ({ b }) => digits(b.median), "number"],
      ["Difference ms", ({ a, b, lost }) => a.timed && b.timed && (lost >= 0 ? "+" : "−") + digits(Math.abs(lost), 3),
        "number"],
      ["Change, 95 % interval", ({ why }) => why, "why"]], shown, "Comparison"));
}

function setupCompare() {
  const take = ([file]) => { if (file) load(file); };
  $("file").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });
  let depth = 0;
  const on = (type, change) => addEventListener(type, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    if (type !== "dragenter") event.preventDefault();
    depth = type === "drop" ? 0 : depth + change;
    $("veil").hidden = depth <= 0;
    if (type === "drop") take(event.dataTransfer.files);
  });
  for (const [type, change] of [["dragenter", 1], ["dragleave", -1], ["dragover", 0], ["drop", 0]]) on(type, change);
  // Of several runs in this report, the latest two that measured the same.
  const late = [...sources].sort((a, b) => (a.run.time < b.run.time ? 1 : -1));
  const known = late.map(({ rows }) => new Set(rows.map((row) => row.hash)));
  const common = late.flatMap((after, i) => late.slice(i + 1).map((before,
    j) => ({ before, after, alike: !known[i].isDisjointFrom(known[i + 1 + j]) })))
    .find(({ alike }) => alike);
  if (!common) return;
  Object.assign(selected, { before: common.before, after: common.after });
  drawCompare();
}
