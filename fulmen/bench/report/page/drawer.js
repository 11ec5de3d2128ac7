// What a link to a row shows: a tip under the pointer or the focus, and on a click the drawer with all samples.

function showTip({ target, clientX, clientY }) {
  const link = target.closest?.("a"), to = link?.getAttribute("href") ?? link?.getAttribute("xlink:href");
  const row = ROWS.get(to?.split("#row=")[1]), tip = $("tip");
  tip.hidden = !row;
  if (!row) return;
  put("tip", row.tip.map((line, i) => h(i ? "div" : "strong", {}, line)));
  const box = link.getBoundingClientRect(), { width, height } = tip.getBoundingClientRect();
  const x = clientX ?? box.left, y = clientY ?? box.bottom;
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18) + "px";
}
const hideTip = () => { $("tip").hidden = true; };
fill(document, { pointermove: showTip, focusin: showTip, focusout: hideTip });

// All samples in the order they were taken, the median and its interval. Places are per cent.
function strip({ samples, clocks, median, low, high }) {
  const least = Math.min(...samples), most = Math.max(...samples), range = most - least || 1;
  const x = (i) => `${1 + 84 * (i + 0.5) / samples.length}%`, y = (t) => 92 - 84 * (t - least) / range;
  const label = (t) => s("text", { x: "100%", y: `${y(t) + 2}%`, "text-anchor": "end" }, `${t.toPrecision(4)} ms`);
  const clock = (i) => (clocks.length === samples.length ? `, ${Math.round(clocks[i])} MHz` : "");
  return s("svg", { class: "strip s0", role: "img", "aria-label": `${samples.length} samples` },
    low && s("rect", { x: "1%", width: "84%", y: `${y(high)}%`, height: `${Math.max(0.5, y(low) - y(high))}%` }),
    s("line", { x1: "1%", x2: "85%", y1: `${y(median)}%`, y2: `${y(median)}%` }),
    samples.map((t, i) => s("circle", { cx: x(i), cy: `${y(t)}%`, r: 2 },
      s("title", {}, `sample ${i + 1}: ${t.toPrecision(4)} ms${clock(i)}`))), label(least), label(most));
}

const drawer = $("drawer");
function openLinked() {
  const row = ROWS.get(location.hash.split("#row=")[1]);
  if (!row) return drawer.close();
  const [name, where, time, ...more] = row.tip;
  const quiet = (label, text, click) => button({ class: "quiet", "aria-label": label, click }, text);
  put("drawer", h("header", {},
    h("div", {}, h("p", { class: "eyebrow" }, row.eyebrow), h("h2", { id: "drawer-title" }, name), h("p", {}, where)),
    h("div", {}, quiet("Previous row", "←", () => step(-1)), quiet("Next row", "→", () => step(1)),
      quiet("Close", "✕", () => drawer.close()))),
  h("p", { class: "big" }, time), more.map((line) => h("p", {}, line)),
  row.samples.length > 1 && [strip(row), h("p", { class: "legend" },
    "A dot is a sample, in the order taken. The line is the median, the band its interval.")], row.blocks.map(draw));
  if (!drawer.open) drawer.showModal(); // closing it gives the focus back
  hideTip();
  drawer.scrollTop = 0;
}
function step(by) {
  const links = [...document.querySelectorAll("#table tr:not([hidden]) a")].map((link) => link.hash);
  location.replace(links.at((links.indexOf(location.hash) + by) % links.length));
}
fill(drawer, {
  close: () => history.replaceState(null, "", location.pathname + location.search),
  click: (event) => event.target === drawer && drawer.close(),
  keydown({ key, target }) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (by && !target.closest("code, .scroll")) step(by);
  },
});
addEventListener("hashchange", openLinked);
