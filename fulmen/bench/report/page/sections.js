// The sections from the result to the memory, each drawn anew when a control changes.

const OTHER = "another function, a choice of model, not of kernel";

function drawResult() {
  const timed = ROWS.filter((row) => row.timed).length, said = timed === ROWS.length ? "All" : `${commas(timed)} of`;
  put("headline", DATA.title);
  put("subject", unique(DATA.runs.map((run) => dated(run.time, 10))).join(", "), " · ",
    h("span", { id: "proven" }, `${said} ${plural(ROWS.length, "cell")} proven right, then timed.`));
  put("notes", DATA.notes.map((note) => h("p", { class: "error" }, note)));
  const about = (one) => `geometric mean of ${plural(one.cases, "case")}${one.other ? "; ≠: " + OTHER : ""}`;
  const speed = (one) => h("div", { title: about(one) }, h("dt", {}, one.pass_),
    h("dd", {}, h("strong", {}, times(one.mean)), h("span", {}, `${digits(one.low, 3)}–${times(one.high)}`)));
  put("headlines", groups(DATA.headlines, (one) => one.suite).map(([suite, [first, ...more]]) => card(null,
    h("p", {}, h("strong", {}, suite), ": ", first.competitor, " against ", first.baseline, first.other && " ≠"),
    h("dl", {}, [first, ...more].map(speed)))));
}

function drawControls() {
  const rows = LIVE.filter((row) => row.suite === state.suite), caches = unique(rows.map((row) => row.cache)).sort();
  const passes = ["forward", "backward", "total"].filter((pass) => rows.some((row) => row.pass === pass));
  if (!passes.includes(state.pass)) [state.pass] = passes;
  if (!caches.includes(state.cache)) [state.cache] = caches;
  const choice = (label, name, options) => options.length > 1
    && radios(label, name, options, state[name], (value) => { state[name] = value; redraw(); });
  put("controls", choice("Suite", "suite", SUITES), choice("Pass", "pass", passes), choice("L2 cache", "cache", caches),
    dropdown("Baseline", "baseline", competitors(state.suite).map((name) => [name]), baseline(state.suite), (value) => {
      state.baseline[state.suite] = value;
      redraw();
    }));
}

// Cards with a chart each: [title, (width) => content]. All are placed before the first is drawn, to know the widths.
function drawCards(id, cards) {
  const figures = cards.map(([title]) => h("figure", { class: "card" }, h("figcaption", {}, title)));
  (id === "overview" ? $(id) : $(id).parentNode).hidden = !cards.length;
  put(id, figures);
  const width = (figure) => Math.max(260, Math.floor(figure.firstChild.clientWidth));
  figures.forEach((figure, i) => fill(figure, {}, cards[i][1](width(figure))));
}
const severalNs = (rows) => unique(rows.map((row) => row.n)).length > 1;
const byName = (rows) => groups(rows, (row) => row.competitor);

// --------------------------------------------------------------------------------------------- speed

const STEPS = [1.05, 1.25, 2, 4, 10];
const SHARES = ["0%", "12%", "25%", "40%", "78%", "100%"];
function heat(ratio) {
  const level = STEPS.filter((step) => Math.max(ratio, 1 / ratio) >= step).length;
  return { class: `heat ${ratio >= 1 ? "up" : "down"} ${level >= 4 ? "strong" : ""}`, style: `--share: ${SHARES[level]}` };
}

function drawSpeed() {
  const base = baseline(state.suite), families = groups(visible(), (row) => row.family).map(([, rows]) => rows);
  put("speed-lead", `How many times as fast as ${base}, ${state.pass} pass. `,
    unique(visible().map((row) => row.function)).length > 1 && `≠ marks ${OTHER}. `, "Click a cell for its samples.");
  drawOverview(base);
  const levels = [...STEPS.map((step) => 1 / step).reverse(), 1, ...STEPS];
  put("heat-legend", "slower", levels.map((x) => h("span", heat(x), `${Math.max(x, 1 / x)}×`)), "faster",
    h("span", { class: "heat care" }, "▲"), "read with care", h("span", { class: "heat none" }, "–"), "no number");
  const lines = (rows) => groups(rows, (row) => row.n).sort((a, b) => a[0] - b[0])
    .map(([n, line]) => [plain(n ?? "–"), line]);
  const single = families.filter((rows) => !severalNs(rows)).map((rows) => [rows[0].where, rows]);
  put("heat", families.filter(severalNs).map((rows) => heatTable(rows[0].label, lines(rows), "N")),
    single.length > 0 && heatTable("Single cases", single, "case"));
}

