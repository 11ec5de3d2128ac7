// The table of all cells: sorted by any column, filtered by words and selections, a row opens the drawer.

const PAGE_ROWS = 200;
let shownRows = PAGE_ROWS;
const many = (of) => unique(ROWS.map(of)).length > 1;
const flagNames = (row) => row.flags.map(([flag]) => flag).join(" ");
const COLUMNS = [
  { id: "status", name: "Status", value: (row) => Object.keys(GLYPHS).indexOf(row.kind), show: statusBadge, text: (row) => row.status },
  many((row) => row.suite) && { id: "suite", name: "Suite", value: (row) => row.suite },
  { id: "competitor", name: "Implementation", value: (row) => row.competitor, show: (row) => link(row.competitor, row), look: "key" },
  { id: "case", name: "Case", value: (row) => row.label },
  { id: "n", name: "N", look: "number", value: (row) => row.n, show: (row) => (isNumber(row.n) ? commas(row.n) : "") },
  { id: "pass", name: "Pass", value: (row) => row.pass },
  many((row) => row.cache) && { id: "cache", name: "L2", value: (row) => row.cache },
  many((row) => row.run) && { id: "run", name: "Run", value: (row) => row.run },
  { id: "median", name: "Median ms", look: "number", value: (row) => row.median, show: (row) => digits(row.median) },
  { id: "spread", name: "± 95 %", look: "number", value: spread, show: (row) => percent(spread(row), 1) },
  { id: "speedup", name: "Speedup", look: "number", value: (row) => speedup(row)?.value, show: (row) => times(speedup(row)?.value) + (speedup(row)?.other ? " ≠" : "") },
  { id: "efficiency", name: "Of floor", look: "number", value: (row) => (row.timed ? row.efficiency : undefined), show: (row) => (row.timed ? percent(row.efficiency) : "") },
  { id: "flops", name: DATA.flops_unit[1], look: "number", value: (row) => rate(row, "flops"), show: (row) => digits(rate(row, "flops") / DATA.flops_unit[0], 3) },
  { id: "bytes", name: "GB/s", look: "number", value: (row) => rate(row, "bytes"), show: (row) => digits(rate(row, "bytes") / 1e9, 3) },
  { id: "peak", name: "Peak memory", look: "number", value: peak, show: (row) => bytes(peak(row)) },
  { id: "worst", name: "Error / bound", look: "number", value: (row) => row.worst, show: (row) => percent(row.worst) },
  { id: "flags", name: "Notes", value: (row) => flagNames(row) || undefined, text: flagNames, look: "notes",
    show: (row) => (row.timed ? flagBadges(row) : h("span", { class: "soft", title: row.reason }, row.reason)) },
  { id: "command", name: "Again", value: (row) => row.command, show: (row) => row.command && copyButton(row.command, "Copy command") },
].filter(Boolean);

const haystack = new Map();
function words(row) {
  if (!haystack.has(row)) {
    haystack.set(row, [row.suite, row.competitor, row.label, row.n, `N${row.n}`, row.pass, row.cache, row.status, statusWord(row.kind)[1], row.reason, row.function,
      row.backend, row.hash, row.run, ...row.flags.flat(), ...row.flags.map(([flag]) => flagWord(flag)[1])].join(" ").toLowerCase());
  }
  return haystack.get(row);
}
function tableRows() {
  const f = state.filter, terms = (f.search || "").toLowerCase().split(/\s+/).filter(Boolean);
  const rows = ROWS.filter((row) => ["kind", "suite", "competitor", "pass"].every((name) => !f[name] || row[name] === f[name])
    && (!f.flag || row.flags.some(([flag]) => flag === f.flag)) && terms.every((term) => words(row).includes(term)));
  if (!state.sort) return rows;
  const { value } = COLUMNS.find((column) => column.id === state.sort.id), sign = state.sort.down ? -1 : 1;
  const empty = (x) => x === undefined || x === null || x === "" || Number.isNaN(x);
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  return rows.map((row) => [value(row), row]).sort(([a, one], [b, two]) => // what has no value comes last, either way
    (empty(a) || empty(b) ? Number(empty(a)) - Number(empty(b)) : sign * order(a, b)) || one.id - two.id).map(([, row]) => row);
}
function setFilter(change) {
  Object.assign(state.filter, change);
  shownRows = PAGE_ROWS;
  drawFilters();
  drawTable();
}

