// What is behind a number: the drawer of one row, the correctness table, the environment, and what the words mean.

const drawer = $("drawer");
let openRow = null;

function openDrawer(row) {
  if (!drawer.open) drawer.showModal(); // closing it gives the focus back
  openRow = row;
  hideTip();
  const quiet = (label, text, click) => button({ class: "quiet", "aria-label": label, click }, text);
  put("drawer", h("div", { class: "drawer-head" },
    h("div", {}, h("p", { class: "eyebrow" }, `${row.suite} · ${row.pass} · ${row.cache} cache`),
      h("h2", { id: "drawer-title" }, row.competitor), h("p", { class: "soft" }, row.where)),
    h("div", { class: "drawer-buttons" }, quiet("Previous row", "←", () => stepDrawer(-1)),
      quiet("Next row", "→", () => stepDrawer(1)), quiet("Close", "✕", () => drawer.close()))),
  h("p", {}, statusBadge(row), " ", row.timed && flagBadges(row)),
  h("p", { class: row.timed ? "soft" : "reason" }, (!row.timed && row.reason) || wordOf("status", row.kind)[2]));
  if (row.timed) drawerTimes(row);
  for (const [title, ...content] of drawerParts(row)) fill(drawer, {}, h("h3", {}, title), content);
  history.replaceState(null, "", "#row=" + row.hash);
  drawer.scrollTop = 0;
}

function drawerTimes(row) {
  const { stats, samples } = row, box = h("figure", {});
  fill(drawer, {}, h("div", { class: "big" }, h("strong", {}, ms(row.median)),
    h("span", { class: "soft" }, interval(row))), box);
  if (samples.length > 1) {
    fill(box, {}, strip(Math.max(260, box.clientWidth), row), h("figcaption", { class: "legend" },
      h("span", {}, h("span", { class: "dot" }), " one sample"),
      h("span", {}, h("span", { class: "dash" }), " median and its interval")));
  }
  const inner = stats.p20 && `${digits(stats.p20)} to ${ms(stats.p80)}`;
  fill(drawer, {}, facts([["samples", stats.n || samples.length], ["20 % to 80 %", inner],
    ["fastest", ms(stats.min)], ["typical deviation", percent(stats.mad / row.median, 2)], ["outliers", stats.outliers],
    ["stopped by", stats.stop], ["device alone", ms(row.device_ms)], ["kernels alone", ms(row.kernels_ms)],
    ["call, with the host", ms(row.host_ms)], ["host until it returns", ms(stats.enqueue)],
    ["power, W", digits(stats.power_w, 3)], ["temperature, °C", stats.temperature_c],
    ["arithmetic", flops(row.flops_rate)], ["memory traffic", traffic(row.bytes_rate)],
    ["against the baseline", speedupWords(row)]]));
}

// [title, content ...] of each part that the row has.
function drawerParts(row) {
  const share = row.timed && isNumber(row.efficiency) && `This is ${percent(row.efficiency)} of what is possible.`;
  const { arithmetic } = row.audit, audit = arithmetic || row.flags.length || isNumber(row.floor_ms);
  const flag = ([name, why]) => h("li", {}, badge(wordOf("flag", name)), " ", wordOf("flag", name)[2],
    why !== arithmetic && h("span", { class: "soft" }, " ", why));
  const checks = Object.entries(row.correctness).sort(([, a], [, b]) => (a.ok !== false) - (b.ok !== false));
  const memory = unique([...Object.keys(PARTS), ...Object.keys(row.memory)]).filter((part) => row.memory[part]);
  const resource = (one, name) => (name === "occupancy" && one[name] <= 1 ? percent(one[name]) : plain(own(one, name)));
  const kernels = unique(row.resources.flatMap(Object.keys)).map((name, i) =>
    [name, (one) => resource(one, name), i ? "number" : undefined]);
  return [
    audit && ["Audit against the hardware", h("p", {}, arithmetic),
      h("p", { class: "soft" }, isNumber(row.floor_ms) && `The floor is ${ms(row.floor_ms)}. `, share),
      h("ul", { class: "flags" }, row.flags.map(flag))],
    checks.length && ["Correctness against fp64", tableOf("plain", [["tensor"],
      ["", ([, one]) => agreement(one.ok !== false, one.ok === false ? "too far off" : "agrees")],
      ["error", ([, one]) => error(one.error), "number"], ["bound", ([, one]) => error(one.bound), "number"],
      ["of it", ([, one]) => one.bound && percent(one.error / one.bound), "number"],
      ["largest", ([, one]) => error(one.max_abs), "number"]], checks, "Correctness")],
    memory.length && ["Memory", tableOf("plain", [["part", (part) => own(PARTS, part) || part],
      ["bytes", (part) => bytes(sizeOf(row, part)), "number"],
      ["floor", (part) => bytes(sizeOf(row, part, "floor")), "number"]], memory, "Memory")],
    kernels.length && ["Kernels, from the compiled binary", tableOf("plain", kernels, row.resources, "Kernels")],
    row.kernels.length && ["What the device ran",
      h("ol", {}, row.kernels.map((name) => h("li", {}, h("code", {}, name))))],
    row.command && ["To measure this cell again", command(row.command)],
    ["What was measured", facts([["computes", row.function], ["operation", row.op], ["backend", row.backend],
      ["version", row.version], ["seed", row.seed],
      ...Object.entries(row.case).map(([name, value]) => [name, plain(value)]),
      ["device", RUNS.get(row.run).device], ["run", row.run], ["configuration", row.hash]])],
  ].filter(Boolean);
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
});

// ------------------------------------------------------------------- correctness, environment, words

function drawCorrectness() {
  const failed = ROWS.filter((row) => row.status === "failed");
  const share = ({ share: x }) => h("span", { class: x > 1 && "status bad" }, percent(x));
  $("correctness").hidden = !DATA.correctness.length && !failed.length;
  put("correctness-tables", failed.length > 0 && card("Wrong, and therefore without a time", tableOf("plain", [
    ["implementation", (row) => link(row.competitor, row)], ["case", (row) => row.where], ["pass", (row) => row.pass],
    ["what was wrong", (row) => row.reason]], failed, "Wrong results")),
  DATA.correctness.length > 0 && card(null, tableOf("plain", [["implementation", (one) => one.competitor],
    ["suite", (one) => one.suite], ["precision", (one) => one.dtype],
    ["tensors checked", (one) => commas(one.tensors), "number"],
    ["result", ({ wrong }) => agreement(!wrong, wrong ? `${commas(wrong)} too far off` : "all agree")],
    ["worst", (one) => link(`${one.tensor}, N ${plain(ROWS[one.row].n ?? "–")}`, ROWS[one.row])],
    ["error", (one) => error(one.error), "number"], ["bound", (one) => error(one.bound), "number"],
    ["of it", share, "number"]], DATA.correctness, "Correctness")));
}
function drawEnvironment() {
  put("facts", DATA.runs.map((run) => h("details", { class: "card" },
    h("summary", {}, `${run.device || "unknown device"} · ${dated(run.time, 16)} · ${run.id}`),
    facts(run.facts), run.command && [h("h3", {}, "To measure all of it again"), command(run.command)])));
}
function drawGlossary() {
  const titles = { status: "What became of a cell", flag: "How to read a number", verdict: "What a comparison says" };
  put("glossary", Object.entries(titles).map(([kind, title]) => card(title, h("dl", {},
    Object.values(WORDS[kind]).map((word) => h("div", {}, h("dt", {}, badge(word)), h("dd", {}, word[2])))))));
}
