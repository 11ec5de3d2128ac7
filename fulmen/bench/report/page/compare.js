// Two runs against each other, by the rules of `fulmen bench compare`: see fulmen/bench/comparing.py.

const RULE = DATA.rule;
const sources = DATA.runs.map((run) => ({ run, name: "this report", rows: ROWS.filter((row) => row.run === run.id) }));
const selected = { before: null, after: null, verdict: "" };

// ------------------------------------------------------------------------------------------- reading

class BadResults extends Error {}
function demand(right, what) { if (!right) throw new BadResults(what); }

function readResults(text, name) {
  const runs = new Map(), cells = new Map(), lines = text.split("\n").filter((line) => line.trim());
  lines.forEach((line, i) => {
    let value;
    try {
      value = JSON.parse(line);
    } catch {
      const last = i > 0 && i === lines.length - 1 && !text.endsWith("\n");
      demand(last, `${name}:${i + 1}: not JSON; was the file cut off?`);
      complain(`${name}:${i + 1}: the file was cut off here; this line is skipped.`);
      return;
    }
    readRecord(value, `${name}:${i + 1}`, runs, cells);
  });
  demand(cells.size, `${name}: no cell in it; nothing was measured`);
  return [...runs.values()].map((run) => ({ run, name, rows: [...cells.values()].filter((row) => row.run === run.id) }));
}
function readRecord(value, where, runs, cells) {
  const [theirs, ours] = [value?.schema ?? null, DATA.schema].map((x) => JSON.stringify(x));
  demand(theirs === ours, `${where}: schema ${theirs}, this report reads ${ours}`);
  const { run_id: id, environment, stats, ...cell } = value;
  if (value.kind === "run") {
    runs.set(id, { ...environment, ...cell, id, time: String(cell.time) });
    return;
  }
  demand(runs.has(id), `${where}: a cell of run ${JSON.stringify(id)} comes before that run's record`);
  demand([cell.samples_ms, cell.clocks_mhz].every((x) => Array.isArray(x) && x.every(isNumber)),
    `${where}: samples_ms and clocks_mhz must be numbers`);
  const strings = ["competitor", "pass_", "status", "config_hash", "cache", "reason"];
  demand(strings.every((key) => typeof cell[key] === "string") && typeof (cell.case ?? 0) === "object",
    `${where}: not a cell as fulmen writes it`);
  const label = Object.entries(cell.case).filter(([key]) => key !== "N").map(([key, x]) => `${key} ${plain(x)}`);
  const middle = cell.status === "ok" && cell.samples_ms.length ? stats?.median ?? median(cell.samples_ms) : null;
  cells.set(id + cell.config_hash, { ...rowOf({ ...cell, run_id: id, median: middle }), label: label.join(" ") });
}

// ---------------------------------------------------------------------------------------- statistics

function medianInterval(values) {
  const ordered = ascending(values), n = ordered.length, reach = 0.98 * Math.sqrt(n), middle = (n - 1) / 2;
  return [ordered[Math.max(0, Math.floor(middle - reach))], ordered[Math.min(n - 1, Math.ceil(middle + reach))]];
}
// b against a: the median of all quotients with its 95 % interval, and the verdict, as `Effect` in Python.
function effect(...both) {
  const [a, b] = both.map((x) => x.filter((_, i) => i % Math.ceil(x.length / RULE.most) === 0));
  const n = a.length + b.length, size = a.length * b.length, logs = a.map(Math.log);
  const quotients = Float64Array.from(b.flatMap((y) => logs.map((x) => Math.log(y) - x))).sort();
  const rank = Math.max(0, Math.floor(size / 2 - 1.96 * Math.sqrt(size * (n + 1) / 12)));
  const middle = (quotients[(size - 1) >> 1] + quotients[size >> 1]) / 2;
  const [ratio, low, high] = [middle, quotients[rank], quotients[size - 1 - rank]].map(Math.exp);
  const [[aLow, aHigh], [bLow, bHigh]] = [a, b].map(medianInterval);
  const ties = groups([...a, ...b], (x) => x).reduce((total, [, same]) => total + same.length ** 3 - same.length, 0);
  const greater = quotients.reduce((total, q) => total + (q > 0 ? 1 : q === 0 ? 0.5 : 0), 0);
  const sigma = Math.sqrt(size / 12 * (n + 1 - ties / (n * (n - 1))));
  const certain = Math.abs(greater - size / 2) - 0.5 > RULE.sigmas * sigma; // Mann and Whitney
  const changed = certain && Math.abs(ratio - 1) >= RULE.change && (aHigh < bLow || bHigh < aLow);
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
  const few = both.some(({ samples }) => samples.length < RULE.few || Math.min(...samples) < RULE.shortest);
  if (few) return no(`fewer than ${RULE.few} usable samples`);
  const time = effect(before.samples, after.samples);
  const clocked = both.every(({ samples: x, clocks: c }) => c.length && c.length <= x.length && Math.min(...c) > 0);
  if (!clocked || time.verdict === "SAME") return time;
  const cycles = effect(...both.map(({ samples: x, clocks: c }) =>
    x.map((t, i) => t * c[Math.floor(i * c.length / x.length)])));
  const [old, now] = both.map((row) => median(row.clocks));
  const clocks = `the clock moved from ${Math.round(old)} to ${Math.round(now)} MHz`;
  if (cycles.verdict === time.verdict) return time;
  const moved = cycles.verdict === "SAME" && Math.abs(now / old - 1) >= RULE.clock;
  if (moved) return { verdict: "SAME", why: `in cycles ${cycles.why}; ${clocks}` };
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
    choose(...(other.run.time >= mine.run.time ? [mine, other] : [other, mine]));
  } catch (problem) {
    complain(problem instanceof BadResults ? problem.message : `${file.name}: cannot be read: ${problem.message}`);
  }
  $("compare").scrollIntoView();
}

