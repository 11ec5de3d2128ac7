// The table of all cells: sorted by any column, filtered by words and choices, a row opens the drawer.

const PAGE_ROWS = 200;
let shownRows = PAGE_ROWS;
const many = (of) => unique(ROWS.map(of)).length > 1;
const COLUMNS = [
  { id: "status", name: "Status", value: (row) => Object.keys(GLYPHS).indexOf(row.kind), show: statusBadge, text: (row) => row.status },
  { id: "suite", name: "Suite", value: (row) => row.suite, hide: () => !many((row) => row.suite) },
  { id: "competitor", name: "Implementation", value: (row) => row.competitor, key: true },
  { id: "case", name: "Case", value: (row) => row.label },
  { id: "n", name: "N", number: true, value: (row) => row.n, show: (row) => (isNumber(row.n) ? commas(row.n) : "") },
  { id: "pass", name: "Pass", value: (row) => row.pass },
  { id: "cache", name: "L2", value: (row) => row.cache, hide: () => !many((row) => row.cache) },
  { id: "run", name: "Run", value: (row) => row.run, hide: () => !many((row) => row.run) },
  { id: "median", name: "Median ms", number: true, value: (row) => row.median, show: (row) => digits(row.median) },
  { id: "spread", name: "± 95 %", number: true, value: spread, show: (row) => percent(spread(row), 1) },
  { id: "speedup", name: "Speedup", number: true, value: (row) => speedup(row)?.value,
    show: (row) => { const gain = speedup(row); return gain ? times(gain.value) + (gain.other ? " ≠" : "") : ""; } },
  { id: "efficiency", name: "Of floor", number: true, value: (row) => (row.timed ? row.efficiency : undefined), show: (row) => (row.timed ? percent(row.efficiency) : "") },
  { id: "tflops", name: "TFLOP/s", number: true, value: (row) => rate(row, "flops"), show: (row) => (row.timed && row.flops ? digits(rate(row, "flops") / 1e12, 3) : "") },
  { id: "gbs", name: "GB/s", number: true, value: (row) => rate(row, "bytes"), show: (row) => (row.timed && row.bytes ? digits(rate(row, "bytes") / 1e9, 3) : "") },
  { id: "peak", name: "Peak memory", number: true, value: peak, show: (row) => bytes(peak(row)) },
  { id: "worst", name: "Error / bound", number: true, value: (row) => row.worst, show: (row) => percent(row.worst) },
  { id: "flags", name: "Notes", value: (row) => row.flags.map(([flag]) => flag).join(" ") || undefined,
    show: (row) => (row.timed ? flagBadges(row) : h("span", { class: "soft", title: row.reason }, row.reason)), text: (row) => row.flags.map(([flag]) => flag).join(" ") },
];
const columns = () => COLUMNS.filter((column) => !column.hide || !column.hide());

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
  const rows = ROWS.filter((row) => (!f.kind || row.kind === f.kind) && (!f.suite || row.suite === f.suite) && (!f.competitor || row.competitor === f.competitor)
    && (!f.pass || row.pass === f.pass) && (!f.flag || row.flags.some(([flag]) => flag === f.flag)) && terms.every((term) => words(row).includes(term)));
  if (!state.sort) return rows;
  const { value } = COLUMNS.find((column) => column.id === state.sort.id), sign = state.sort.down ? -1 : 1;
  const keyed = rows.map((row) => [value(row), row]);
  const empty = (x) => x === undefined || x === null || x === "" || Number.isNaN(x);
  keyed.sort(([a, ra], [b, rb]) => {
    if (empty(a) || empty(b)) return Number(empty(a)) - Number(empty(b)) || ra.id - rb.id;
    return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true })) || ra.id - rb.id;
  });
  return keyed.map(([, row]) => row);
}
function setFilter(change) {
  Object.assign(state.filter, change);
  shownRows = PAGE_ROWS;
  drawFilters();
  drawTable();
}

