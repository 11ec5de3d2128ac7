// The sections from the result to the memory, each drawn anew when a control changes.

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
const OTHER = "another function, a choice of model, not of kernel";

function drawControls() {
  const rows = LIVE.filter((row) => row.suite === state.suite), caches = unique(rows.map((row) => row.cache)).sort();
  const passes = ["forward", "backward", "total"].filter((pass) => rows.some((row) => row.pass === pass));
  if (!passes.includes(state.pass)) [state.pass] = passes;
  if (!caches.includes(state.cache)) [state.cache] = caches;
  const set = (name) => (value) => { state[name] = value; redraw(); };
  put("controls",
    SUITES.length > 4 && dropdown("Suite", "suite", SUITES.map((suite) => [suite]), state.suite, set("suite")),
    SUITES.length > 1 && SUITES.length <= 4 && radios("Suite", "suite", SUITES, state.suite, set("suite")),
    radios("Pass", "pass", passes, state.pass, set("pass")),
    caches.length > 1 && radios("L2 cache", "cache", caches, state.cache, set("cache")),
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
  figures.forEach((figure, i) => fill(figure, {},
    cards[i][1](Math.max(260, Math.floor(figure.firstChild.clientWidth)))));
}
const severalNs = (rows) => unique(rows.map((row) => row.n)).length > 1;
const byName = (rows) => groups(rows, (row) => row.competitor);

// --------------------------------------------------------------------------------------------- speed

const STEPS = [1.05, 1.25, 2, 4, 10];
const SHARES = ["0%", "12%", "25%", "40%", "78%", "100%"];
const levelOf = (ratio) => STEPS.filter((step) => Math.max(ratio, 1 / ratio) >= step).length;
const heat = (ratio, level = levelOf(ratio)) =>
  ({ class: `heat ${ratio >= 1 ? "up" : "down"} ${level >= 4 ? "strong" : ""}`, style: `--share: ${SHARES[level]}` });

function drawSpeed() {
  const base = baseline(state.suite), families = groups(visible(), (row) => row.family).map(([, rows]) => rows);
  put("speed-lead", `How many times as fast as ${base}, ${state.pass} pass. `,
    unique(visible().map((row) => row.function)).length > 1 && `≠ marks ${OTHER}. `, "Click a cell for its samples.");
  drawOverview(base);
  const levels = [...STEPS.map((step) => [1 / step, step + "×"]).reverse(), [1, "1"],
    ...STEPS.map((step) => [step, step + "×"])];
  put("heat-legend", "slower", levels.map(([ratio, text]) => h("span", heat(ratio), text)), "faster",
    h("span", { class: "heat care" }, "▲"), "read with care", h("span", { class: "heat none" }, "–"), "no number");
  const lines = (rows) => groups(rows, (row) => row.n).sort((a, b) => a[0] - b[0])
    .map(([n, line]) => [plain(n ?? "–"), line]);
  const single = families.filter((rows) => !severalNs(rows)).map((rows) => [rows[0].where, rows]);
  put("heat", families.filter(severalNs).map((rows) => heatTable(rows[0].label, lines(rows), "N")),
    single.length > 0 && heatTable("Single cases", single, "case"));
}

// The geometric mean of each implementation's speedups as a bar from 1×, and their range as a line.
function drawOverview(base) {
  const lines = byName(visible().filter((row) => speedup(row))).map(([name, rows]) => {
    const gains = rows.map((row) => speedup(row).value), middle = Math.exp(mean(gains.map(Math.log)));
    const low = Math.min(...gains), high = Math.max(...gains);
    const other = rows.some((row) => speedup(row).other);
    const range = gains.length > 1 ? ` (${digits(low, 2)}–${digits(high, 2)})` : "";
    return { name: name + (other ? " ≠" : ""), middle, low, high, end: Math.max(1, high), ticks: [1],
      value: name === base ? "baseline" : times(middle) + range,
      parts: [["range", low, high, 3], [middle >= 1 ? "gain" : "loss", Math.min(1, middle), Math.max(1, middle)]],
      lines: [name, `${times(middle)} as fast as ${base}, geometric mean of ${plural(gains.length, "case")}`,
        `${times(low)} to ${times(high)}`, other && OTHER] };
  }).sort((a, b) => b.middle - a.middle);
  const range = extent([1, ...lines.flatMap((line) => [line.low, line.high])], 1.05);
  drawCards("overview", lines.length < 2 ? []
    : [[`${state.suite}, ${state.pass}: times as fast as ${base}`, (width) => [
    bars({ width, lines, log: true, range, numbers: 132,
      label: `Speed of ${plural(lines.length, "implementation")} against ${base}. Arrow keys walk them.` }),
    h("p", { class: "legend" }, "Bar: geometric mean over the baseline's cases. Line: slowest to fastest.")]]]);
}

// A heatmap is one stop of the tab key: the arrows move within it.
function heatTable(title, lines, first) {
  const rows = lines.flatMap(([, line]) => line);
  const others = rows.filter((row) => speedup(row)?.other).map((row) => row.competitor);
  const names = unique(rows.map((row) => row.competitor));
  const breakable = (name) => name.split(/(?<=[_\-/.])/).flatMap((part) => [part, h("wbr", {})]);
  const columns = names.map((name) => [[swatch(name, breakable(name)), others.includes(name) && " ≠"],
    ([, line]) => heatCell(line.findLast((row) => row.competitor === name))]);
  const box = tableOf("heatmap", [[first, ([label]) => label, "key"], ...columns], lines, title);
  const cells = [...box.querySelectorAll("td")];
  fill(cells.find((cell) => cell.firstChild).firstChild, { tabindex: "0" });
  fill(box, { tabindex: "-1", keydown(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: names.length, ArrowUp: -names.length }[event.key];
    const from = document.activeElement;
    let at = cells.indexOf(from.parentNode) + step;
    while (cells[at] && !cells[at].firstChild) at += step;
    if (!step || !cells[at]) return;
    event.preventDefault();
    from.tabIndex = -1;
    cells[at].firstChild.tabIndex = 0;
    cells[at].firstChild.focus();
  } });
  const missing = !rows.some((row) => speedup(row))
    && badge(["note", "no baseline", `${baseline(state.suite)} has no time here`]);
  return h("figure", { class: "card" }, h("figcaption", {}, title, " ", missing), box);
}
function heatCell(row) {
  if (!row) return null;
  const gain = speedup(row), text = gain ? times(gain.value) : row.timed ? `${digits(row.median, 3)} ms`
    : wordOf("status", row.kind)[1];
  const show = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    showTip(event.clientX || box.left, event.clientY || box.bottom - 10, tipLines(row));
  };
  const look = gain ? heat(gain.value) : { class: row.timed ? "heat" : "heat none" };
  return button({ style: look.style, class: look.class + (row.kind === "flagged" ? " care" : ""), tabindex: "-1",
    "aria-label": tipLines(row).join(", "),
    click: () => { hideTip(); openDrawer(row); },
    pointermove: show, pointerleave: hideTip, focus: show, blur: hideTip },
  row.kind === "flagged" && h("sup", {}, "▲"), text);
}