// What both have, judged; and how many only one has.
let lines = [], gone = 0, added = 0;
function choose(before, after) {
  const [old, now] = [before, after].map((source) => new Map(source.rows.map((row) => [row.hash, row])));
  const why = differences(before.run, after.run), nobody = ["unsupported", "skipped"];
  const neither = (a, b) => a.status === b.status && nobody.includes(a.status); // nobody could measure it
  lines = [...old].map(([hash, a]) => [a, now.get(hash)]).filter(([a, b]) => b && !neither(a, b))
    .map(([a, b]) => ({ a, b, ...judge(a, b, why), lost: a.timed && b.timed ? b.median - a.median : 0 }))
    .sort((x, y) => Math.abs(y.lost) - Math.abs(x.lost));
  const only = (one, other) => [...one.keys()].filter((hash) => !other.has(hash)).length;
  [gone, added] = [only(old, now), only(now, old)];
  Object.assign(selected, { before, after, verdict: "" });
  drawCompare();
}
function drawCompare() {
  const { before, after, verdict } = selected;
  const some = lines.filter((line) => !verdict || line.verdict === verdict), shown = some.slice(0, 500);
  const names = sources.map(({ name, run }, i) => [i, `${name} · ${dated(run.time, 16)} · ${run.id}`]);
  const side = (label, id, source, take) =>
    dropdown(label, id, names, sources.indexOf(source), (i) => take(sources[i]));
  const counter = ([name, word]) => tile("", lines.filter((line) => line.verdict === name).length, word,
    { "data-verdict": name, "aria-pressed": String(verdict === name),
      click: () => { selected.verdict = verdict === name ? "" : name; drawCompare(); } });
  put("compare-result", h("div", { class: "controls inline wide" },
    side("Before", "compare-before", before, (source) => choose(source, after)),
    side("After", "compare-after", after, (source) => choose(before, source))),
  h("div", { class: "tiles", role: "group", "aria-label": "Show one verdict" },
    Object.entries(WORDS.verdict).map(counter)),
  h("p", { class: "lead" }, lines.length ? `${plural(lines.length, "cell")} in both, those that changed by the most`
    + " milliseconds first." : "No cell is in both runs.",
  gone + added > 0 && ` ${plural(gone, "cell")} only before, ${commas(added)} only after.`,
  shown.length < some.length && ` The first ${shown.length} are shown.`),
  lines.length > 0 && tableOf("cells diff", [
    ["Verdict", (line) => badge(WORDS.verdict[line.verdict])],
    ["Implementation", ({ a, b }) => {
      const row = [b, a].find((one) => "id" in one);
      return row ? link(a.competitor, row) : a.competitor;
    }, "key"],
    ["Case", ({ a, b }) => ("id" in b ? b : a).label], ["N", ({ a }) => plain(a.case.N), "number"],
    ["Pass", ({ a }) => a.pass + (a.cache === "hot" ? ", hot" : "")],
    ["Before ms", ({ a }) => digits(a.median), "number"], ["After ms", ({ b }) => digits(b.median), "number"],
    ["Change, 95 % interval", ({ why }) => why, "why"]], shown, "Comparison"));
}

function setupCompare() {
  const take = ([file]) => { if (file) load(file); };
  $("file").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });
  const on = (type, veiled, act) => addEventListener(type, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    $("veil").hidden = !veiled;
    act?.(event.dataTransfer.files);
  });
  on("dragover", true);
  on("dragleave", false);
  on("drop", false, take);
  // Of several runs in this report, the latest two that measured the same.
  const late = [...sources].sort((a, b) => (a.run.time < b.run.time ? 1 : -1));
  const hashes = new Map(late.map((source) => [source, new Set(source.rows.map((row) => row.hash))]));
  const pairs = late.flatMap((after, i) => late.slice(i + 1).map((before) => [before, after]));
  const common = pairs.find(([before, after]) => !hashes.get(before).isDisjointFrom(hashes.get(after)));
  if (common) choose(...common);
}
