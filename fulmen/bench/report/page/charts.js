// Charts as inline SVG, drawn to the width they have. A chart is one stop of the tab key: the arrows walk its points.

function logTicks(lo, hi, most = 7) {
  const found = [];
  for (let d = Math.floor(Math.log10(lo)); d <= Math.ceil(Math.log10(hi)); d += 1) {
    for (const m of [1, 2, 5]) found.push(m * 10 ** d);
  }
  const inside = found.filter((t) => t >= lo * 0.999 && t <= hi * 1.001);
  if (inside.length <= most) return inside;
  const decades = inside.filter((t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-9);
  const step = Math.ceil(decades.length / most);
  return decades.filter((_, i) => i % step === 0);
}
function linearTicks(lo, hi, most = 5) {
  const raw = (hi - lo) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((x) => x >= raw);
  const found = [];
  for (let t = Math.ceil(lo / step) * step; t <= hi + step * 1e-9; t += step) found.push(t);
  return found;
}
function binaryTicks(lo, hi, most = 6) {
  const a = Math.ceil(Math.log2(lo)), b = Math.floor(Math.log2(hi)), step = Math.max(1, Math.ceil((b - a + 1) / most)), found = [];
  for (let p = a; p <= b; p += step) found.push(2 ** p);
  return found;
}
const scale = (log, lo, hi, from, to) => (log
  ? (v) => from + (to - from) * Math.log(v / lo) / Math.log(hi / lo)
  : (v) => from + (to - from) * (v - lo) / (hi - lo || 1));

// Axes, grid and a clipped layer to draw on.
let planes = 0;
function plane({ width, height, x, y, xTicks, yTicks, xLabel, yLabel, label, log = [true, true], xText, yText, right = 16 }) {
  const left = 58, top = 26, bottom = 42;
  const id = "clip" + (planes += 1);
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", tabindex: "0",
    "aria-roledescription": "chart", "aria-label": label });
  const X = scale(log[0], ...x, left, width - right), Y = scale(log[1], ...y, height - bottom, top);
  svg.append(s("clipPath", { id }, s("rect", { x: left, y: top, width: width - left - right, height: height - top - bottom })));
  for (const t of yTicks) {
    svg.append(s("path", { class: "grid-line", d: `M${left},${Y(t).toFixed(1)}H${width - right}` }),
      s("text", { class: "tick", x: left - 8, y: Y(t) + 4, "text-anchor": "end" }, yText ? yText(t) : digits(t, 1)));
  }
  let last = -Infinity;
  for (const t of xTicks) {
    const at = X(t);
    svg.append(s("path", { class: "tick-line", d: `M${at.toFixed(1)},${height - bottom}v4` }));
    if (at - last < 30) continue;
    last = at;
    svg.append(s("text", { class: "tick", x: at, y: height - bottom + 18, "text-anchor": "middle" }, xText ? xText(t) : digits(t, 1)));
  }
  svg.append(s("path", { class: "axis", d: `M${left},${height - bottom}H${width - right}` }),
    s("text", { class: "axis-label", x: width - right, y: height - 6, "text-anchor": "end" }, xLabel),
    s("text", { class: "axis-label", x: 4, y: 13 }, yLabel));
  const layer = s("g", { "clip-path": `url(#${id})` });
  svg.append(layer);
  return { svg, layer, X, Y, left, top, right: width - right, bottom: height - bottom, width, height };
}

