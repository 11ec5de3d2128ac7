// The sections from the verdict to the correctness table, each drawn anew when a choice changes.

function drawVerdict() {
  const timed = ROWS.filter((row) => row.timed).length, flagged = ROWS.filter((row) => row.kind === "flagged").length;
  const dates = unique(DATA.runs.map((run) => run.time.slice(0, 10))).join(", ");
  put($("subject"), `${DATA.title} · ${dates}`);
  put($("headline"), timed === ROWS.length ? `All ${plural(timed, "cell")} proven right, then timed.`
    : `${commas(timed)} of ${plural(ROWS.length, "cell")} proven right, then timed.`);
  put($("proportions"), DATA.counts.map(([kind, n]) => {
    const bar = h("span", { class: "k-" + kind });
    bar.style.flexGrow = n;
    return bar;
  }));
  put($("tiles"), DATA.counts.map(([kind, n]) => {
    const [, word, sentence] = statusWord(kind);
    return h("button", { type: "button", class: "tile k-" + kind, title: sentence, "data-kind": kind, click: () => {
      setFilter({ kind });
      $("cells").scrollIntoView();
      $("table").focus({ preventScroll: true });
    } }, h("span", { class: "glyph", "aria-hidden": "true" }, own(GLYPHS, kind) || "?"), h("span", { class: "count" }, commas(n)),
    h("span", { class: "word" }, word));
  }));
  const number = new Map(DATA.counts), withheld = number.get("withheld") || 0, failed = number.get("failed") || 0, notes = [];
  notes.push(withheld ? `${plural(withheld, "number")} withheld: faster than the hardware allows.` : "No number had to be withheld.");
  notes.push(failed ? `${plural(failed, "cell")} gave a wrong result and got no time.` : "No result was wrong.");
  if (flagged) notes.push(`${plural(flagged, "number")} to be read with care.`);
  put($("again"), h("p", { class: "lead" }, notes.join(" ")),
    DATA.runs.filter((run) => run.command).map((run) => [h("h3", { class: "small" }, "To measure all of it again"), command(run.command)]));
}

function drawEnvironment() {
  $("environment").open = innerWidth > 700;
  put($("facts"), DATA.runs.map((run) => h("dl", { class: "facts" },
    run.facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))));
}

function drawControls() {
  const rows = LIVE.filter((row) => row.suite === state.suite);
  const passes = ["forward", "backward", "total"].filter((pass) => rows.some((row) => row.pass === pass));
  const caches = unique(rows.map((row) => row.cache));
  if (!passes.includes(state.pass)) state.pass = passes[0];
  if (!caches.includes(state.cache)) state.cache = caches.includes("cold") ? "cold" : caches[0];
  const set = (key) => (value) => { state[key] = value; redraw(); };
  put($("controls"),
    SUITES.length > 1 && (SUITES.length <= 4 ? choices("Suite", "suite", SUITES, state.suite, set("suite"))
      : dropdown("Suite", "suite", SUITES, state.suite, set("suite"))),
    choices("Pass", "pass", passes, state.pass, set("pass")),
    caches.length > 1 && choices("L2 cache", "cache", caches, state.cache, set("cache")),
    dropdown("Baseline", "baseline", competitors(state.suite), baseline(state.suite), (value) => {
      state.baseline[state.suite] = value;
      redraw();
    }));
}

// ------------------------------------------------------------------------------------------- heatmap

const STEPS = [1.05, 1.25, 2, 4, 10];
function heatClass(ratio) {
  const up = ratio >= 1, far = up ? ratio : 1 / ratio;
  const level = STEPS.filter((step) => far >= step).length;
  return level === 0 ? "even" : (up ? "up" : "down") + level;
}
const familiesShown = () => [...groups(visible(), (row) => row.family)];

