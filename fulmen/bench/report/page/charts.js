// Charts as inline SVG, drawn to the width they have. A chart is one stop of the tab key: the arrows walk its points.

function logTicks(lo, hi, most = 7) {
  const powers = Array.from({ length: Math.ceil(Math.log10(hi)) - Math.floor(Math.log10(lo)) + 1 },
    (_, i) => 10 ** (i + Math.floor(Math.log10(lo))));
  const inside = (ticks) => ticks.filter((t) => t >= lo * 0.999 && t <= hi * 1.001);
  const all = inside(powers.flatMap((p) => [p, 2 * p, 5 * p])), decades = inside(powers);
  return all.length <= most ? all : decades.filter((_, i) => i % Math.ceil(decades.length / most) === 0);
}
function linearTicks(lo, hi, most = 5) {
  const raw = (hi - lo) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((x) => x >= raw), first = Math.ceil(lo / step);
  return Array.from({ length: Math.max(0, Math.floor(hi / step + 1e-9) - first + 1) }, (_, i) => (first + i) * step);
}
const scale = (log, lo, hi, from, to) => (log
  ? (v) => from + (to - from) * Math.log(v / lo) / Math.log(hi / lo)
  : (v) => from + (to - from) * (v - lo) / (hi - lo || 1));
const extent = (values, pad) => [Math.min(...values) / pad, Math.max(...values) * pad];
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
const canvas = (width, height, label) => s("svg",
  { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", tabindex: "0",
  "aria-roledescription": "chart", "aria-label": label });

// Axes, grid and a clipped layer: `draw(class, points)` draws a line on it, `write` text anywhere.
let planes = 0;
function plane({ width, height, x, y, xTicks, yTicks, xLabel, yLabel, label, log = true, xText,
  yText = (t) => digits(t, 1), side = 16 }) {
  const left = 58, top = 26, bottom = height - 42, right = width - side, id = "clip" + (planes += 1);
  const svg = canvas(width, height, label);
  const X = scale(log, ...x, left, right), Y = scale(log, ...y, bottom, top);
  const layer = s("g", { "clip-path": `url(#${id})` });
  const write = (px, py, text, anchor) => svg.append(s("text", { x: px, y: py, "text-anchor": anchor }, text));
  const draw = (kind, points, style = "") => layer.append(s("path",
    { class: kind, style, d: path(points.map(([a, b]) => [X(a), Y(b)])) }));
  svg.append(s("clipPath", { id }, s("rect", { x: left, y: top, width: right - left, height: bottom - top })));
  for (const t of yTicks) {
    draw("grid-line", [[x[0], t], [x[1], t]]);
    write(left - 8, Y(t) + 4, yText(t), "end");
  }
  let last = -Infinity;
  for (const t of xTicks) {
    const at = X(t), half = 3.4 * xText(t).length;
    svg.append(s("path", { class: "axis", d: `M${at.toFixed(1)},${bottom}v4` }));
    if (at - half < last + 6) continue;
    last = at + half;
    write(at, bottom + 18, xText(t), "middle");
  }
  svg.append(s("path", { class: "axis", d: `M${left},${bottom}H${right}` }), layer);
  write(right, height - 6, xLabel, "end");
  write(4, 13, yLabel);
  return { svg, layer, X, Y, left, top, right, bottom, width, write, draw };
}

// Points answer to the pointer (the nearest one) and to the arrow keys; Enter opens the row.
function interactive({ svg, width }, points, find) {
  const halo = s("circle", { class: "halo", r: 9, visibility: "hidden" });
  const ordered = [...points].sort((a, b) => a.order - b.order || a.px - b.px);
  svg.append(halo);
  let at = -1;
  const leave = () => { halo.setAttribute("visibility", "hidden"); hideTip(); at = -1; };
  const show = () => {
    if (!ordered[at]) return leave();
    const { px, py, lines } = ordered[at], box = svg.getBoundingClientRect(), k = box.width / width;
    fill(halo, { cx: px, cy: py, visibility: "visible" });
    return showTip(box.left + px * k, box.top + py * k, lines());
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), k = width / box.width, x = (event.clientX - box.left) * k;
    const y = (event.clientY - box.top) * k;
    if (find) return find(y);
    const far = ordered.map((p) => (p.px - x) ** 2 + (p.py - y) ** 2), best = far.indexOf(Math.min(...far));
    return far[best] < 26 ** 2 ? best : -1;
  };
  const open = () => { const row = ordered[at]?.row; if (row) { leave(); openDrawer(row); } };
  return fill(svg, {
    pointermove(event) { at = nearest(event); show(); },
    pointerleave: leave,
    blur: leave,
    click(event) { at = nearest(event); open(); },
    keydown(event) {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) { at = (at + step + ordered.length) % ordered.length; show(); }
      else if (event.key === "Enter") open();
      else if (event.key === "Escape") leave();
      else return;
      event.preventDefault();
    },
  });
}