// Points answer to the pointer (the nearest one) and to the arrow keys; Enter opens the row.
function interactive(chart, points) {
  const { svg } = chart;
  const halo = s("circle", { class: "halo", r: 9, visibility: "hidden" });
  svg.append(halo);
  let at = -1;
  const ordered = [...points].sort((a, b) => a.order - b.order || a.px - b.px);
  const place = (point) => {
    halo.setAttribute("cx", point.px);
    halo.setAttribute("cy", point.py);
    halo.setAttribute("visibility", "visible");
    const box = svg.getBoundingClientRect(), k = box.width / chart.width;
    showTip(box.left + point.px * k, box.top + point.py * k, point.lines());
  };
  const leave = () => { halo.setAttribute("visibility", "hidden"); hideTip(); at = -1; };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), k = chart.width / box.width;
    const x = (event.clientX - box.left) * k, y = (event.clientY - box.top) * k;
    let best = -1, distance = 26 ** 2;
    ordered.forEach((p, i) => {
      const d = (p.px - x) ** 2 + (p.py - y) ** 2;
      if (d < distance) { distance = d; best = i; }
    });
    return best;
  };
  const open = () => { if (at >= 0 && ordered[at].row) { const { row } = ordered[at]; leave(); openDrawer(row); } };
  fill(svg, {
    pointermove(event) { at = nearest(event); if (at >= 0) place(ordered[at]); else leave(); },
    pointerleave: leave,
    blur: leave,
    click(event) { at = nearest(event); open(); },
    keydown(event) {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step && ordered.length) {
        at = (at + step + ordered.length) % ordered.length;
        place(ordered[at]);
      } else if (event.key === "Enter") open();
      else if (event.key === "Escape") leave();
      else return;
      event.preventDefault();
    },
  }, []);
}
const mark = (index, px, py, hollow, extra = "") => s("path", {
  class: `mark ${colourClass(index)}${hollow ? " hollow" : ""}${extra}`, d: markPath(index, 4),
  transform: `translate(${px.toFixed(1)},${py.toFixed(1)})` });

function extent(values, pad) {
  const lo = Math.min(...values), hi = Math.max(...values);
  return [lo / pad, hi * pad];
}

// Curves over N. series: [{name, points: [{n, y, row, lo, hi}], fit}]; floors: [{name, points: [[n, y]]}].
function curves({ width, height, series, floors = [], yLabel, yText, label, guides = true, ticks = logTicks, lines }) {
  const ns = unique(series.flatMap((one) => one.points.map((p) => p.n))).sort((a, b) => a - b);
  const ys = [...series.flatMap((one) => one.points.map((p) => p.y)), ...floors.flatMap((f) => f.points.map((p) => p[1]))];
  const x = extent(ns, 1.12), y = extent(ys, 1.4);
  const chart = plane({ width, height, x, y, xTicks: ns, yTicks: ticks(...y), xLabel: "N, tokens", yLabel, label,
    xText: short, yText });
  const { layer, X, Y } = chart;
  const path = (points) => points.map(([n, v], i) => `${i ? "L" : "M"}${X(n).toFixed(1)},${Y(v).toFixed(1)}`).join("");
  if (guides) {
    for (const [power, name] of [[1, "n"], [2, "n²"]]) {
      const end = Math.min(x[1], x[0] * (y[1] / y[0]) ** (1 / power)), tall = y[0] * (end / x[0]) ** power;
      layer.append(s("path", { class: "guide", d: path([[x[0], y[0]], [end, tall]]) }));
      const nx = Math.min(X(end) - 6, chart.right - 8), ny = Math.max(Y(tall), chart.top) + 12;
      chart.svg.append(s("text", { class: "guide-label", x: nx, y: ny, "text-anchor": "end" }, name));
    }
  }
  for (const floor of floors) layer.append(s("path", { class: "floor", d: path(floor.points) }));
  const points = [];
  series.forEach((one, order) => {
    const colour = colourClass(one.index), sorted = [...one.points].sort((a, b) => a.n - b.n);
    if (one.fit && one.fit.time) {
      const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
      const used = sorted.filter((p) => one.fit.used.includes(p.n)), logs = used.map((p) => [Math.log(p.n), Math.log(p.y)]);
      const mx = mean(logs.map((p) => p[0])), my = mean(logs.map((p) => p[1]));
      const line = (n) => [n, Math.exp(my + one.fit.time[0] * (Math.log(n) - mx))];
      layer.append(s("path", { class: "fit " + colour, d: path([line(used[0].n), line(used.at(-1).n)]) }));
    }
    layer.append(s("path", { class: "line " + colour, d: path(sorted.map((p) => [p.n, p.y])) }));
    sorted.forEach((p, i) => {
      const px = X(p.n), py = Y(p.y);
      if (isNumber(p.lo)) layer.append(s("path", { class: "line thin " + colour, d: `M${px},${Y(p.lo)}V${Y(p.hi)}` }));
      chart.svg.append(mark(one.index, px, py, p.hollow));
      points.push({ px, py, order, row: p.row, lines: () => lines(p, sorted[i - 1]) });
    });
  });
  interactive(chart, points);
  return chart.svg;
}

