// What is behind a number: the drawer of one row, the correctness table, and what the words mean.

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== undefined && value !== null && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
function simpleTable(head, lines, numeric = []) {
  return h("div", { class: "scroll flat", tabindex: "0", role: "region", "aria-label": head.join(", ") }, h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: numeric.includes(i) ? "number" : "" }, name)))),
    h("tbody", {}, lines.map((line) => h("tr", {}, line.map((value, i) => h("td", { class: numeric.includes(i) ? "number" : "" }, value)))))));
}

// ------------------------------------------------------------------------------------------- drawer

const drawer = $("drawer");
let openRow = null, cameFrom = null;

function openDrawer(row) {
  if (!drawer.open) {
    cameFrom = document.activeElement;
    drawer.showModal();
  }
  openRow = row;
  hideTip();
  const run = RUNS.get(row.run), [, , sentence] = statusWord(row.kind);
  put(drawer, h("div", { class: "drawer-head" },
    h("div", {}, h("p", { class: "eyebrow" }, `${row.suite} · ${row.pass} · ${row.cache} cache`), h("h2", { id: "drawer-title" }, row.competitor),
      h("p", { class: "soft" }, `${row.label}${isNumber(row.n) ? ` · N ${commas(row.n)}` : ""}`)),
    h("div", { class: "drawer-buttons" },
      h("button", { type: "button", class: "quiet", "aria-label": "Previous row", click: () => stepDrawer(-1) }, "←"),
      h("button", { type: "button", class: "quiet", "aria-label": "Next row", click: () => stepDrawer(1) }, "→"),
      h("button", { type: "button", class: "quiet", "aria-label": "Close", click: () => drawer.close() }, "✕"))),
  h("p", { class: "drawer-status" }, statusBadge(row), " ", row.timed ? flagBadges(row) : null),
  h("p", { class: row.timed ? "soft" : "reason" }, row.timed ? sentence : row.reason || sentence));
  if (row.timed) drawerTimes(row);
  drawerAudit(row);
  if (Object.keys(row.correctness).length) drawer.append(h("h3", {}, "Correctness against fp64"), correctnessRows(row));
  if (Object.keys(row.memory).length) drawerMemory(row);
  if (row.resources) {
    const names = unique(row.resources.flatMap((one) => Object.keys(one)));
    drawer.append(h("h3", {}, "Kernels, from the compiled binary"),
      simpleTable(names, row.resources.map((one) => names.map((name) => (Object.hasOwn(one, name) && one[name] !== null ? resource(name, one[name]) : ""))),
        names.map((_, i) => i).slice(1)));
  }
  if (row.kernels) drawer.append(h("h3", {}, "What the device ran"), h("ol", { class: "kernels" }, row.kernels.map((name) => h("li", {}, h("code", {}, name)))));
  if (row.command) drawer.append(h("h3", {}, "To measure this cell again"), command(row.command));
  drawer.append(h("h3", {}, "What was measured"), facts([["computes", row.function], ["operation", row.op], ["backend", row.backend],
    ["version", row.version], ["seed", row.seed], ...Object.entries(row.case).map(([name, value]) => [name, plain(value)]),
    ["device", run && run.device], ["run", row.run], ["configuration", row.hash]]));
  history.replaceState(null, "", "#row=" + row.hash);
  drawer.scrollTop = 0;
}
const resource = (name, value) => (name === "occupancy" && isNumber(value) && value <= 1 ? percent(value) : plain(value));