function drawHeat() {
  const base = baseline(state.suite);
  const functions = unique(visible().map((row) => row.function));
  put($("speed-lead"), `How many times as fast as ${base}, ${state.pass} pass. `,
    functions.length > 1 && "≠ marks another function than the baseline's: a choice of model, not of kernel. ",
    "Click a cell for its samples.");
  put($("heat-legend"), h("span", {}, "slower"),
    ["down5", "down4", "down3", "down2", "down1", "even", "up1", "up2", "up3", "up4", "up5"].map((level, i) =>
      h("span", { class: "key heat " + level }, ["10×", "4×", "2×", "1.25×", "1.05×", "1", "1.05×", "1.25×", "2×", "4×", "10×"][i])),
    h("span", {}, "faster"), h("span", { class: "key heat even care" }, "▲"), h("span", {}, "read with care"),
    h("span", { class: "key heat none" }, "–"), h("span", {}, "no number"));
  const several = [], single = [];
  for (const [family, rows] of familiesShown()) {
    if (unique(rows.map((row) => row.n)).length > 1) several.push([family, rows]);
    else single.push(rows);
  }
  const tables = several.map(([family, rows]) => heatTable(DATA.families[family].label,
    [...groups(rows, (row) => row.n)].sort((a, b) => a[0] - b[0]).map(([n, line]) => [n === null ? "–" : commas(n), line]), "N"));
  if (single.length) {
    tables.push(heatTable("Single cases", single.map((rows) => [rows[0].label + (rows[0].n ? ` · N ${commas(rows[0].n)}` : ""), rows]), "case"));
  }
  put($("heat"), tables);
}

function heatTable(title, lines, first) {
  const names = unique(lines.flatMap(([, rows]) => rows.map((row) => row.competitor)));
  const others = new Set(lines.flatMap(([, rows]) => rows).filter((row) => speedup(row)?.other).map((row) => row.competitor));
  const table = h("table", { class: "heatmap" }, h("caption", {}, title),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, first), names.map((name) => h("th", { scope: "col" },
      h("span", { class: "vertical" }, swatch(name), " ", breakable(name), others.has(name) && h("span", { title: "another function" }, " ≠")))))),
    h("tbody", {}, lines.map(([label, rows]) => h("tr", {}, h("th", { scope: "row" }, label),
      names.map((name) => heatCell(rows.filter((row) => row.competitor === name).at(-1)))))));
  walkable(table);
  return h("div", { class: "card scroll" }, table);
}

function heatCell(row) {
  if (!row) return h("td", { class: "heat none" }, h("span", { class: "soft" }, ""));
  const gain = speedup(row);
  const text = gain ? times(gain.value) : row.timed ? digits(row.median, 3) : "";
  const look = gain ? heatClass(gain.value) : row.timed ? "even" : "none";
  const word = row.timed ? "" : h("span", { class: "word" }, statusWord(row.kind)[1]);
  const show = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    showTip(event.clientX || box.left, event.clientY || box.bottom - 10, tipLines(row));
  };
  return h("td", { class: `heat ${look}${row.kind === "flagged" ? " care" : ""}` }, h("button", {
    type: "button", tabindex: "-1", "aria-label": tipLines(row).join(", "), click: () => { hideTip(); openDrawer(row); },
    pointermove: show, pointerleave: hideTip, focus: show, blur: hideTip }, row.kind === "flagged" && h("sup", {}, "▲"), text, word));
}

// One tab stop for a table of buttons; the arrow keys move within it.
function walkable(table) {
  const lines = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.querySelector("button")));
  const all = lines.flat().filter(Boolean);
  if (all.length) all[0].tabIndex = 0;
  table.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    let y = lines.findIndex((line) => line.includes(document.activeElement));
    if (y < 0) return;
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
const exponent = (fit) => (fit ? `${fit[0].toFixed(2)} (${fit[1].toFixed(2)}–${fit[2].toFixed(2)})` : "–");

function crossover(rows, base) {
  const at = new Map(base.filter((row) => row.timed).map((row) => [row.n, row.median]));
  const gaps = rows.filter((row) => row.timed && at.has(row.n)).sort((a, b) => a.n - b.n)
    .map((row) => [row.n, Math.log(at.get(row.n) / row.median)]);
  if (gaps.length < 2) return "";
  if (gaps.every(([, g]) => g > 0)) return "always";
  if (gaps.every(([, g]) => g <= 0)) return "never";
  let i = gaps.length - 1;
  while ((gaps[i - 1][1] > 0) === (gaps[i][1] > 0)) i -= 1;
  const [[a, ga], [b, gb]] = [gaps[i - 1], gaps[i]];
  const n = Math.exp(Math.log(a) + (Math.log(b) - Math.log(a)) * ga / (ga - gb));
  const step = n >= 1000 ? 100 : 10;
  return `${gaps.at(-1)[1] > 0 ? "from" : "up to"} N ≈ ${commas(Math.round(n / step) * step)}`;
}