// ------------------------------------------------------------------------------------------- scaling

// From or up to which N the rows are faster than the baseline's.
function crossover(rows) {
  if (rows[0].competitor === baseline(state.suite)) return h("span", { class: "soft" }, "baseline");
  const gaps = rows.filter(speedup).sort((a, b) => a.n - b.n).map((row) => [row.n, Math.log(speedup(row).value)]);
  const faster = gaps.at(-1)?.[1] > 0;
  if (!gaps.length) return h("span", { class: "soft" }, "no baseline");
  const i = gaps.findLastIndex(([, gap]) => gap > 0 !== faster);
  if (i < 0) return faster ? "always" : "never";
  const [[a, ga], [b, gb]] = gaps.slice(i, i + 2), n = Math.exp(Math.log(a) + Math.log(b / a) * ga / (ga - gb));
  const step = n >= 1000 ? 100 : 10;
  return `${faster ? "from" : "up to"} N ≈ ${commas(Math.round(n / step) * step)}`;
}

function drawScaling() {
  const keys = ["family", "competitor", "pass", "cache"];
  const fitOf = (row) => DATA.fits.find((fit) => keys.every((name) => fit[name] === row[name]));
  const exponent = (fit) => (fit ? `${fit[0].toFixed(2)} (${fit[1].toFixed(2)}–${fit[2].toFixed(2)})` : "–");
  const slope = (a, b) => (Math.log(b.y / a.y) / Math.log(b.n / a.n)).toFixed(2);
  const since = (p, last) => last && `exponent since N ${commas(last.n)}: ${slope(last, p)}`;
  const families = groups(visible().filter((row) => row.timed && row.n),
    (row) => row.family).map(([, rows]) => rows).filter(severalNs);
  drawCards("scaling-charts", families.map((rows) => [rows[0].label, (width) => {
    const lines = byName(rows).map(([name, line]) =>
      ({ name, line, fit: fitOf(line[0]) || { growth: "open", verdict: "one length" } }));
    const series = lines.map(({ name, line, fit }) => ({ index: colourOf(name), fit,
      points: line.map((row) => ({ n: row.n, y: row.median, lo: row.low, hi: row.high, row,
        hollow: row.kind === "flagged" })) }));
    const floors = groups(rows.filter((row) => row.floor_ms), (row) => row.function)
      .map(([, line]) => [...new Map(line.map((row) => [row.n, row.floor_ms]))].sort((a, b) => a[0] - b[0]));
    return [curves({ width, height: 320, series, floors, yLabel: "ms",
      lines: (p, last) => [...tipLines(p.row), since(p, last)],
      label: `Time over N, ${rows[0].label}, ${state.pass}. Arrow keys walk the points, Enter opens one.` }),
    tableOf("fits", [[["t ~ N", h("sup", {}, "b")], ({ name }) => swatch(name), "key"],
      ["b, time", ({ fit }) => exponent(fit.time), "number"],
      ["b, memory", ({ fit }) => (fit.memory ? fit.memory[0].toFixed(2) : "–"), "number"],
      ["growth", ({ fit }) => h("span", { title: fit.verdict, class: fit.growth === "open" && "soft" }, fit.growth)],
      [`faster than ${baseline(state.suite)}?`, ({ line }) => crossover(line)]], lines, "Growth with N")];
  }]));
}