// The geometric mean of each implementation's speedups as a bar from 1×, and their range as a line.
function drawOverview(base) {
  const lines = byName(visible().filter(speedup)).map(([name, rows]) => {
    const gains = rows.map((row) => speedup(row).value), middle = Math.exp(mean(gains.map(Math.log)));
    const [low, high] = extent(gains, 1), other = rows.some((row) => speedup(row).other);
    const range = gains.length > 1 ? ` (${digits(low, 2)}–${digits(high, 2)})` : "";
    return { name: name + (other ? " ≠" : ""), middle, low, high, end: Math.max(1, high), ticks: [1],
      value: name === base ? "baseline" : times(middle) + range,
      parts: [["range", low, high, 3], [middle >= 1 ? "gain" : "loss", Math.min(1, middle), Math.max(1, middle)]],
      lines: [name, `${times(middle)} as fast as ${base}, geometric mean of ${plural(gains.length, "case")}`,
        `${times(low)} to ${times(high)}`, other && OTHER] };
  }).sort((a, b) => b.middle - a.middle);
  const range = extent([1, ...lines.flatMap((line) => [line.low, line.high])], 1.05);
  const label = `Speed of ${plural(lines.length, "implementation")} against ${base}. Arrow keys walk them.`;
  const chart = [`${state.suite}, ${state.pass}: times as fast as ${base}`, (width) => [
    bars({ width, lines, log: true, range, numbers: 132, label }),
    h("p", { class: "legend" }, "Bar: geometric mean over the baseline's cases. Line: slowest to fastest.")]];
  drawCards("overview", lines.length < 2 ? [] : [chart]);
}

function heatTable(title, lines, first) {
  const rows = lines.flatMap(([, line]) => line), names = unique(rows.map((row) => row.competitor));
  const others = rows.filter((row) => speedup(row)?.other).map((row) => row.competitor);
  const breakable = (name) => name.split(/(?<=[_\-/.])/).flatMap((part) => [part, h("wbr", {})]);
  const columns = names.map((name) => [[swatch(name, breakable(name)), others.includes(name) && " ≠"],
    ([, line]) => heatCell(line.findLast((row) => row.competitor === name)), "place"]);
  const box = tableOf("heatmap", [[first, ([label]) => label, "key"], ...columns], lines, title);
  box.classList.add("walk");
  fill(box, { tabindex: "-1", "data-across": names.length });
  fill(box.querySelector("button"), { tabindex: "0" });
  const missing = !rows.some(speedup) && badge(["note", "no baseline", `${baseline(state.suite)} has no time here`]);
  return h("figure", { class: "card" }, h("figcaption", {}, title, " ", missing), box);
}
function heatCell(row) {
  if (!row) return null;
  const gain = speedup(row), look = gain ? heat(gain.value) : { class: row.timed ? "heat" : "heat none" };
  const text = gain ? times(gain.value) : row.timed ? `${digits(row.median, 3)} ms` : wordOf("status", row.kind)[1];
  const label = tipLines(row).filter(Boolean).join(", "), care = row.kind === "flagged";
  return stop(button({ style: look.style, class: look.class + (care ? " care" : ""), "aria-label": label },
    care && h("sup", {}, "▲"), text), () => tipLines(row), row);
}

// ------------------------------------------------------------------------------------------- scaling

function drawScaling() {
  const keys = ["family", "competitor", "pass", "cache"];
  const fitOf = (row) => DATA.fits.find((fit) => keys.every((name) => fit[name] === row[name]));
  const exponent = (fit) => (fit ? `${fit[0].toFixed(2)} (${fit[1].toFixed(2)}–${fit[2].toFixed(2)})` : "–");
  const slope = (a, b) => (Math.log(b.y / a.y) / Math.log(b.n / a.n)).toFixed(2);
  const since = (p, last) => last && `exponent since N ${commas(last.n)}: ${slope(last, p)}`;
  const longest = (line) => line.reduce((a, b) => (b.n > a.n ? b : a));
  const timed = visible().filter((row) => row.timed && row.n);
  const families = groups(timed, (row) => row.family).map(([, rows]) => rows).filter(severalNs);
  drawCards("scaling-charts", families.map((rows) => [rows[0].label, (width) => {
    const lines = byName(rows).map(([name, line]) =>
      ({ name, line, fit: fitOf(line[0]) || { growth: "open", verdict: "one length" } }));
    const pointOf = (row) =>
      ({ n: row.n, y: row.median, lo: row.low, hi: row.high, row, hollow: row.kind === "flagged" });
    const series = lines.map(({ name, line, fit }) => ({ index: colourOf(name), fit, points: line.map(pointOf) }));
    const floors = groups(rows.filter((row) => row.floor_ms), (row) => row.function)
      .map(([, line]) => [...new Map(line.map((row) => [row.n, row.floor_ms]))].sort((a, b) => a[0] - b[0]));
    return [curves({ width, series, floors, lines: (p, last) => [...tipLines(p.row), since(p, last)],
      label: `Time over N, ${rows[0].label}, ${state.pass}. Arrow keys walk the points, Enter opens one.` }),
    tableOf("fits", [[["t ~ N", h("sup", {}, "b")], ({ name }) => swatch(name), "key"],
      ["b, time", ({ fit }) => exponent(fit.time), "number"],
      ["b, memory", ({ fit }) => (fit.memory ? fit.memory[0].toFixed(2) : "–"), "number"],
      ["growth", ({ fit }) => h("span", { title: fit.verdict, class: fit.growth === "open" && "soft" }, fit.growth)],
      ["at the longest N", ({ line }) => speedupWords(longest(line)) || "baseline"]], lines, "Growth with N")];
  }]));
}