// Curves over N. series: [{index, points: [{n, y, row, lo, hi, hollow}], fit}]; floors: [[[n, y], ...], ...].
function curves({ width, height, series, floors = [], yLabel, label, guides = true, lines }) {
  const all = series.flatMap((one) => one.points), ns = ascending(unique(all.map((p) => p.n)));
  const x = extent(ns, 1.12), y = extent([...all.map((p) => p.y), ...floors.flat().map((p) => p[1])], 1.4);
  const chart = plane({ width, height, x, y, xTicks: ns, yTicks: logTicks(...y), xLabel: "N, tokens", yLabel, label,
    xText: short });
  const { draw, X, Y } = chart, points = [];
  for (const [power, name] of guides ? [[1, "n"], [2, "n²"]] : []) {
    const end = Math.min(x[1], x[0] * (y[1] / y[0]) ** (1 / power)), tall = y[0] * (end / x[0]) ** power;
    draw("guide", [[x[0], y[0]], [end, tall]]);
    chart.write(Math.min(X(end) - 6, chart.right - 8), Math.max(Y(tall), chart.top) + 12, name, "end");
  }
  for (const floor of floors) draw("floor", floor);
  series.forEach(({ index, fit, points: some }, order) => {
    const colour = tint(index), sorted = [...some].sort((a, b) => a.n - b.n);
    if (fit?.time) {
      const used = sorted.filter((p) => fit.used.includes(p.n)), mx = mean(used.map((p) => Math.log(p.n)));
      const my = mean(used.map((p) => Math.log(p.y)));
      draw("fit", [used[0].n, used.at(-1).n].map((n) => [n, Math.exp(my + fit.time[0] * (Math.log(n) - mx))]), colour);
    }
    draw("line", sorted.map((p) => [p.n, p.y]), colour);
    sorted.forEach((p, i) => {
      if (isNumber(p.lo)) draw("line thin", [[p.n, p.lo], [p.n, p.hi]], colour);
      chart.svg.append(mark(index, X(p.n), Y(p.y), p.hollow && "hollow"));
      points.push({ px: X(p.n), py: Y(p.y), order, row: p.row, lines: () => lines(p, sorted[i - 1]) });
    });
  });
  return interactive(chart, points);
}

// roofs: [{name, flops, bytes}], the hard one first; points: [{x, y, row, index, over, hollow, lines}].
function roofline({ width, height, roofs, points, label }) {
  const [unit, yLabel] = DATA.flops_unit, tops = [...roofs.map((roof) => roof.flops), ...points.map((p) => p.y)];
  const x = extent([...points.map((p) => p.x), ...roofs.map((roof) => roof.flops / roof.bytes)], 2.2);
  const y = extent(tops, 1.8);
  const chart = plane({ width, height, x, y, xTicks: logTicks(...x, 9), yTicks: logTicks(...y), label,
    xLabel: "FLOP per byte, at the floor",
    yLabel, xText: (t) => digits(t, 1), yText: (t) => digits(t / unit, 1) });
  roofs.forEach((roof, i) => {
    chart.draw("roof " + roof.name, [[x[0], x[0] * roof.bytes], [roof.flops / roof.bytes, roof.flops],
      [x[1], roof.flops]]);
    const said = width < 560 ? roof.name : `${roof.name} ${flops(roof.flops)} · ${traffic(roof.bytes)}`;
    chart.write(chart.right, chart.Y(roof.flops) + (i ? 14 : -6), said, "end");
  });
  return interactive(chart, points.map((p, i) => {
    const px = chart.X(p.x), py = chart.Y(p.y);
    chart.svg.append(mark(p.index, px, py, `${p.hollow ? "hollow" : ""} ${p.over ? "over" : ""}`));
    return { px, py, order: p.index * 1e4 + i, row: p.row, lines: p.lines };
  }));
}

