// The sections from the result to the memory, each drawn anew when a control changes.

function drawResult() {
  const timed = ROWS.filter((row) => row.timed).length, all = plural(ROWS.length, "cell");
  put($("headline"), DATA.title);
  put($("subject"), unique(DATA.runs.map((run) => run.time.slice(0, 10))).join(", "), " · ",
    h("span", { id: "proven" }, timed === ROWS.length ? `All ${all} proven right, then timed.` : `${commas(timed)} of ${all} proven right, then timed.`));
  put($("notes"), DATA.notes.map((note) => h("p", { class: "error" }, note)));
  put($("headlines"), [...groups(DATA.headlines, (one) => one.suite)].map(([suite, speeds]) => h("div", { class: "card" },
    h("p", {}, h("strong", {}, suite), h("span", { class: "soft" }, `: ${speeds[0].competitor} against ${speeds[0].baseline}`, speeds.some((one) => one.other) && " ≠")),
    h("dl", {}, speeds.map((one) => h("div", { title: `geometric mean of ${plural(one.cases, "case")}${one.other ? "; ≠: another function, a choice of model, not of kernel" : ""}` },
      h("dt", {}, one.pass_), h("dd", {}, h("strong", {}, times(one.mean)), h("span", { class: "soft" }, `${digits(one.low, 3)}–${times(one.high)}`))))))));
}

function drawControls() {
  const rows = LIVE.filter((row) => row.suite === state.suite), caches = unique(rows.map((row) => row.cache));
  const passes = ["forward", "backward", "total"].filter((pass) => rows.some((row) => row.pass === pass));
  if (!passes.includes(state.pass)) state.pass = passes[0];
  if (!caches.includes(state.cache)) state.cache = caches.includes("cold") ? "cold" : caches[0];
  const set = (name) => (value) => { state[name] = value; redraw(); };
  put($("controls"),
    SUITES.length > 1 && (SUITES.length <= 4 ? radios : dropdown)("Suite", "suite", SUITES, state.suite, set("suite")),
    radios("Pass", "pass", passes, state.pass, set("pass")),
    caches.length > 1 && radios("L2 cache", "cache", caches, state.cache, set("cache")),
    dropdown("Baseline", "baseline", competitors(state.suite), baseline(state.suite), (value) => { state.baseline[state.suite] = value; redraw(); }));
}

// Cards with a chart each. All are placed before the first is drawn, so that every one has its width.
function drawCards(box, cards) {
  const figures = cards.map(({ title }) => h("figure", { class: "card" }, h("figcaption", {}, title)));
  put(box, figures);
  figures.forEach((figure, i) => {
    const style = getComputedStyle(figure), room = figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    fill(figure, {}, [cards[i].draw(Math.max(260, Math.floor(room)))]);
  });
}
const legend = (rows, ...more) => h("div", { class: "legend" }, unique(rows.map((row) => row.competitor)).map((name) => swatch(name)), more);

// --------------------------------------------------------------------------------------------- speed

const STEPS = [1.05, 1.25, 2, 4, 10];
function heatClass(ratio) {
  const level = STEPS.filter((step) => Math.max(ratio, 1 / ratio) >= step).length;
  return level === 0 ? "even" : (ratio >= 1 ? "up" : "down") + level;
}
const families = () => [...groups(visible(), (row) => row.family)];

function drawSpeed() {
  const base = baseline(state.suite), functions = unique(visible().map((row) => row.function));
  put($("speed-lead"), `How many times as fast as ${base}, ${state.pass} pass. `,
    functions.length > 1 && "≠ marks another function than the baseline's: a choice of model, not of kernel. ", "Click a cell for its samples.");
  drawOverview(base);
  const levels = [...STEPS.map((step, i) => ["down" + (i + 1), step + "×"]).reverse(), ["even", "1"], ...STEPS.map((step, i) => ["up" + (i + 1), step + "×"])];
  put($("heat-legend"), h("span", {}, "slower"), levels.map(([level, text]) => h("span", { class: "key heat " + level }, text)), h("span", {}, "faster"),
    h("span", { class: "key heat even care" }, "▲"), h("span", {}, "read with care"), h("span", { class: "key heat none" }, "–"), h("span", {}, "no number"));
  const several = families().filter(([, rows]) => unique(rows.map((row) => row.n)).length > 1);
  const single = families().filter(([family]) => !several.some(([other]) => other === family)).map(([, rows]) => [rows[0].where, rows]);
  put($("heat"), several.map(([family, rows]) => heatTable(DATA.families[family].label,
    [...groups(rows, (row) => row.n)].sort((a, b) => a[0] - b[0]).map(([n, line]) => [n === null ? "–" : commas(n), line]), "N")),
  single.length > 0 && heatTable("Single cases", single, "case"));
}

