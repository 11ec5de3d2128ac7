// Draws the page, and draws again when a control, the width or the theme changes.

const drawCharts = () => [drawSpeed, drawScaling, drawRoofline, drawKinds, drawMemory].forEach((draw) => draw());
function redraw() {
  const { id, name } = document.activeElement || {};
  hideTip();
  drawControls();
  drawCharts();
  drawTable();
  const again = (id && $(id)) || (name && document.querySelector(`input[name="${CSS.escape(name)}"]:checked`));
  if (again) again.focus({ preventScroll: true });
}
function openLinked() {
  const hash = location.hash.split("#row=")[1], row = [...LIVE, ...ROWS].find((one) => one.hash === hash);
  if (row && row !== openRow) openDrawer(row);
}
for (const draw of [drawResult, drawTiles, drawEnvironment, drawCorrectness, drawGlossary, drawFilters, setupCompare,
  redraw]) draw();
$("theme").addEventListener("click", () => {
  const themes = ["", "light", "dark"], { dataset } = document.documentElement;
  dataset.theme = themes[(themes.indexOf(dataset.theme || "") + 1) % 3];
  put("theme", `Theme: ${dataset.theme || "as the system"}`);
});
$("more").addEventListener("click", () => {
  shownRows = Infinity;
  drawTable();
  $("table").focus({ preventScroll: true });
});
addEventListener("hashchange", openLinked);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((box) => { box.open = true; }));
addEventListener("keydown", (event) => {
  const busy = event.ctrlKey || event.metaKey || event.altKey || drawer.open;
  if (event.key !== "/" || busy || event.target.closest("input, select")) return;
  event.preventDefault();
  $("filter-search").focus();
});
let width = innerWidth, timer = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(timer);
  timer = setTimeout(drawCharts, 120);
});
openLinked();
document.documentElement.dataset.ready = "yes";
} catch (problem) { // of the try that html.py opens before the first script
  const trouble = document.getElementById("trouble");
  trouble.hidden = false;
  trouble.textContent = `This report could not be drawn: ${problem.message}. report.md holds the same numbers.`;
  console.error(problem);
}