function drawerTimes(row) {
  const gain = speedup(row), samples = unpack(row.samples), clocks = unpack(row.clocks), round = row.every || 1;
  drawer.append(h("div", { class: "big" }, h("strong", {}, ms(row.median)), isNumber(row.low) && h("span", { class: "soft" }, `95 % interval ${interval(row)}`)));
  if (samples.length > 1) {
    const box = h("figure", { class: "flat" });
    drawer.append(box);
    box.append(strip({ width: room(box), samples, clocks, row, round }), h("figcaption", { class: "legend" }, h("span", {}, h("span", { class: "dot" }), " one sample"),
      h("span", {}, h("span", { class: "dash" }), " median and its interval"), clocks.length > 1 && h("span", {}, h("span", { class: "dash clock-key" }),
        ` SM clock, ${commas(Math.round(Math.min(...clocks)))} to ${commas(Math.round(Math.max(...clocks)))} MHz`),
      round > 1 && h("span", {}, `every ${round}th sample; all are in the results file`)));
  }
  const st = row.stats;
  drawer.append(facts([["samples", isNumber(st.n) ? commas(st.n) : samples.length || ""], ["20 % to 80 %", isNumber(st.p20) && isNumber(st.p80) ? `${digits(st.p20)} to ${digits(st.p80)} ms` : ""],
    ["fastest", ms(st.min)], ["typical deviation", isNumber(st.mad) ? percent(st.mad / row.median, 2) : ""], ["outliers", isNumber(st.outliers) ? commas(st.outliers) : ""], ["stopped by", st.stop],
    ["device alone", ms(row.device_ms)], ["kernels alone", ms(row.kernels_ms)], ["call, with the host", ms(row.host_ms)], ["host until it returns", ms(st.enqueue)], ["power", isNumber(st.power_w) ? `${digits(st.power_w, 3)} W` : ""],
    ["temperature", isNumber(st.temperature_c) ? `${st.temperature_c} °C` : ""], ["calls per second", digits(1000 / row.median, 4)],
    ["arithmetic", isNumber(rate(row, "flops")) ? digits(rate(row, "flops") / 1e12, 3) + " TFLOP/s" : ""],
    ["memory traffic", isNumber(rate(row, "bytes")) ? digits(rate(row, "bytes") / 1e9, 4) + " GB/s" : ""],
    [`against ${baseline(row.suite)}`, gain && gain.base !== row ? `${times(gain.value)} (${times(gain.low)} to ${times(gain.high)})${gain.other ? ", another function" : ""}` : ""]]));
}
function drawerAudit(row) {
  if (!row.arithmetic && !row.flags.length && !isNumber(row.floor_ms)) return;
  drawer.append(h("h3", {}, "Audit against the hardware"));
  if (row.arithmetic) drawer.append(h("p", {}, row.arithmetic));
  if (row.timed && isNumber(row.efficiency)) drawer.append(h("p", { class: "soft" }, `The floor is ${ms(row.floor_ms)}; this is ${percent(row.efficiency)} of what is possible.`));
  drawer.append(h("ul", { class: "flags" }, row.flags.map(([flag, why]) => h("li", {}, badge(flagWord(flag)[0], flagWord(flag)[1]), " ", flagWord(flag)[2],
    why && why !== row.arithmetic && h("span", { class: "soft" }, " ", why)))));
}
function correctnessRows(row) {
  const lines = Object.entries(row.correctness).sort((a, b) => Number(a[1].ok !== false) - Number(b[1].ok !== false)).map(([name, one]) => [name,
    one.ok === false ? h("span", { class: "status bad" }, "✕ too far off") : h("span", { class: "status good" }, "✓ agrees"),
    error(one.error), error(one.bound), isNumber(one.error) && one.bound ? percent(one.error / one.bound) : "", error(one.max_abs)]);
  return simpleTable(["tensor", "", "error", "bound", "of it", "largest"], lines, [2, 3, 4, 5]);
}
function drawerMemory(row) {
  const names = [...Object.keys(PARTS).filter((part) => row.memory[part]), ...Object.keys(row.memory).filter((part) => !own(PARTS, part))];
  drawer.append(h("h3", {}, "Memory"), simpleTable(["part", "bytes", "floor"], names.map((part) => [own(PARTS, part) || part, bytes(row.memory[part][0]), bytes(row.memory[part][1])]), [1, 2]));
}
function stepDrawer(step) {
  const order = tableRows(), at = order.indexOf(openRow);
  openDrawer(order[(at + step + order.length) % order.length] || openRow);
}
drawer.addEventListener("close", () => {
  hideTip();
  openRow = null;
  history.replaceState(null, "", location.pathname + location.search);
  if (cameFrom && cameFrom.isConnected) cameFrom.focus({ preventScroll: true });
});
drawer.addEventListener("click", (event) => { if (event.target === drawer) drawer.close(); });
drawer.addEventListener("keydown", (event) => {
  if (event.target.closest("svg, code, .scroll")) return;
  if (event.key === "ArrowLeft") stepDrawer(-1);
  if (event.key === "ArrowRight") stepDrawer(1);
});