// The geometric mean of each implementation's speedups as a bar from 1×, and their range as a line.
function drawOverview(base) {
  const lines = [...groups(visible().filter((row) => speedup(row)), (row) => row.competitor)].map(([name, rows]) => {
    const gains = rows.map((row) => speedup(row).value), mean = Math.exp(sum(gains.map(Math.log)) / gains.length);
    return { name, gains, mean, low: Math.min(...gains), high: Math.max(...gains), other: rows.some((row) => speedup(row).other) };
  }).sort((a, b) => b.mean - a.mean);
  const all = [1, ...lines.flatMap((line) => [line.low, line.high])], [low, high] = [Math.min(...all) / 1.05, Math.max(...all) * 1.05];
  $("overview").hidden = lines.length < 2;
  if (lines.length < 2) return;
  drawCards($("overview"), [{ title: `${state.suite}, ${state.pass}: times as fast as ${base}`, draw: (width) => [bars({
    width, numbers: 132, scaleOf: (from, to) => scale(true, low, high, from, to), label: `Speed of ${plural(lines.length, "implementation")} against ${base}. Arrow keys walk them.`,
    lines: lines.map(({ name, gains, mean, low: least, high: most, other }) => ({ name: name + (other ? " ≠" : ""), end: Math.max(1, most), ticks: [1],
      value: name === base ? "baseline" : `${times(mean)}${gains.length > 1 ? ` (${digits(least, 2)}–${digits(most, 2)})` : ""}`,
      parts: [["range", least, most, 3], [mean >= 1 ? "gain" : "loss", Math.min(1, mean), Math.max(1, mean)]],
      lines: [name, `${times(mean)} as fast as ${base}, geometric mean of ${plural(gains.length, "case")}`, `${times(least)} to ${times(most)}`, other && "another function: a choice of model, not of kernel"] })),
  }), h("p", { class: "legend" }, "Bar: geometric mean over all cases that the baseline has, too. Line: slowest to fastest case.")] }]);
}

function heatTable(title, lines, first) {
  const rows = lines.flatMap(([, line]) => line), names = unique(rows.map((row) => row.competitor));
  const others = new Set(rows.filter((row) => speedup(row)?.other).map((row) => row.competitor)), based = rows.some((row) => speedup(row));
  const table = h("table", { class: "heatmap", "aria-label": title },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, first), names.map((name) => h("th", { scope: "col" },
      h("span", { class: "vertical" }, swatch(name, breakable(name)), others.has(name) && h("span", { title: "another function" }, " ≠")))))),
    h("tbody", {}, lines.map(([label, line]) => h("tr", {}, h("th", { scope: "row" }, label),
      names.map((name) => heatCell(line.filter((row) => row.competitor === name).at(-1)))))));
  walkable(table);
  return h("figure", { class: "card" }, h("figcaption", {}, title, " ", !based && badge("note", "no baseline", `${baseline(state.suite)} has no time here`)),
    h("div", { class: "scroll" }, table));
}
function heatCell(row) {
  if (!row) return h("td", { class: "heat none" });
  const gain = speedup(row), care = row.kind === "flagged";
  const text = gain ? times(gain.value) : h("span", { class: "word" }, row.timed ? `${digits(row.median, 3)} ms` : statusWord(row.kind)[1]);
  const show = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    showTip(event.clientX || box.left, event.clientY || box.bottom - 10, tipLines(row));
  };
  return h("td", { class: `heat ${gain ? heatClass(gain.value) : row.timed ? "even" : "none"}${care ? " care" : ""}` }, h("button", {
    type: "button", tabindex: "-1", "aria-label": tipLines(row).join(", "), click: () => { hideTip(); openDrawer(row); },
    pointermove: show, pointerleave: hideTip, focus: show, blur: hideTip }, care && h("sup", {}, "▲"), text));
}

// One tab stop for a table of buttons; the arrow keys move within it.
function walkable(table) {
  const lines = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.querySelector("button")));
  const all = lines.flat().filter(Boolean);
  if (all.length) all[0].tabIndex = 0;
  table.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    let y = lines.findIndex((line) => line.includes(document.activeElement));
    if (!move || y < 0) return;
    event.preventDefault();
    let x = lines[y].indexOf(document.activeElement);
    do { y += move[0]; x += move[1]; } while (lines[y] && x > 0 && x < lines[y].length && !lines[y][x]);
    const next = lines[y] && lines[y][x];
    if (!next) return;
    for (const button of all) button.tabIndex = button === next ? 0 : -1;
    next.focus();
  });
}

