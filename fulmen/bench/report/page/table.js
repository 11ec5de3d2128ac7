// The table of all cells: sorted by any column, filtered by words and selections, a row opens the drawer.

const PAGE_ROWS = 200;
let shownRows = PAGE_ROWS;
const flagNames = (row) => row.flags.map(([flag]) => flag).join(" ");
const field = (id, name, look, show) =>
  ({ id, name, look, value: (row) => row[id], show: show && ((row) => show(row[id])) });
const COLUMNS = [
  { id: "status", name: "Status", value: (row) => Object.keys(GLYPHS).indexOf(row.kind), show: statusBadge,
    text: (row) => row.status },
  field("suite", "Suite"),
  { ...field("competitor", "Implementation", "key"), show: (row) => link(row.competitor, row) },
  field("label", "Case"),
  field("n", "N", "number", plain),
  field("pass", "Pass"),
  field("cache", "L2"),
  field("run", "Run"),
  field("median", "Median ms", "number", digits),
  field("spread", "± 95 %", "number", (x) => percent(x, 1)),
  { id: "speedup", name: "Speedup", look: "number", value: (row) => speedup(row)?.value,
    show: (row) => times(speedup(row)?.value) + (speedup(row)?.other ? " ≠" : "") },
  field("efficiency", "Of floor", "number", percent),
  field("flops_rate", DATA.flops_unit[1], "number", (x) => digits(x / DATA.flops_unit[0], 3)),
  field("bytes_rate", "GB/s", "number", (x) => digits(x / 1e9, 3)),
  { id: "peak", name: "Peak memory", look: "number", value: (row) => sizeOf(row), show: (row) => bytes(sizeOf(row)) },
  field("worst", "Error / bound", "number", percent),
  { id: "flags", name: "Notes", look: "notes", value: (row) => flagNames(row),
    show: (row) => (row.timed ? flagBadges(row) : h("span", { class: "soft", title: row.reason }, row.reason)) },
  field("command", "Again", "again", (text) => text && copyButton(text, "Copy command")),
].filter(({ id }) => !["suite", "cache", "run"].includes(id) || unique(ROWS.map((row) => row[id])).length > 1);

const TEXTS = ROWS.map((row) => [row.suite, row.competitor, row.where, row.n, `N${row.n}`, row.pass, row.cache, row.status,
  wordOf("status", row.kind)[1], row.reason, row.function, row.backend, row.hash, row.run, ...row.flags.flat(),
  ...row.flags.map(([flag]) => wordOf("flag", flag)[1])].join(" ").toLowerCase());
function tableRows() {
  const f = state.filter, terms = (f.search || "").toLowerCase().split(/\s+/).filter(Boolean);
  const exact = ["kind", "suite", "competitor", "pass"];
  const rows = ROWS.filter((row) => exact.every((name) => !f[name] || row[name] === f[name])
    && (!f.flag || row.flags.some(([flag]) => flag === f.flag)) && terms.every((term) => TEXTS[row.id].includes(term)));
  if (!state.sort) return rows;
  const { value } = COLUMNS.find((column) => column.id === state.sort.id), sign = state.sort.down ? -1 : 1;
  const empty = (x) => Number((x ?? "") === "");
  const order = (a, b) => (isNumber(a) && isNumber(b) ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true }));
  return rows.map((row) => [value(row), row]).sort(([a, one], [b, two]) => // what has no value comes last, either way
    empty(a) - empty(b) || (!empty(a) && sign * order(a, b)) || one.id - two.id).map(([, row]) => row);
}
function setFilter(change) {
  Object.assign(state.filter, change);
  shownRows = PAGE_ROWS;
  drawFilters();
  drawTable();
}

function drawTiles() {
  put("tiles", DATA.counts.map(([kind, n]) => tile(own(GLYPHS, kind), n, wordOf("status", kind), { "data-kind": kind,
    click: () => { setFilter({ kind }); $("table").focus({ preventScroll: true }); } })));
}
function drawFilters() {
  const f = state.filter, shown = (value, word) => [value, word ? wordOf(word, value)[1] : value];
  const option = (name, label, values, word) => values.length > 1 && dropdown(label, "filter-" + name,
    [["", "all"], ...values.map((value) => shown(value, word))], f[name] || "", (value) => setFilter({ [name]: value }));
  const search = $("filter-search") || h("input", {
    type: "search", id: "filter-search", placeholder: "words in any column", autocomplete: "off",
    input: () => { f.search = search.value; shownRows = PAGE_ROWS; drawTable(); } });
  search.value = f.search || "";
  put("filters", h("label", { class: "field grow", for: "filter-search" }, h("span", {}, "Search"), search),
    option("kind", "Status", DATA.counts.map(([kind]) => kind), "status"), option("suite", "Suite", SUITES),
    option("competitor", "Implementation", unique(ROWS.map((row) => row.competitor))),
    option("pass", "Pass", unique(ROWS.map((row) => row.pass))),
    option("flag", "Flag", unique(ROWS.flatMap((row) => row.flags.map(([flag]) => flag))), "flag"),
    button({ id: "clear", click: clear }, "Clear"), button({ id: "csv", click: download }, "Save as CSV"));
}
function clear() {
  for (const name of Object.keys(state.filter)) delete state.filter[name];
  state.sort = null;
  setFilter({});
}

function drawTable() {
  const rows = tableRows(), part = rows.slice(0, shownRows), left = rows.length - part.length;
  const all = ". Click a heading to sort, an implementation to see its samples.";
  put("shown", rows.length < ROWS.length && `${commas(rows.length)} of `, plural(ROWS.length, "cell"),
    rows.length < ROWS.length ? "." : all, ` Speedup: against ${unique(SUITES.map(baseline)).join(", ")}.`);
  const arrow = ({ id }) => (state.sort?.id !== id ? "" : state.sort.down ? "▾" : "▴");
  const heading = (column) => button({ class: "sort", "data-column": column.id, click: () => sortBy(column) },
    column.name, h("span", { class: "arrow" }, arrow(column)));
  const table = tableOf("cells", COLUMNS.map((column) => [heading(column), column.show || column.value, column.look]),
    part, "All cells").firstChild;
  const sorted = { "▾": "descending", "▴": "ascending" };
  [...table.tHead.rows[0].cells].forEach((th, i) => fill(th, { "aria-sort": sorted[arrow(COLUMNS[i])] || "none" }));
  [...table.tBodies[0].rows].forEach((tr, i) => fill(tr,
    { class: `${part[i].timed ? "" : "none"} ${part[i].replaced ? "replaced" : ""}` }));
  put("table", table);
  $("more").hidden = left <= 0;
  put("more", `Show the other ${commas(left)}`);
}
function sortBy({ id, look }) {
  const same = state.sort?.id === id, first = look === "number" && id !== "n" && id !== "median";
  state.sort = same && state.sort.down !== first ? null : { id, down: same ? !state.sort.down : first };
  drawTable();
  document.querySelector(`[data-column="${id}"]`).focus();
}

// Text that a spreadsheet would take for a formula gets an apostrophe before it.
function guarded(value) {
  const text = String(value ?? ""), formula = typeof value !== "number" && /^\s*[=+\-@|%]|^[\t\r\n]/.test(text);
  const safe = formula ? "'" + text : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
function download() {
  const lines = [COLUMNS.map((column) => column.id),
    ...tableRows().map((row) => COLUMNS.map((column) => (column.text || column.value)(row)))];
  const file = new Blob([lines.map((line) => line.map(guarded).join(",") + "\n").join("")], { type: "text/csv" });
  const anchor = h("a", { download: "results.csv", href: URL.createObjectURL(file) });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
}