// ------------------------------------------------------------------------------------------ roofline

function drawRoofline() {
  const rows = visible().filter((row) => row.timed && row.flops && row.bytes);
  drawCards("roofline-charts", groups(rows, (row) => row.run).map(([id, some]) => {
    const { device, ceilings: c } = RUNS.get(id);
    const roofs = [{ name: "limit", flops: c.flops_hard, bytes: c.bytes_hard || c.bytes_measured },
      { name: "measured", flops: c.flops_measured, bytes: c.bytes_measured }].filter((x) => x.flops && x.bytes);
    const points = some.map((row) => ({ x: row.flops / row.bytes, y: row.flops_rate, row, index: colourOf(row.competitor),
      hollow: row.cache === "hot" || row.kind === "flagged",
      lines: () => [...tipLines(row), `${flops(row.flops_rate)}, ${traffic(row.bytes_rate)}`] }));
    const label = `Roofline of ${device}: ${plural(points.length, "point")}. Arrow keys walk them, Enter opens one.`;
    return roofs.length && [`${device}, ${state.suite}, ${state.pass}`, (width) => [
      roofline({ width, roofs, points, label }), h("div", { class: "legend" }, byName(some).map(([name]) => swatch(name)),
        points.some((p) => p.hollow) && "hollow: read with care, or hot cache")]];
  }).filter(Boolean));
}

// ------------------------------------------------------------------------------------------ kinds, memory

const KINDS = { products: "products", attention: "attention", glue: "glue", optimiser: "optimiser" };
const PARTS = { inputs: "inputs", output: "output", gradients: "gradients", saved: "saved for backward",
  workspace_forward: "forward workspace", workspace_backward: "backward workspace" };

// A bar of parts, one after the other. sizes: {part: size}
function stack(names, sizes) {
  let end = 0;
  const parts = Object.keys(names).filter((part) => sizes[part]).map((part) => ["part " + part, end, end += sizes[part]]);
  return { parts, end };
}

function drawKinds() {
  const rows = visible().filter((row) => row.timed && Object.keys(row.kinds || {}).length);
  put("kinds-legend", partKeys(KINDS));
  drawCards("kinds-charts", groups(rows, (row) => row.where).map(([where, some]) => [where, (width) => {
    const lines = some.map((row) => {
      const { B, N } = row.case, speed = row.op === "train" && `${commas(Math.round(1e3 * B * N / row.median))} tokens/s`;
      const { parts, end } = stack(KINDS, row.kinds);
      return { name: row.competitor, row, parts, ticks: [], end,
        value: [speed || ms(end), percent(row.efficiency)].join(" · "),
        lines: [...tipLines(row), ...Object.entries(row.kinds).map(([kind, time]) => `${kind}: ${ms(time)}`)] };
    });
    const range = [0, Math.max(...lines.map((line) => line.end))];
    return [bars({ width, lines, range, numbers: 190, label: `Time of kernels by kind, ${where}` })];
  }]));
}

function drawMemory() {
  const rows = LIVE.filter((row) => row.suite === state.suite && row.cache === state.cache && row.memory.peak);
  put("memory-legend", partKeys(PARTS));
  drawCards("memory-charts", groups(rows, (row) => row.family).map(([, some]) => {
    const n = Math.max(...some.map((row) => row.n || 0)), longest = some.filter((row) => (row.n || 0) === n);
    const pass = [state.pass, "total", "backward", "forward"].find((name) => longest.some((row) => row.pass === name));
    const here = longest.filter((row) => row.pass === pass);
    return [`${here[0].where} · ${pass}`, (width) => memoryBars(width, here)];
  }));
}
function memoryBars(width, rows) {
  const lines = rows.map((row) => {
    const sizes = Object.fromEntries(Object.keys(PARTS).map((part) => [part, sizeOf(row, part)]));
    const { parts, end } = stack(PARTS, sizes), floor = sizeOf(row, "peak", "floor"), most = sizeOf(row) || end;
    return { name: row.competitor, row, parts, value: bytes(most), ticks: floor ? [floor] : [],
      end: Math.max(most, floor || 0), stack: end,
      lines: [row.competitor, ...Object.keys(PARTS).map((part) => sizes[part] && `${PARTS[part]}: ${bytes(sizes[part])}`),
        `peak: ${bytes(sizeOf(row))}${floor ? ` · ${times(sizeOf(row) / floor)} its floor` : ""}`] };
  });
  const range = [0, Math.max(1, ...lines.flatMap((line) => [line.end, line.stack]))];
  return bars({ width, lines, range, label: `Memory, ${rows[0].where}` });
}