// ------------------------------------------------------------------------------------------ roofline

function drawRoofline() {
  const cards = groups(visible().filter((row) => row.timed && row.flops && row.bytes),
    (row) => row.run).map(([id, rows]) => {
    const { device, ceilings: c } = RUNS.get(id), index = (row) => colourOf(row.competitor);
    const roofs = [{ name: "limit", flops: c.flops_hard, bytes: c.bytes_hard || c.bytes_measured },
      { name: "measured", flops: c.flops_measured, bytes: c.bytes_measured }].filter((roof) => roof.flops
        && roof.bytes);
    const points = roofs.length === 0 ? [] : rows.map((row) => {
      const y = row.flops_rate, x = row.flops / row.bytes;
      const over = y > Math.min(roofs[0].flops, x * roofs[0].bytes) * 1.001;
      return { x, y, row, over, index: index(row), hollow: row.cache === "hot" || row.kind === "flagged",
        lines: () => [...tipLines(row), `${flops(y)}, ${traffic(row.bytes_rate)}`, over && "above the roof"] };
    });
    return points.length && [`${device}, ${state.suite}, ${state.pass}`, (width) => [
      roofline({ width, height: Math.max(300, Math.min(460, width * 0.48)), roofs, points,
        label: `Roofline of ${device}: ${plural(points.length, "point")}. Arrow keys walk them, Enter opens one.` }),
      h("div", { class: "legend" }, byName(rows).map(([name]) => swatch(name)),
        points.some((p) => p.hollow) && "hollow: read with care, or hot cache")]];
  }).filter(Boolean);
  drawCards("roofline-charts", cards);
}

// --------------------------------------------------------------------------------------------- kinds

const KINDS = ["products", "attention", "glue", "optimiser"];