function drawTiles() {
  put($("proportions"), DATA.counts.map(([kind, n]) => {
    const bar = h("span", { class: "k-" + kind });
    bar.style.flexGrow = n;
    return bar;
  }));
  put($("tiles"), DATA.counts.map(([kind, n]) => h("button", { type: "button", class: "tile k-" + kind, title: statusWord(kind)[2], "data-kind": kind,
    click: () => { setFilter({ kind }); $("table").focus({ preventScroll: true }); } }, glyph(kind), h("span", { class: "count" }, commas(n)), h("span", { class: "word" }, statusWord(kind)[1]))));
}
function drawFilters() {
  const f = state.filter, button = (id, text, click) => h("button", { type: "button", id, click }, text);
  const option = (name, label, values, word = (x) => x) => values.length > 1 && dropdown(label, "filter-" + name, [["", "all"], ...values.map((value) => [value, word(value)])],
    f[name] || "", (value) => { setFilter({ [name]: value }); $("filter-" + name)?.focus(); });
  const search = $("filter-search") || h("input", { type: "search", id: "filter-search", placeholder: "words in any column", autocomplete: "off",
    input: () => { state.filter.search = search.value; shownRows = PAGE_ROWS; drawTable(); } });
  search.value = f.search || "";
  put($("filters"), h("label", { class: "field grow", for: "filter-search" }, h("span", {}, "Search"), search),
    option("kind", "Status", DATA.counts.map(([kind]) => kind), (kind) => statusWord(kind)[1]), option("suite", "Suite", SUITES),
    option("competitor", "Implementation", unique(ROWS.map((row) => row.competitor))), option("pass", "Pass", unique(ROWS.map((row) => row.pass))),
    option("flag", "Flag", unique(ROWS.flatMap((row) => row.flags.map(([flag]) => flag))), (flag) => flagWord(flag)[1]),
    h("div", { class: "field" }, h("span", {}, " "), h("div", { class: "buttons" },
      button("clear", "Clear", () => { state.filter = {}; state.sort = null; setFilter({}); }), button("csv", "Save as CSV", download))));
}

function drawTable() {
  const rows = tableRows(), part = rows.slice(0, shownRows), left = rows.length - part.length;
  put($("shown"), rows.length === ROWS.length ? `${plural(rows.length, "cell")}. Click a heading to sort, an implementation to see its samples.`
    : `${commas(rows.length)} of ${plural(ROWS.length, "cell")}.`, ` Speedup: against ${unique(SUITES.map(baseline)).join(", ")}.`);
  const heading = ({ id, name }) => h("button", { type: "button", class: "sort", "data-column": id, click: () => sortBy(id) }, name,
    h("span", { class: "arrow", "aria-hidden": "true" }, state.sort?.id === id ? (state.sort.down ? "▾" : "▴") : ""));
  const table = tableOf("cells", COLUMNS.map((column) => [heading(column), column.show || ((row) => column.value(row) ?? ""), column.look || "c-" + column.id]), part, "All cells");
  [...table.querySelectorAll("thead th")].forEach((th, i) => th.setAttribute("aria-sort", state.sort?.id === COLUMNS[i].id ? (state.sort.down ? "descending" : "ascending") : "none"));
  [...table.querySelectorAll("tbody tr")].forEach((tr, i) => { tr.className = (part[i].timed ? "" : "none") + (part[i].replaced ? " replaced" : ""); });
  put($("table"), table.firstChild);
  $("more").hidden = left <= 0;
  put($("more"), `Show the other ${commas(left)}`);
}
function sortBy(id) {
  const { look } = COLUMNS.find((column) => column.id === id), same = state.sort && state.sort.id === id, first = look === "number" && id !== "n" && id !== "median";
  state.sort = same && state.sort.down !== first ? null : { id, down: same ? !state.sort.down : first };
  drawTable();
  document.querySelector(`[data-column="${id}"]`).focus();
}

// Text that a spreadsheet would take for a formula gets an apostrophe before it.
function guarded(value) {
  if (typeof value === "number") return String(value);
  const text = String(value ?? ""), safe = /^\s*[=+\-@|%]|^[\t\r\n]/.test(text) ? "'" + text : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
function download() {
  const lines = [COLUMNS.map((column) => column.id), ...tableRows().map((row) => COLUMNS.map((column) => (column.text || column.value)(row)))];
  const file = new Blob([lines.map((line) => line.map(guarded).join(",")).join("\n") + "\n"], { type: "text/csv" });
  const anchor = h("a", { download: "results.csv", href: URL.createObjectURL(file) });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
}
