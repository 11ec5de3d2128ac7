// What is behind a number: the drawer of one row, the correctness table, the environment, and what the words mean.

const drawer = $("drawer");
let openRow = null;

function openDrawer(row) {
  if (!drawer.open) drawer.showModal(); // closing it gives the focus back
  openRow = row;
  hideTip();
  const quiet = (label, text, click) => h("button", { type: "button", class: "quiet", "aria-label": label, click }, text);
  put(drawer, h("div", { class: "drawer-head" },
    h("div", {}, h("p", { class: "eyebrow" }, `${row.suite} · ${row.pass} · ${row.cache} cache`), h("h2", { id: "drawer-title" }, row.competitor), h("p", { class: "soft" }, row.where)),
    h("div", { class: "drawer-buttons" }, quiet("Previous row", "←", () => stepDrawer(-1)), quiet("Next row", "→", () => stepDrawer(1)), quiet("Close", "✕", () => drawer.close()))),
  h("p", { class: "drawer-status" }, statusBadge(row), " ", row.timed && flagBadges(row)),
  h("p", { class: row.timed ? "soft" : "reason" }, (!row.timed && row.reason) || statusWord(row.kind)[2]));
  if (row.timed) drawerTimes(row);
  for (const [title, ...content] of drawerParts(row)) drawer.append(h("h3", {}, title), ...content);
  history.replaceState(null, "", "#row=" + row.hash);
  drawer.scrollTop = 0;
}

function drawerTimes(row) {
  const st = row.stats, samples = unpack(row.samples), clocks = unpack(row.clocks), round = row.every || 1, box = h("figure");
  drawer.append(h("div", { class: "big" }, h("strong", {}, ms(row.median)), h("span", { class: "soft" }, interval(row))), box);
  if (samples.length > 1) {
    fill(box, {}, [strip({ width: Math.max(260, box.clientWidth), samples, clocks, row, round }), h("figcaption", { class: "legend" },
      h("span", {}, h("span", { class: "dot" }), " one sample"), h("span", {}, h("span", { class: "dash" }), " median and its interval"),
      clocks.length > 1 && h("span", {}, h("span", { class: "dash clock-key" }), ` SM clock, ${commas(Math.round(Math.min(...clocks)))} to ${commas(Math.round(Math.max(...clocks)))} MHz`),
      round > 1 && h("span", {}, `every ${round}th sample; all are in the results file`))]);
  }
  drawer.append(facts([["samples", isNumber(st.n) ? commas(st.n) : samples.length || ""], ["20 % to 80 %", isNumber(st.p20) && isNumber(st.p80) ? `${digits(st.p20)} to ${ms(st.p80)}` : ""],
    ["fastest", ms(st.min)], ["typical deviation", percent(st.mad / row.median, 2)], ["outliers", plain(st.outliers ?? "")], ["stopped by", st.stop],
    ["device alone", ms(row.device_ms)], ["kernels alone", ms(row.kernels_ms)], ["call, with the host", ms(row.host_ms)], ["host until it returns", ms(st.enqueue)],
    ["power", isNumber(st.power_w) ? `${digits(st.power_w, 3)} W` : ""], ["temperature", isNumber(st.temperature_c) ? `${st.temperature_c} °C` : ""],
    ["calls per second", digits(1000 / row.median)], ["arithmetic", flops(rate(row, "flops"))], ["memory traffic", traffic(rate(row, "bytes"))],
    ["against the baseline", speedupWords(row)]]));
}

