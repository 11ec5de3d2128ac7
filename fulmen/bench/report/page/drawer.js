// What a link to a row shows: a tip under the pointer or the focus, and on a click the drawer with all samples.

const rowOf = (node) => {
  const link = node?.closest?.("a[href], a[*|href]"), to = link?.getAttribute("href") || link?.getAttribute("xlink:href");
  return to?.startsWith("#row=") && ROWS.get(to.slice(5));
};
function showTip({ target, clientX, clientY }) {
  const row = rowOf(target), tip = $("tip"), box = target.getBoundingClientRect?.();
  tip.hidden = !row;
  if (!row) return;
  put("tip", row.tip.map((line, i) => h(i ? "div" : "strong", {}, line)));
  const { width, height } = tip.getBoundingClientRect(), x = clientX ?? box.left, y = clientY ?? box.bottom;
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18) + "px";
}
fill(document, { pointermove: showTip, focusin: showTip, focusout: () => { $("tip").hidden = true; } });

// All samples in the order they were taken, and how often each time occurred. Places are per cent.
function strip({ samples, clocks, median, low, high }) {
  const least = Math.min(...samples), most = Math.max(...samples), range = most - least || least * 0.02;
  const x = (i) => `${2 + 76 * (i + 0.5) / samples.length}%`, y = (t) => 92 - 84 * (t - least) / range;
  const label = (t) => s("text", { x: "100%", y: `${y(t) + 2}%`, "text-anchor": "end" }, `${t.toPrecision(4)} ms`);
  const bins = [...Map.groupBy(samples, (t) => Math.min(19, Math.floor(20 * (t - least) / range)))];
  const tallest = Math.max(...bins.map(([, some]) => some.length));
  const clock = (i) => (clocks.length === samples.length ? `, ${Math.round(clocks[i])} MHz` : "");
  return s("svg", { class: "strip", role: "img", "aria-label": `${samples.length} samples` },
    low && s("rect", { class: "band", x: "2%", width: "76%", y: `${y(high)}%`, height: `${Math.max(0.5, y(low) - y(high))}%` }),
    s("line", { x1: "2%", x2: "78%", y1: `${y(median)}%`, y2: `${y(median)}%` }),
    samples.map((t, i) => s("circle", { class: "sample", cx: x(i), cy: `${y(t)}%`, r: 2.2 },
      s("title", {}, `sample ${i + 1}: ${t.toPrecision(4)} ms${clock(i)}`))),
    bins.map(([bin, some]) => s("rect", { class: "bin", x: "80%", width: `${9 * some.length / tallest}%`,
      y: `${92 - 4.2 * (bin + 1)}%`, height: "3.8%" })), label(least), most > least && label(most));
}

const drawer = $("drawer");
function openLinked() {
  const row = ROWS.get(location.hash.split("#row=")[1]);
  if (!row) return drawer.close();
  const [name, where, ...said] = row.tip;
  const quiet = (label, text, click) => button({ class: "quiet", "aria-label": label, click }, text);
  put("drawer", h("header", {},
    h("div", {}, h("p", { class: "eyebrow" }, row.eyebrow), h("h2", { id: "drawer-title" }, name), h("p", {}, where)),
    h("div", {}, quiet("Previous row", "←", () => step(-1)), quiet("Next row", "→", () => step(1)),
      quiet("Close", "✕", () => drawer.close()))),
  said.map((line, i) => h("p", { class: i ? "" : "big" }, line)),
  row.samples.length > 1 && h("figure", {}, strip(row), h("figcaption", { class: "legend" },
    "A dot is a sample, in the order taken; the line is the median, the band its 95 % interval; bars count samples.")),
  row.blocks.map(draw));
  if (!drawer.open) drawer.showModal(); // closing it gives the focus back
  $("tip").hidden = true;
  drawer.scrollTop = 0;
}
function step(by) {
  const links = [...document.querySelectorAll("#table tr:not([hidden]) a")].map((link) => link.hash);
  const at = links.indexOf(location.hash) + by;
  location.replace(links.at(at % links.length));
}
fill(drawer, {
  close: () => history.replaceState(null, "", location.pathname + location.search),
  click: (event) => event.target === drawer && drawer.close(),
  keydown: ({ key, target }) => {
    if (key in { ArrowLeft: 1, ArrowRight: 1 } && !target.closest("code, .scroll")) step(key === "ArrowLeft" ? -1 : 1);
  },
});
addEventListener("hashchange", openLinked);
