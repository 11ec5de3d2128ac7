// Draws the page: the result, the sections of the suite, pass and cache that are chosen, and the table of all cells.

put("headline", DATA.title);
put("subject", DATA.subject);
put("notes", DATA.notes.map((note) => h("p", { class: "error" }, note)));
put("headlines", DATA.headlines.map(draw));

// ------------------------------------------------------------------------------------------- sections

const headings = DATA.headings.map(([id, title, lead]) =>
  h("section", { id }, h("h2", {}, title), h("p", { class: "lead" }, lead), h("div", { class: "grid" })));
put("sections", headings);
$("glossary").before($("cells"));
put("nav", [...document.querySelectorAll("main section")].map(({ id }) => h("a", { href: "#" + id }, id)));

const chosen = { suite: "", pass_: "", cache: "" }, names = Object.keys(chosen);
const matches = (section, some) => some.every((name) => !section[name] || section[name] === chosen[name]);
function drawSections() {
  put("controls", names.map((name, i) => { // what the choices before it leave; else the first of them
    const some = DATA.sections.filter((one) => one[name] && matches(one, names.slice(0, i)));
    const values = [...new Set(some.map((one) => one[name]))];
    if (!values.includes(chosen[name])) [chosen[name]] = values;
    return values.length > 1 && h("fieldset", { class: "segments" }, values.map((value) => h("label", {},
      h("input", { type: "radio", name, value, checked: value === chosen[name] }), h("span", {}, value))));
  }));
  for (const section of headings) {
    const some = DATA.sections.filter((one) => one.name === section.id && matches(one, names));
    section.hidden = !some.length;
    section.lastChild.replaceChildren(...some.flatMap((one) => one.blocks).map(draw));
  }
}
$("controls").addEventListener("change", ({ target: { name, value } }) => {
  chosen[name] = value;
  drawSections();
  document.querySelector(`input[name="${name}"]:checked`).focus({ preventScroll: true });
});
drawSections();

// --------------------------------------------------------------------------------------------- cells

const filter = { kind: "", words: [] }, order = { column: -1, down: false };
put("table", table(DATA.cells));
const body = $("table").querySelector("tbody"), headers = [...$("table").querySelectorAll("thead th")];
const lines = [...body.rows].map((tr, i) => {
  const row = DATA.rows[i];
  tr.classList.toggle("replaced", row.replaced);
  return { tr, row, entries: DATA.cells.lines[i], text: `${tr.textContent} ${row.find}`.toLowerCase() };
});
put("tiles", DATA.tiles.map(([kind, glyph, count, severity, word, title]) => button({
  class: "tile " + severity, title, "data-kind": kind,
  click() { filter.kind = filter.kind === kind ? "" : kind; drawTable(); },
}, glyph, h("strong", {}, count.toLocaleString("en-US")), h("span", { class: "word" }, word))));
headers.forEach((th, column) => th.replaceChildren(button({ class: "sort", click() {
  const again = order.column === column;
  Object.assign(order, again && order.down ? { column: -1, down: false } : { column, down: again });
  drawTable();
} }, th.textContent)));

const valueOf = (entry) => entry.sort ?? entry.text ?? [entry].flat().map((one) => one.text ?? one).join(" ");
function compare(one, two) { // what has no value comes last, either way
  const [a, b] = [one, two].map(({ entries }) => valueOf(entries[order.column]));
  if (a === "" || b === "") return (a === "") - (b === "");
  const by = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return order.down ? -by : by;
}
function drawTable() {
  for (const { tr, row, text } of lines) {
    tr.hidden = (filter.kind && row.kind !== filter.kind) || !filter.words.every((word) => text.includes(word));
  }
  body.append(...(order.column < 0 ? lines : lines.toSorted(compare)).map(({ tr }) => tr));
  const sorted = (i) => (order.column !== i ? "none" : order.down ? "descending" : "ascending");
  headers.forEach((th, i) => th.setAttribute("aria-sort", sorted(i)));
  for (const tile of $("tiles").children) tile.setAttribute("aria-pressed", String(tile.dataset.kind === filter.kind));
  put("shown", `${lines.filter(({ tr }) => !tr.hidden).length} of ${lines.length} cells.`,
    " Click a heading to sort, an implementation to see its samples.");
}
$("search").addEventListener("input", ({ target }) => {
  filter.words = target.value.toLowerCase().split(/\s+/).filter(Boolean);
  drawTable();
});
drawTable();

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((box) => { box.open = true; }));
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || drawer.open || event.target.closest("input")) return;
  event.preventDefault();
  $("search").focus();
});
if (location.hash.startsWith("#row=")) openLinked();
document.documentElement.dataset.ready = "yes";
} catch (problem) { // of the try that html.py opens before the first script
  const trouble = document.getElementById("trouble");
  trouble.hidden = false;
  trouble.textContent = `This report could not be drawn: ${problem.message}. report.md holds the same numbers.`;
  console.error(problem);
}