// Roofs: [{name, flops, bytes, kind}]; points: [{x, y, row, index, over}].
function roofline({ width, height, roofs, points, label }) {
  const ridges = roofs.map((roof) => roof.flops / roof.bytes);
  const x = extent([...points.map((p) => p.x), ...ridges], 2.2);
  const tops = roofs.map((roof) => roof.flops), unit = Math.max(...tops) >= 1e12 ? [1e12, "T"] : [1e9, "G"];
  const y = [Math.min(...points.map((p) => p.y), ...tops) / 2, Math.max(...tops, ...points.map((p) => p.y)) * 1.6];
  const chart = plane({ width, height, x, y, xTicks: logTicks(...x, 9), yTicks: logTicks(...y), label,
    xLabel: "FLOP per byte, at the floor", yLabel: unit[1] + "FLOP/s", xText: (t) => digits(t, 1), yText: (t) => digits(t / unit[0], 1) });
  const { layer, X, Y, svg } = chart;
  roofs.forEach((roof, i) => {
    const ridge = roof.flops / roof.bytes;
    const d = `M${X(x[0])},${Y(x[0] * roof.bytes)}L${X(ridge)},${Y(roof.flops)}H${X(x[1])}`;
    layer.append(s("path", { class: "roof " + roof.kind, d }));
    const up = roof.kind === "hard";
    svg.append(s("text", { class: "roof-label", x: chart.right, y: Y(roof.flops) + (up ? -6 : 14), "text-anchor": "end" },
      width < 560 ? roof.name : `${roof.name} ${digits(roof.flops / unit[0], 3)} ${unit[1]}FLOP/s · ${digits(roof.bytes / 1e9, 4)} GB/s`));
  });
  const placed = points.map((p, i) => {
    const px = X(p.x), py = Y(p.y);
    svg.append(mark(p.index, px, py, p.hollow, p.over ? " over" : ""));
    return { px, py, order: p.index * 1e4 + i, row: p.row, lines: p.lines };
  });
  interactive(chart, placed);
  return svg;
}

// Stacked bars, one a competitor. bars: [{name, parts: [[part, bytes]], peak, floor, row}].
const PARTS = { inputs: "inputs", output: "output", gradients: "gradients", saved: "saved for backward",
  workspace_forward: "forward workspace", workspace_backward: "backward workspace" };
function stacks({ width, bars, label }) {
  const narrow = width < 480, names = narrow ? 0 : Math.min(190, width * 0.42), numbers = 84, line = narrow ? 46 : 34, top = 8;
  const most = Math.max(...bars.map((bar) => Math.max(bar.peak || 0, bar.floor || 0, bar.parts.reduce((a, p) => a + p[1], 0))));
  const X = (v) => names + (width - names - numbers) * v / (most || 1);
  const height = top * 2 + line * bars.length;
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", tabindex: "0", "aria-label": label,
    "aria-roledescription": "chart" });
  const points = [];
  const fits = Math.floor((narrow ? width : names) / 7.2), above = narrow ? 18 : 0;
  bars.forEach((bar, i) => {
    const y = top + i * line + above, tall = line - above, middle = y + tall / 2;
    const name = bar.name.length > fits ? bar.name.slice(0, fits - 1) + "…" : bar.name;
    svg.append(s("text", narrow ? { class: "bar-name", x: 0, y } : { class: "bar-name", x: names - 10, y: middle + 4, "text-anchor": "end" }, name));
    let sum = 0;
    for (const [part, size] of bar.parts) {
      const x0 = X(sum), x1 = X(sum + size);
      sum += size;
      if (x1 - x0 > 0.3) svg.append(s("rect", { class: "part " + part, x: x0, y: y + 7, width: x1 - x0, height: tall - 14 }));
    }
    if (bar.floor) svg.append(s("path", { class: "floor-tick", d: `M${X(bar.floor)},${y + 3}V${y + tall - 3}` }));
    const end = Math.max(X(bar.peak || sum), X(bar.floor || 0)) + 8;
    const over = bar.floor ? ` · ${times(bar.peak / bar.floor)}` : "";
    svg.append(s("text", { class: "bar-value", x: end, y: middle + 4 }, bytes(bar.peak || sum)));
    points.push({ px: (names + X(bar.peak || sum)) / 2, py: middle, order: i, row: bar.row, lines: () => [bar.name,
      ...bar.parts.map(([part, size]) => `${own(PARTS, part) || part}: ${bytes(size)}`), `peak: ${bytes(bar.peak)}${over} its floor`] });
  });
  const box = { svg, width };
  interactive(box, points);
  // Bars are wide: the pointer means the bar in whose line it is.
  svg.addEventListener("pointermove", (event) => {
    const rect = svg.getBoundingClientRect(), i = Math.floor(((event.clientY - rect.top) * width / rect.width - top) / line);
    if (points[i]) showTip(event.clientX, event.clientY, points[i].lines());
  });
  return svg;
}