// -------------------------------------------------------------------------------------- correctness

function drawCorrectness() {
  const box = $("correctness-tables"), failed = ROWS.filter((row) => row.status === "failed");
  const checks = ROWS.flatMap((row) => Object.entries(row.correctness).map(([tensor, one]) => ({ row, tensor, one,
    part: isNumber(one.error) && one.bound ? one.error / one.bound : undefined })));
  $("correctness").hidden = !checks.length && !failed.length;
  put(box);
  if (failed.length) {
    box.append(h("div", { class: "card" }, h("h3", {}, "Wrong, and therefore without a time"), simpleTable(["implementation", "case", "pass", "what was wrong"], failed.map((row) => [
      h("button", { type: "button", class: "link", click: () => openDrawer(row) }, row.competitor), `${row.label}${isNumber(row.n) ? ` · N ${commas(row.n)}` : ""}`, row.pass, row.reason]))));
  }
  if (!checks.length) return;
  const lines = [...groups(checks, (c) => [c.row.competitor, c.row.suite, plain(c.row.case.dtype ?? "")].join("\n"))].map(([, same]) => {
    const bad = same.filter((c) => c.one.ok === false).length;
    const worst = same.reduce((a, b) => ((b.part ?? -1) > (a.part ?? -1) ? b : a));
    return { same, bad, worst };
  }).sort((a, b) => Number(b.bad > 0) - Number(a.bad > 0) || (b.worst.part ?? 0) - (a.worst.part ?? 0));
  const table = simpleTable(["implementation", "suite", "precision", "tensors checked", "result", "worst", "error", "bound", "of it"], lines.map(({ same, bad, worst }) => [
    worst.row.competitor, worst.row.suite, plain(worst.row.case.dtype ?? ""), commas(same.length),
    bad ? h("span", { class: "status bad" }, `✕ ${commas(bad)} too far off`) : h("span", { class: "status good" }, "✓ all agree"),
    h("button", { type: "button", class: "link", click: () => openDrawer(worst.row) }, `${worst.tensor}, N ${plain(worst.row.n ?? "–")}`),
    error(worst.one.error), error(worst.one.bound), meter(worst.part)]), [3, 6, 7, 8]);
  box.append(h("div", { class: "card" }, table));
}
function meter(part) {
  if (!isNumber(part)) return "";
  const bar = s("svg", { class: "meter", viewBox: "0 0 60 8", "aria-hidden": "true" }, s("rect", { class: "meter-back", width: 60, height: 8 }),
    s("rect", { class: part > 1 ? "meter-bad" : "meter-fill", width: 60 * Math.min(1, part), height: 8 }));
  return [bar, " ", percent(part)];
}

function drawGlossary() {
  const list = (title, table, used) => h("div", { class: "card" }, h("h3", {}, title), h("dl", { class: "words" },
    Object.entries(table).filter(([name]) => used(name)).map(([name, [severity, word, sentence]]) => h("div", {}, h("dt", {}, badge(severity, word)), h("dd", {}, sentence)))));
  const everything = () => true;
  put($("glossary"), list("What became of a cell", DATA.words.status, everything), list("How to read a number", DATA.words.flag, everything),
    list("What a comparison says", DATA.words.verdict, everything));
}