// [title, content ...] of each part that the row has.
function drawerParts(row) {
  const parts = [], run = RUNS.get(row.run);
  if (row.arithmetic || row.flags.length || isNumber(row.floor_ms)) {
    const share = row.timed && isNumber(row.efficiency) ? `This is ${percent(row.efficiency)} of what is possible.` : "";
    parts.push(["Audit against the hardware", h("p", {}, row.arithmetic || ""), h("p", { class: "soft" }, isNumber(row.floor_ms) && `The floor is ${ms(row.floor_ms)}. `, share),
      h("ul", { class: "flags" }, row.flags.map(([flag, why]) => h("li", {}, badge(flagWord(flag)[0], flagWord(flag)[1]), " ", flagWord(flag)[2],
        why && why !== row.arithmetic && h("span", { class: "soft" }, " ", why))))]);
  }
  const checks = Object.entries(row.correctness).sort((a, b) => Number(a[1].ok !== false) - Number(b[1].ok !== false));
  if (checks.length) {
    parts.push(["Correctness against fp64", tableOf("plain", [["tensor"], ["", ([, one]) => agreement(one.ok !== false, one.ok === false ? "too far off" : "agrees")],
      ...["error", "bound"].map((name) => [name, ([, one]) => error(one[name]), "number"]),
      ["of it", ([, one]) => (one.bound ? percent(one.error / one.bound) : ""), "number"], ["largest", ([, one]) => error(one.max_abs), "number"]], checks, "Correctness")]);
  }
  const memory = [...Object.keys(PARTS).filter((part) => row.memory[part]), ...Object.keys(row.memory).filter((part) => !own(PARTS, part))];
  if (memory.length) {
    parts.push(["Memory", tableOf("plain", [["part", (part) => own(PARTS, part) || part], ["bytes", (part) => bytes(row.memory[part][0]), "number"],
      ["floor", (part) => bytes(row.memory[part][1]), "number"]], memory, "Memory")]);
  }
  if (row.resources) {
    const value = (one, name) => (name === "occupancy" && isNumber(one[name]) && one[name] <= 1 ? percent(one[name]) : plain(own(one, name) ?? ""));
    const columns = unique(row.resources.flatMap((one) => Object.keys(one))).map((name, i) => [name, (one) => value(one, name), i ? "number" : undefined]);
    parts.push(["Kernels, from the compiled binary", tableOf("plain", columns, row.resources, "Kernels")]);
  }
  if (row.kernels) parts.push(["What the device ran", h("ol", { class: "kernels" }, row.kernels.map((name) => h("li", {}, h("code", {}, name))))]);
  if (row.command) parts.push(["To measure this cell again", command(row.command)]);
  parts.push(["What was measured", facts([["computes", row.function], ["operation", row.op], ["backend", row.backend], ["version", row.version], ["seed", row.seed],
    ...Object.entries(row.case).map(([name, value]) => [name, plain(value)]), ["device", run && run.device], ["run", row.run], ["configuration", row.hash]])]);
  return parts;
}
function stepDrawer(step) {
  const order = tableRows(), at = order.indexOf(openRow);
  openDrawer(order[(at + step + order.length) % order.length] || openRow);
}
fill(drawer, {
  close() {
    hideTip();
    openRow = null;
    history.replaceState(null, "", location.pathname + location.search);
  },
  click(event) { if (event.target === drawer) drawer.close(); },
  keydown(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && !event.target.closest("svg, code, .scroll")) stepDrawer(step);
  },
}, []);

// ------------------------------------------------------------------- correctness, environment, words

function drawCorrectness() {
  const failed = ROWS.filter((row) => row.status === "failed");
  const checks = ROWS.flatMap((row) => Object.entries(row.correctness).map(([tensor, one]) => ({ row, tensor, one, part: one.bound ? one.error / one.bound : NaN })));
  const lines = [...groups(checks, ({ row }) => [row.competitor, row.suite, row.case.dtype].join("\n")).values()].map((same) => ({ same,
    bad: same.filter((check) => check.one.ok === false).length, worst: same.reduce((a, b) => ((b.part || -1) > (a.part || -1) ? b : a)) }))
    .sort((a, b) => Number(b.bad > 0) - Number(a.bad > 0) || (b.worst.part || 0) - (a.worst.part || 0));
  const of = (get, look) => [({ worst }) => get(worst), look];
  $("correctness").hidden = !checks.length && !failed.length;
  put($("correctness-tables"),
    failed.length > 0 && h("div", { class: "card" }, h("h3", {}, "Wrong, and therefore without a time"), tableOf("plain", [["implementation", (row) => link(row.competitor, row)],
      ["case", (row) => row.where], ["pass", (row) => row.pass], ["what was wrong", (row) => row.reason]], failed, "Wrong results")),
    checks.length > 0 && h("div", { class: "card" }, tableOf("plain", [["implementation", ...of(({ row }) => row.competitor)], ["suite", ...of(({ row }) => row.suite)],
      ["precision", ...of(({ row }) => plain(row.case.dtype ?? ""))], ["tensors checked", ({ same }) => commas(same.length), "number"],
      ["result", ({ bad }) => agreement(!bad, bad ? `${commas(bad)} too far off` : "all agree")],
      ["worst", ...of(({ row, tensor }) => link(`${tensor}, N ${plain(row.n ?? "–")}`, row))], ["error", ...of(({ one }) => error(one.error), "number")],
      ["bound", ...of(({ one }) => error(one.bound), "number")], ["of it", ...of(({ part }) => meter(part), "number")]], lines, "Correctness")));
}
function meter(part) {
  const bar = (kind, width) => s("rect", { class: kind, width, height: 8 });
  return isNumber(part) && [s("svg", { class: "meter", viewBox: "0 0 60 8", "aria-hidden": "true" }, bar("meter-back", 60),
    bar(part > 1 ? "meter-bad" : "meter-fill", 60 * Math.min(1, part))), " ", percent(part)];
}
function drawEnvironment() {
  put($("facts"), DATA.runs.map((run) => h("details", { class: "card" }, h("summary", {}, `${run.device || "unknown device"} · ${run.time.slice(0, 16).replace("T", " ")} · ${run.id}`),
    facts(run.facts), run.command && [h("h3", {}, "To measure all of it again"), command(run.command)])));
}
function drawGlossary() {
  const titles = { status: "What became of a cell", flag: "How to read a number", verdict: "What a comparison says" };
  put($("glossary"), Object.entries(titles).map(([kind, title]) => h("div", { class: "card" }, h("h3", {}, title), h("dl", { class: "words" },
    Object.values(DATA.words[kind]).map(([severity, word, sentence]) => h("div", {}, h("dt", {}, badge(severity, word)), h("dd", {}, sentence)))))));
}