// All samples in the order they were taken, the clock behind them, and how often each time occurred.
function strip({ width, samples, clocks, row, round }) {
  const height = 220, side = Math.min(120, width * 0.24);
  const lo = Math.min(...samples), hi = Math.max(...samples), pad = (hi - lo) * 0.08 || lo * 0.01;
  const y = [lo - pad, hi + pad];
  const chart = plane({ width, height, x: [0, samples.length + 1], y, log: [false, false], xTicks: linearTicks(0, samples.length),
    yTicks: linearTicks(...y), xLabel: "sample, as taken", yLabel: "ms", xText: (t) => commas(t), yText: (t) => digits(t), right: side,
    label: `${samples.length} samples from ${ms(lo)} to ${ms(hi)}` });
  const { layer, svg, X, Y } = chart;
  if (isNumber(row.low)) layer.append(s("rect", { class: "band", x: chart.left, width: chart.right - chart.left,
    y: Y(row.high), height: Math.max(1, Y(row.low) - Y(row.high)) }));
  layer.append(s("path", { class: "median", d: `M${chart.left},${Y(row.median)}H${chart.right}` }));
  if (clocks.length > 1) {
    const a = Math.min(...clocks), b = Math.max(...clocks);
    const C = scale(false, a - 1, b + 1, chart.bottom - 4, chart.top + 4), step = samples.length / clocks.length;
    layer.append(s("path", { class: "clock", d: clocks.map((c, i) => `${i ? "L" : "M"}${X((i + 0.5) * step + 0.5).toFixed(1)},${C(c).toFixed(1)}`).join("") }));
  }
  const radius = samples.length > 200 ? 1.6 : 2.4;
  const points = samples.map((v, i) => {
    const px = X(i + 1), py = Y(v);
    layer.append(s("circle", { class: "sample", cx: px.toFixed(1), cy: py.toFixed(1), r: radius }));
    const clock = clocks.length === samples.length ? `, ${commas(Math.round(clocks[i]))} MHz` : "";
    return { px, py, order: i, lines: () => [`sample ${i * round + 1}`, ms(v) + clock] };
  });
  const count = Math.max(6, Math.min(28, Math.ceil(Math.sqrt(samples.length) * 1.5))), bins = new Array(count).fill(0);
  for (const v of samples) bins[Math.min(count - 1, Math.floor((v - lo) / (hi - lo || 1) * count))] += 1;
  const tallest = Math.max(...bins), cell = (Y(lo) - Y(hi)) / count;
  bins.forEach((n, i) => {
    if (n) svg.append(s("rect", { class: "bin", x: chart.right + 10, y: Y(lo) - (i + 1) * cell + 0.5,
      width: Math.max(1, (side - 16) * n / tallest), height: Math.max(1, cell - 1) }));
  });
  svg.append(s("text", { class: "axis-label", x: chart.right + 10, y: height - 6 }, "how often"));
  interactive(chart, points);
  return svg;
}