// Horizontal bars. lines: [{name, value, parts: [[class, from, to, height]], ticks: [at], end, row, lines}].
function bars({ width, lines, label, log, range, numbers = 84 }) {
  const narrow = width < 480, names = narrow ? 0 : Math.min(190, width * 0.42), line = narrow ? 46 : 34;
  const above = narrow ? 18 : 0, tall = line - above;
  const svg = canvas(width, 16 + line * lines.length, label), X = scale(log, ...range, names, width - numbers);
  const fits = Math.floor((narrow ? width : names) / 7.2);
  const points = lines.map((bar, i) => {
    const y = 8 + i * line + above, middle = y + tall / 2;
    const name = bar.name.length > fits ? bar.name.slice(0, fits - 1) + "…" : bar.name;
    const at = narrow ? { x: 0, y } : { x: names - 10, y: middle + 4, "text-anchor": "end" };
    svg.append(s("text", { class: "ink", ...at }, name),
      s("text", { class: "ink", x: X(bar.end) + 8, y: middle + 4 }, bar.value));
    for (const [kind, from, to, high = tall - 14] of bar.parts) {
      if (X(to) - X(from) > 0.3) svg.append(s("rect",
        { class: kind, x: X(from), y: middle - high / 2, width: X(to) - X(from), height: high }));
    }
    for (const tick of bar.ticks) svg.append(s("path",
      { class: "floor-tick", d: `M${X(tick)},${y + 3}V${y + tall - 3}` }));
    return { px: (names + X(bar.end)) / 2, py: middle, order: i, row: bar.row, lines: () => bar.lines };
  });
  return interactive({ svg, width }, points, (y) => Math.floor((y - 8) / line));
}

// All samples in the order they were taken, the clock behind them, and how often each time occurred.
function strip({ width, samples, clocks, row }) {
  const height = 220, side = Math.min(120, width * 0.24), n = samples.length, [lo, hi] = extent(samples, 1);
  const pad = (hi - lo) * 0.08 || lo * 0.01;
  const y = [lo - pad, hi + pad], chart = plane({ width, height, x: [0, n + 1], y, log: false,
    xTicks: linearTicks(0, n), yTicks: linearTicks(...y), side,
    xLabel: "sample, as taken", yLabel: "ms", xText: commas, yText: (t) => digits(t),
      label: `${n} samples from ${ms(lo)} to ${ms(hi)}` });
  const { layer, svg, X, Y, draw } = chart;
  const box = (parent, kind, x, top, wide, tall) =>
    parent.append(s("rect", { class: kind, x, y: top, width: Math.max(1, wide), height: Math.max(1, tall) }));
  if (isNumber(row.low)) box(layer, "band", chart.left, Y(row.high), chart.right - chart.left,
    Y(row.low) - Y(row.high));
  draw("median", [[0, row.median], [n + 1, row.median]]);
  if (clocks.length > 1) {
    const C = scale(false, Math.min(...clocks) - 1, Math.max(...clocks) + 1, ...y), step = n / clocks.length;
    draw("clock", clocks.map((clock, i) => [(i + 0.5) * step + 0.5, C(clock)]));
  }
  const points = samples.map((v, i) => {
    const px = X(i + 1), py = Y(v), clock = clocks.length === n ? `, ${commas(Math.round(clocks[i]))} MHz` : "";
    layer.append(s("circle", { class: "sample", cx: px.toFixed(1), cy: py.toFixed(1), r: n > 200 ? 1.6 : 2.4 }));
    return { px, py, order: i, lines: () => [`sample ${i * row.every + 1}`, ms(v) + clock] };
  });
  const count = Math.max(6, Math.min(28, Math.ceil(Math.sqrt(n) * 1.5))), tall = (Y(lo) - Y(hi)) / count;
  const bins = groups(samples, (v) => Math.min(count - 1,
    Math.floor((v - lo) / (hi - lo || 1) * count))).map(([bin, some]) => [bin, some.length]);
  const most = Math.max(...bins.map(([, often]) => often));
  for (const [bin, often] of bins) box(svg, "bin", chart.right + 10, Y(lo) - (bin + 1) * tall + 0.5,
    (side - 16) * often / most, tall - 1);
  chart.write(chart.right + 10, height - 6, "how often");
  return interactive(chart, points);
}