function drawScaling() {
  const box = $("scaling-charts"), shown = familiesShown().filter(([, rows]) =>
    unique(rows.filter((row) => row.timed && row.n).map((row) => row.n)).length > 1);
  $("scaling").hidden = !shown.length;
  put(box, shown.map(([family, rows]) => {
    const card = h("figure", { class: "card" }, h("figcaption", {}, DATA.families[family].label));
    box.append(card);
    return card;
  }));
  shown.forEach(([family, rows], i) => scalingCard(box.children[i], family, rows));
}

function scalingCard(card, family, rows) {
  const timed = rows.filter((row) => row.timed && row.n), base = rows.filter((row) => row.competitor === baseline(state.suite));
  const series = [...groups(timed, (row) => row.competitor)].map(([name, line]) => ({
    name, index: colourOf(name), fit: fitOf(family, name),
    points: line.map((row) => ({ n: row.n, y: row.median, lo: row.low, hi: row.high, row, hollow: row.kind === "flagged" })),
  }));
  const floors = [...groups(timed.filter((row) => isNumber(row.floor_ms)), (row) => row.function)].map(([name, line]) => ({
    name, points: [...groups(line, (row) => row.n)].map(([n, at]) => [n, Math.min(...at.map((row) => row.floor_ms))]).sort((a, b) => a[0] - b[0]),
  }));
  const lines = (point, before) => [...tipLines(point.row), before
    && `exponent since N ${commas(before.n)}: ${(Math.log(point.y / before.y) / Math.log(point.n / before.n)).toFixed(2)}`];
  card.append(curves({ width: room(card), height: 320, series, floors, yLabel: "ms", yText: (t) => digits(t, 1), lines,
    label: `Time over N, ${DATA.families[family].label}, ${state.pass}. Arrow keys walk the points, Enter opens one.` }));
  card.append(h("div", { class: "scroll flat" }, h("table", { class: "fits" }, h("thead", {}, h("tr", {}, h("th", {}, "t ~ N", h("sup", {}, "b")),
    h("th", { class: "number" }, "b, time"), h("th", { class: "number" }, "b, memory"), h("th", {}, "linear?"), h("th", {}, `faster than ${baseline(state.suite)}?`))),
  h("tbody", {}, [...groups(timed, (row) => row.competitor)].map(([name, line]) => {
    const fit = fitOf(family, name), why = fit ? fit.verdict : "one length";
    return h("tr", {}, h("th", { scope: "row" }, swatch(name), " ", name), h("td", { class: "number", title: why }, exponent(fit && fit.time)),
      h("td", { class: "number", title: why }, fit && fit.memory ? fit.memory[0].toFixed(2) : "–"),
      h("td", { title: why }, fit && fit.linear === true ? "O(n)" : fit && fit.linear === false ? "not O(n)" : h("span", { class: "soft" }, "open")),
      h("td", {}, name === baseline(state.suite) ? h("span", { class: "soft" }, "baseline") : crossover(line, base)));
  })))));
}