// ------------------------------------------------------------------------------------------- scaling

const fitOf = (family, competitor) => DATA.fits.find((fit) => fit.family === family && fit.competitor === competitor
  && fit.pass === state.pass && fit.cache === state.cache);

// From or up to which N the rows are faster than the baseline's.
function crossover(rows) {
  if (rows[0].competitor === baseline(state.suite)) return h("span", { class: "soft" }, "baseline");
  const gaps = rows.map((row) => [row.n, speedup(row)]).filter(([, gain]) => gain).sort((a, b) => a[0] - b[0]).map(([n, gain]) => [n, Math.log(gain.value)]);
  if (!gaps.length) return h("span", { class: "soft" }, "no baseline");
  if (gaps.every(([, gap]) => gap > 0)) return "always";
  if (gaps.every(([, gap]) => gap <= 0)) return "never";
  let i = gaps.length - 1;
  while ((gaps[i - 1][1] > 0) === (gaps[i][1] > 0)) i -= 1;
  const [[a, ga], [b, gb]] = [gaps[i - 1], gaps[i]], n = Math.exp(Math.log(a) + Math.log(b / a) * ga / (ga - gb)), step = n >= 1000 ? 100 : 10;
  return `${gaps.at(-1)[1] > 0 ? "from" : "up to"} N ≈ ${commas(Math.round(n / step) * step)}`;
}

function drawScaling() {
  const shown = families().map(([family, rows]) => [family, rows.filter((row) => row.timed && row.n)])
    .filter(([, rows]) => unique(rows.map((row) => row.n)).length > 1);
  $("scaling").hidden = !shown.length;
  drawCards($("scaling-charts"), shown.map(([family, rows]) => ({ title: DATA.families[family].label, draw: (width) => {
    const series = [...groups(rows, (row) => row.competitor)].map(([name, line]) => ({ index: colourOf(name), fit: fitOf(family, name),
      points: line.map((row) => ({ n: row.n, y: row.median, lo: row.low, hi: row.high, row, hollow: row.kind === "flagged" })) }));
    const floors = [...groups(rows.filter((row) => row.floor_ms), (row) => row.function).values()]
      .map((line) => [...new Map(line.map((row) => [row.n, row.floor_ms]))].sort((a, b) => a[0] - b[0]));
    const since = (p, before) => `exponent since N ${commas(before.n)}: ${(Math.log(p.y / before.y) / Math.log(p.n / before.n)).toFixed(2)}`;
    return [curves({ width, height: 320, series, floors, yLabel: "ms", lines: (p, before) => [...tipLines(p.row), before && since(p, before)],
      label: `Time over N, ${DATA.families[family].label}, ${state.pass}. Arrow keys walk the points, Enter opens one.` }), fitTable(family, rows)];
  } })));
}
function fitTable(family, rows) {
  const exponent = (fit) => (fit ? `${fit[0].toFixed(2)} (${fit[1].toFixed(2)}–${fit[2].toFixed(2)})` : "–");
  const lines = [...groups(rows, (row) => row.competitor)].map(([name, line]) => ({ name, line, fit: fitOf(family, name) || { growth: "open", verdict: "one length" } }));
  return tableOf("fits", [[["t ~ N", h("sup", {}, "b")], ({ name }) => swatch(name), "key"], ["b, time", ({ fit }) => exponent(fit.time), "number"],
    ["b, memory", ({ fit }) => (fit.memory ? fit.memory[0].toFixed(2) : "–"), "number"],
    ["growth", ({ fit }) => h("span", { title: fit.verdict, class: fit.growth === "open" && "soft" }, fit.growth)],
    [`faster than ${baseline(state.suite)}?`, ({ line }) => crossover(line)]], lines, "Growth with N");
}

// ------------------------------------------------------------------------------------------ roofline