function drawFilters() {
  const f = state.filter, pick = (key) => (value) => { setFilter({ [key]: value }); $("filter-" + key)?.focus(); };
  const option = (key, label, values, word = (x) => x) => values.length > 1
    && dropdown(label, "filter-" + key, [["", "all"], ...values.map((value) => [value, word(value)])], f[key] || "", pick(key));
  const search = $("filter-search") || h("input", { type: "search", id: "filter-search", placeholder: "words in any column", autocomplete: "off",
    input: () => { state.filter.search = search.value; shownRows = PAGE_ROWS; drawTable(); } });
  search.value = f.search || "";
  const found = $("filters");
  put(found, h("label", { class: "field grow", for: "filter-search" }, h("span", {}, "Search"), search),
    option("kind", "Status", DATA.counts.map(([kind]) => kind), (kind) => statusWord(kind)[1]), option("suite", "Suite", SUITES),
    option("competitor", "Implementation", unique(ROWS.map((row) => row.competitor))), option("pass", "Pass", unique(ROWS.map((row) => row.pass))),
    option("flag", "Flag", unique(ROWS.flatMap((row) => row.flags.map(([flag]) => flag))), (flag) => flagWord(flag)[1]),
    h("div", { class: "field" }, h("span", {}, " "), h("div", { class: "buttons" }, h("button", { type: "button", id: "clear", click: () => { state.filter = {}; state.sort = null; setFilter({}); } }, "Clear"),
      h("button", { type: "button", id: "csv", click: download }, "Save as CSV"))));
}

function drawTable() {
  const rows = tableRows(), cols = columns(), part = rows.slice(0, shownRows);
  put($("shown"), rows.length === ROWS.length ? `${plural(rows.length, "cell")}. Click a heading to sort, an implementation to see its samples.`
    : `${commas(rows.length)} of ${plural(ROWS.length, "cell")}.`, ` Speedup: against ${SUITES.map((suite) => baseline(suite)).filter((x, i, all) => all.indexOf(x) === i).join(", ")}.`);
  const head = h("tr", {}, cols.map((column) => {
    const sorted = state.sort && state.sort.id === column.id;
    return h("th", { scope: "col", class: (column.number ? "number" : "") + (column.key ? " key" : ""), "aria-sort": sorted ? (state.sort.down ? "descending" : "ascending") : "none" },
      h("button", { type: "button", class: "sort", "data-column": column.id, click: () => sortBy(column) }, column.name,
        h("span", { class: "arrow", "aria-hidden": "true" }, sorted ? (state.sort.down ? "▾" : "▴") : "")));
  }), h("th", { scope: "col" }, "Again"));
  const body = part.map((row) => h("tr", { "data-row": row.id, class: (row.timed ? "" : "none") + (row.replaced ? " replaced" : "") }, cols.map((column) => {
    const shown = column.show ? column.show(row) : column.value(row) ?? "";
    if (column.key) return h("th", { scope: "row", class: "key" }, h("button", { type: "button", class: "link", click: () => openDrawer(row) }, shown));
    return h("td", { class: column.number ? "number" : "c-" + column.id }, shown);
  }), h("td", {}, row.command ? copyButton(row.command, "Copy command") : "")));
  put($("table"), h("table", { class: "cells" }, h("thead", {}, head), h("tbody", {}, body)));
  const left = rows.length - part.length;
  $("more").hidden = left <= 0;
  put($("more"), `Show the other ${commas(left)}`);
}
function sortBy(column) {
  const same = state.sort && state.sort.id === column.id, first = Boolean(column.number && column.id !== "n" && column.id !== "median");
  state.sort = same && state.sort.down !== first ? null : { id: column.id, down: same ? !state.sort.down : first };
  drawTable();
  document.querySelector(`[data-column="${column.id}"]`).focus();
}

// Text that a spreadsheet would take for a formula gets an apostrophe before it.
function guarded(value) {
  if (typeof value === "number") return String(value);
  const text = String(value ?? ""), safe = /^\s*[=+\-@|%]|^[\t\r\n]/.test(text) ? "'" + text : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
function download() {
  const cols = columns(), lines = [[...cols.map((column) => column.id), "command"], ...tableRows().map((row) => [...cols.map((column) => (column.text || column.value)(row)), row.command])];
  const link = h("a", { download: "results.csv", href: URL.createObjectURL(new Blob([lines.map((line) => line.map(guarded).join(",")).join("\n") + "\n"], { type: "text/csv" })) });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