function room(card) {
  const style = getComputedStyle(card);
  return Math.max(260, Math.floor(card.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
}

// ------------------------------------------------------------------------------------------ roofline

function drawRoofline() {
  const box = $("roofline-charts"), cards = [];
  put(box);
  for (const [id, rows] of groups(visible(), (row) => row.run)) {
    const run = RUNS.get(id), c = run ? run.ceilings : {};
    const roofs = [["hard", "limit", c.flops_hard, c.bytes_hard || c.bytes_measured], ["measured", "measured", c.flops_measured, c.bytes_measured]]
      .filter(([, , flops, size]) => flops && size).map(([kind, name, flops, size]) => ({ kind, name, flops, bytes: size }));
    const points = rows.filter((row) => row.timed && row.flops && row.bytes).map((row) => {
      const y = rate(row, "flops"), x = row.flops / row.bytes;
      const over = roofs.length && y > Math.min(roofs[0].flops, x * roofs[0].bytes) * 1.001;
      return { x, y, row, index: colourOf(row.competitor), hollow: row.cache === "hot" || row.kind === "flagged", over,
        lines: () => [...tipLines(row), `${digits(y / 1e12, 3)} TFLOP/s, ${digits(rate(row, "bytes") / 1e9, 4)} GB/s`, over && "above the roof"] };
    });
    if (!points.length || !roofs.length) continue;
    const card = h("figure", { class: "card" }, h("figcaption", {}, `${run.device}, ${state.suite}, ${state.pass}`));
    box.append(card);
    const width = room(card);
    card.append(roofline({ width, height: Math.max(300, Math.min(460, width * 0.48)), roofs, points,
      label: `Roofline of ${run.device}: ${plural(points.length, "point")}. Arrow keys walk them, Enter opens one.` }),
    h("div", { class: "legend" }, unique(points.map((p) => p.row.competitor)).map((name) => h("span", {}, swatch(name), " ", name)),
      points.some((p) => p.hollow) && h("span", { class: "soft" }, "hollow: read with care, or hot cache")));
    cards.push(card);
  }
  if (!cards.length) put(box, h("p", { class: "soft" }, "No floors or no measured ceilings in these results: nothing to draw here."));
}

// -------------------------------------------------------------------------------------------- memory

function memoryOf(rows, competitor, n) {
  const order = [state.pass, "total", "backward", "forward"];
  return rows.filter((row) => row.competitor === competitor && row.n === n && row.memory.peak)
    .sort((a, b) => order.indexOf(a.pass) - order.indexOf(b.pass))[0];
}
function drawMemory() {
  const box = $("memory-charts");
  const all = LIVE.filter((row) => row.suite === state.suite && row.cache === state.cache && row.memory.peak);
  const shown = [...groups(all, (row) => row.family)];
  $("memory").hidden = !shown.length;
  const ns = unique(all.map((row) => row.n)).filter(isNumber).sort((a, b) => a - b);
  const chosen = Number(own(state.memoryN, state.suite) || ns.at(-1)) || null;
  put($("memory-controls"), ns.length > 1 && dropdown("N", "memory-n", ns.map((n) => [n, commas(n)]), chosen, (value) => {
    state.memoryN[state.suite] = value;
    drawMemory();
  }), h("div", { class: "legend" }, Object.entries(PARTS).map(([part, name]) => h("span", {}, s("svg", { class: "swatch", viewBox: "0 0 24 12", "aria-hidden": "true" },
    s("rect", { class: "part " + part, x: 0, y: 0, width: 24, height: 12 })), " ", name))));
  put(box);
  const drawn = [];
  for (const [family, rows] of shown) {
    const n = unique(rows.map((row) => row.n)).includes(chosen) ? chosen : rows.at(-1).n;
    const bars = unique(rows.map((row) => row.competitor)).map((name) => memoryOf(rows, name, n)).filter(Boolean).map((row) => ({
      name: row.competitor, row, peak: peak(row), floor: row.memory.peak[1],
      parts: Object.keys(PARTS).filter((part) => row.memory[part]).map((part) => [part, row.memory[part][0] || 0]),
    }));
    if (!bars.length) continue;
    const card = h("figure", { class: "card" }, h("figcaption", {}, `${DATA.families[family].label}${n ? ` · N ${commas(n)}` : ""} · ${bars[0].row.pass}`));
    box.append(card);
    drawn.push(() => memoryCard(card, family, rows, bars, n));
  }
  for (const draw of drawn) draw(); // when all cards have their width
}
function memoryCard(card, family, rows, bars, n) {
  card.append(stacks({ width: room(card), bars, label: `Memory at N ${n}, ${DATA.families[family].label}` }));
  const line = (row) => ({ n: row.n, y: peak(row), row });
  const series = [...groups(rows.filter((row) => row.pass === bars[0].row.pass && row.n && peak(row)), (row) => row.competitor)]
    .map(([name, at]) => ({ name, index: colourOf(name), points: at.map(line) }));
  if (unique(series.flatMap((one) => one.points.map((p) => p.n))).length > 1) {
    card.append(curves({ width: room(card), height: 230, series, yLabel: "peak", guides: false, yText: (x) => bytes(x).replace(/\.0+ /, " "), ticks: binaryTicks,
      label: "Peak memory over N", lines: (p) => [p.row.competitor, `N ${commas(p.n)}`, `peak ${bytes(p.y)}`] }));
  }
}