function drawRoofline() {
  const cards = [...groups(visible(), (row) => row.run)].map(([id, rows]) => {
    const run = RUNS.get(id), c = run.ceilings;
    const roofs = [["hard", "limit", c.flops_hard, c.bytes_hard || c.bytes_measured], ["measured", "measured", c.flops_measured, c.bytes_measured]]
      .filter(([, , top, size]) => top && size).map(([kind, name, top, size]) => ({ kind, name, flops: top, bytes: size }));
    const points = roofs.length === 0 ? [] : rows.filter((row) => row.timed && row.flops && row.bytes).map((row) => {
      const y = rate(row, "flops"), x = row.flops / row.bytes, over = y > Math.min(roofs[0].flops, x * roofs[0].bytes) * 1.001;
      return { x, y, row, over, index: colourOf(row.competitor), hollow: row.cache === "hot" || row.kind === "flagged",
        lines: () => [...tipLines(row), `${flops(y)}, ${traffic(rate(row, "bytes"))}`, over && "above the roof"] };
    });
    return { title: `${run.device}, ${state.suite}, ${state.pass}`, points, draw: (width) => [
      roofline({ width, height: Math.max(300, Math.min(460, width * 0.48)), roofs, points, label: `Roofline of ${run.device}: ${plural(points.length, "point")}. Arrow keys walk them, Enter opens one.` }),
      legend(points.map((p) => p.row), points.some((p) => p.hollow) && h("span", {}, "hollow: read with care, or hot cache"))] };
  }).filter((card) => card.points.length);
  drawCards($("roofline-charts"), cards);
  if (!cards.length) put($("roofline-charts"), h("p", { class: "soft" }, "No floors or no measured ceilings in these results: nothing to draw here."));
}

// -------------------------------------------------------------------------------------------- memory

const PARTS = { inputs: "inputs", output: "output", gradients: "gradients", saved: "saved for backward", workspace_forward: "forward workspace", workspace_backward: "backward workspace" };

function drawMemory() {
  const rows = LIVE.filter((row) => row.suite === state.suite && row.cache === state.cache && row.memory.peak);
  const ns = ascending(unique(rows.map((row) => row.n)).filter(isNumber)), selected = Number(own(state.memoryN, state.suite) || ns.at(-1)) || null;
  $("memory").hidden = !rows.length;
  put($("memory-controls"), ns.length > 1 && dropdown("N", "memory-n", ns.map((n) => [n, commas(n)]), selected, (value) => {
    state.memoryN[state.suite] = value;
    drawMemory();
  }), h("div", { class: "legend" }, Object.entries(PARTS).map(([part, name]) => key(s("rect", { class: "part " + part, x: -12, y: -6, width: 24, height: 12 }), name))));
  drawCards($("memory-charts"), [...groups(rows, (row) => row.family).values()].map((some) => {
    const n = some.some((row) => row.n === selected) ? selected : some.at(-1).n;
    const pass = [state.pass, "total", "backward", "forward"].find((name) => some.some((row) => row.pass === name && row.n === n));
    const same = some.filter((row) => row.pass === pass), here = same.filter((row) => row.n === n);
    return { title: `${here[0].where} · ${pass}`, draw: (width) => [memoryBars(width, here), memoryCurves(width, same)] };
  }));
}
function memoryBars(width, rows) {
  const lines = rows.map((row) => {
    let end = 0;
    const parts = Object.keys(PARTS).filter((part) => row.memory[part]).map((part) => ["part " + part, end, end += row.memory[part][0] || 0]);
    const floor = row.memory.peak[1], sizes = Object.keys(PARTS).filter((part) => row.memory[part]).map((part) => `${PARTS[part]}: ${bytes(row.memory[part][0])}`);
    return { name: row.competitor, row, parts, value: bytes(peak(row) || end), ticks: floor ? [floor] : [], end: Math.max(peak(row) || end, floor || 0),
      lines: [row.competitor, ...sizes, `peak: ${bytes(peak(row))}${floor ? ` · ${times(peak(row) / floor)} its floor` : ""}`] };
  });
  const most = Math.max(...lines.flatMap((line) => [line.end, ...line.parts.map((part) => part[2])])) || 1;
  return bars({ width, lines, label: `Memory, ${rows[0].where}`, scaleOf: (from, to) => scale(false, 0, most, from, to) });
}
function memoryCurves(width, rows) {
  const lines = rows.filter((row) => row.n && peak(row)), several = unique(lines.map((row) => row.n)).length > 1;
  const series = [...groups(lines, (row) => row.competitor)].map(([name, at]) => ({ index: colourOf(name), points: at.map((row) => ({ n: row.n, y: peak(row), row })) }));
  return several && curves({ width, height: 230, series, yLabel: "peak", guides: false, yText: (x) => bytes(x).replace(/\.0+ /, " "), ticks: binaryTicks,
    label: "Peak memory over N", lines: (p) => [p.row.competitor, `N ${commas(p.n)}`, `peak ${bytes(p.y)}`] });
}