function drawKinds() {
  const rows = visible().filter((row) => row.timed && Object.keys(row.kinds || {}).length);
  put("kinds-legend", KINDS.map((kind) =>
    key(s("rect", { class: "part " + kind, x: -12, y: -6, width: 24, height: 12 }), kind)));
  drawCards("kinds-charts", groups(rows, (row) => row.where).map(([where, some]) => [where, (width) => {
    const lines = some.map((row) => {
      const { B, N } = row.case, speed = row.op === "train" && `${commas(Math.round(1e3 * B * N / row.median))} tokens/s`;
      let end = 0;
      const parts = KINDS.map((kind) => ["part " + kind, end, end += row.kinds[kind] || 0]);
      return { name: row.competitor, row, parts, ticks: [], end, value: [speed || ms(end), percent(row.efficiency)].join(" · "),
        lines: [...tipLines(row), ...KINDS.map((kind) => `${kind}: ${ms(row.kinds[kind] || 0)}`)] };
    });
    const range = [0, Math.max(...lines.map((line) => line.end))];
    return [bars({ width, lines, range, numbers: 190, label: `Time of kernels by kind, ${where}` })];
  }]));
}

// -------------------------------------------------------------------------------------------- memory

const PARTS = { inputs: "inputs", output: "output", gradients: "gradients", saved: "saved for backward",
  workspace_forward: "forward workspace",
  workspace_backward: "backward workspace" };

function drawMemory() {
  const rows = LIVE.filter((row) => row.suite === state.suite && row.cache === state.cache && row.memory.peak);
  const ns = ascending(unique(rows.map((row) => row.n)).filter(isNumber));
  const chosen = Number(own(state.memoryN, state.suite) || ns.at(-1)) || undefined;
  put("memory-controls", ns.length > 1 && dropdown("N", "memory-n", ns.map((n) => [n, commas(n)]), chosen, (value) => {
    state.memoryN[state.suite] = value;
    drawMemory();
  }), h("div", { class: "legend" }, Object.entries(PARTS).map(([part, name]) =>
    key(s("rect", { class: "part " + part, x: -12, y: -6, width: 24, height: 12 }), name))));
  drawCards("memory-charts", groups(rows, (row) => row.family).map(([, some]) => {
    const n = some.some((row) => row.n === chosen) ? chosen : some.at(-1).n;
    const passes = [state.pass, "total", "backward", "forward"];
    const pass = passes.find((name) => some.some((row) => row.pass === name && row.n === n));
    const same = some.filter((row) => row.pass === pass), here = same.filter((row) => row.n === n);
    return [`${here[0].where} · ${pass}`, (width) => [memoryBars(width, here), memoryCurves(width, same)]];
  }));
}
function memoryBars(width, rows) {
  const lines = rows.map((row) => {
    const parts = Object.keys(PARTS).filter((part) => row.memory[part]), floor = sizeOf(row, "peak", "floor");
    let end = 0;
    const stack = parts.map((part) => ["part " + part, end, end += sizeOf(row, part) || 0]), most = sizeOf(row) || end;
    return { name: row.competitor, row, parts: stack, value: bytes(most), ticks: floor ? [floor] : [],
      end: Math.max(most, floor || 0), stack: end,
      lines: [row.competitor, ...parts.map((part) => `${PARTS[part]}: ${bytes(sizeOf(row, part))}`),
        `peak: ${bytes(sizeOf(row))}${floor ? ` · ${times(sizeOf(row) / floor)} its floor` : ""}`] };
  });
  const range = [0, Math.max(1, ...lines.flatMap((line) => [line.end, line.stack]))];
  return bars({ width, lines, range, label: `Memory, ${rows[0].where}` });
}
function memoryCurves(width, rows) {
  const some = rows.filter((row) => row.n && sizeOf(row)), GiB = 2 ** 30;
  const series = byName(some).map(([name, line]) =>
    ({ index: colourOf(name), points: line.map((row) => ({ n: row.n, y: sizeOf(row) / GiB, row })) }));
  return severalNs(some) && curves({ width, height: 230, series, yLabel: "peak, GiB", guides: false,
    label: "Peak memory over N",
    lines: (p) => [p.row.competitor, `N ${commas(p.n)}`, `peak ${bytes(p.y * GiB)}`] });
}
