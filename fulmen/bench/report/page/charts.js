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
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((x) => x >= raw), found = [];
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
const extent = (values, pad) => [Math.min(...values) / pad, Math.max(...values) * pad];
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
const canvas = (width, height, label) => s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", tabindex: "0",
  "aria-roledescription": "chart", "aria-label": label });
const mark = (index, px, py, more = "") => s("path", { class: `mark ${colourClass(index)} ${more}`, d: markPath(index, 4),
  transform: `translate(${px.toFixed(1)},${py.toFixed(1)})` });

// Axes, grid and a clipped layer to draw on.
let planes = 0;
function plane({ width, height, x, y, xTicks, yTicks, xLabel, yLabel, label, log = true, xText, yText = (t) => digits(t, 1), right = 16 }) {
  const left = 58, top = 26, bottom = 42, id = "clip" + (planes += 1), svg = canvas(width, height, label);
  const X = scale(log, ...x, left, width - right), Y = scale(log, ...y, height - bottom, top);
  const write = (kind, at, text, anchor) => svg.append(s("text", { class: kind, x: at[0], y: at[1], "text-anchor": anchor }, text));
  svg.append(s("clipPath", { id }, s("rect", { x: left, y: top, width: width - left - right, height: height - top - bottom })));
  for (const t of yTicks) {
    svg.append(s("path", { class: "grid-line", d: `M${left},${Y(t).toFixed(1)}H${width - right}` }));
    write("tick", [left - 8, Y(t) + 4], yText(t), "end");
  }
  let last = -Infinity;
  for (const t of xTicks) {
    const at = X(t), text = xText(t), half = 3.4 * text.length;
    svg.append(s("path", { class: "tick-line", d: `M${at.toFixed(1)},${height - bottom}v4` }));
    if (at - half < last + 6) continue;
    last = at + half;
    write("tick", [at, height - bottom + 18], text, "middle");
  }
  svg.append(s("path", { class: "axis", d: `M${left},${height - bottom}H${width - right}` }));
  write("axis-label", [width - right, height - 6], xLabel, "end");
  write("axis-label", [4, 13], yLabel);
  const layer = s("g", { "clip-path": `url(#${id})` });
  svg.append(layer);
  return { svg, layer, X, Y, left, top, right: width - right, bottom: height - bottom, width, height, write };
}

// Points answer to the pointer (the nearest one) and to the arrow keys; Enter opens the row.
function interactive({ svg, width }, points, find) {
  const halo = s("circle", { class: "halo", r: 9, visibility: "hidden" });
  svg.append(halo);
  let at = -1;
  const ordered = [...points].sort((a, b) => a.order - b.order || a.px - b.px);
  const show = (point) => {
    fill(halo, { cx: point.px, cy: point.py, visibility: "visible" }, []);
    const box = svg.getBoundingClientRect(), k = box.width / width;
    showTip(box.left + point.px * k, box.top + point.py * k, point.lines());
  };
  const leave = () => { halo.setAttribute("visibility", "hidden"); hideTip(); at = -1; };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), k = width / box.width;
    const x = (event.clientX - box.left) * k, y = (event.clientY - box.top) * k;
    if (find) return find(y);
    const far = ordered.map((p) => (p.px - x) ** 2 + (p.py - y) ** 2), best = far.indexOf(Math.min(...far));
    return far[best] < 26 ** 2 ? best : -1;
  };
  const open = () => { if (at >= 0 && ordered[at].row) { const { row } = ordered[at]; leave(); openDrawer(row); } };
  fill(svg, {
    pointermove(event) { at = nearest(event); if (ordered[at]) show(ordered[at]); else leave(); },
    pointerleave: leave,
    blur: leave,
    click(event) { at = nearest(event); open(); },
    keydown(event) {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step && ordered.length) {
        at = (at + step + ordered.length) % ordered.length;
        show(ordered[at]);
      } else if (event.key === "Enter") open();
      else if (event.key === "Escape") leave();
      else return;
      event.preventDefault();
    },
  }, []);
  return svg;
}

// Curves over N. series: [{index, points: [{n, y, row, lo, hi, hollow}], fit}]; floors: [[[n, y], ...], ...].
function curves({ width, height, series, floors = [], yLabel, yText, label, guides = true, ticks = logTicks, lines }) {
  const ns = ascending(unique(series.flatMap((one) => one.points.map((p) => p.n))));
  const x = extent(ns, 1.12), y = extent([...series.flatMap((one) => one.points.map((p) => p.y)), ...floors.flat().map((p) => p[1])], 1.4);
  const chart = plane({ width, height, x, y, xTicks: ns, yTicks: ticks(...y), xLabel: "N, tokens", yLabel, label, xText: short, yText });
  const { layer, X, Y } = chart, points = [];
  const draw = (kind, line) => layer.append(s("path", { class: kind, d: path(line.map(([n, v]) => [X(n), Y(v)])) }));
  for (const [power, name] of guides ? [[1, "n"], [2, "n²"]] : []) {
    const end = Math.min(x[1], x[0] * (y[1] / y[0]) ** (1 / power)), tall = y[0] * (end / x[0]) ** power;
    draw("guide", [[x[0], y[0]], [end, tall]]);
    chart.write("guide-label", [Math.min(X(end) - 6, chart.right - 8), Math.max(Y(tall), chart.top) + 12], name, "end");
  }
  for (const floor of floors) draw("floor", floor);
  series.forEach((one, order) => {
    const colour = colourClass(one.index), sorted = [...one.points].sort((a, b) => a.n - b.n);
    if (one.fit && one.fit.time) {
      const used = sorted.filter((p) => one.fit.used.includes(p.n)), mean = (of) => sum(used.map((p) => Math.log(of(p)))) / used.length;
      const mx = mean((p) => p.n), my = mean((p) => p.y);
      draw("fit " + colour, [used[0].n, used.at(-1).n].map((n) => [n, Math.exp(my + one.fit.time[0] * (Math.log(n) - mx))]));
    }
    draw("line " + colour, sorted.map((p) => [p.n, p.y]));
    sorted.forEach((p, i) => {
      const px = X(p.n), py = Y(p.y);
      if (isNumber(p.lo)) draw("line thin " + colour, [[p.n, p.lo], [p.n, p.hi]]);
      chart.svg.append(mark(one.index, px, py, p.hollow && "hollow"));
      points.push({ px, py, order, row: p.row, lines: () => lines(p, sorted[i - 1]) });
    });
  });
  return interactive(chart, points);
}

// roofs: [{name, flops, bytes, kind}]; points: [{x, y, row, index, over, hollow, lines}].
function roofline({ width, height, roofs, points, label }) {
  const [unit, unitName] = DATA.flops_unit, tops = roofs.map((roof) => roof.flops);
  const x = extent([...points.map((p) => p.x), ...roofs.map((roof) => roof.flops / roof.bytes)], 2.2);
  const y = [Math.min(...points.map((p) => p.y), ...tops) / 2, Math.max(...tops, ...points.map((p) => p.y)) * 1.6];
  const chart = plane({ width, height, x, y, xTicks: logTicks(...x, 9), yTicks: logTicks(...y), label, xLabel: "FLOP per byte, at the floor",
    yLabel: unitName, xText: (t) => digits(t, 1), yText: (t) => digits(t / unit, 1) });
  const { layer, X, Y } = chart;
  for (const roof of roofs) {
    layer.append(s("path", { class: "roof " + roof.kind, d: path([[x[0], x[0] * roof.bytes], [roof.flops / roof.bytes, roof.flops], [x[1], roof.flops]].map(([a, b]) => [X(a), Y(b)])) }));
    chart.write("roof-label", [chart.right, Y(roof.flops) + (roof === roofs[0] ? -6 : 14)],
      width < 560 ? roof.name : `${roof.name} ${flops(roof.flops)} · ${traffic(roof.bytes)}`, "end");
  }
  return interactive(chart, points.map((p, i) => {
    const px = X(p.x), py = Y(p.y);
    chart.svg.append(mark(p.index, px, py, `${p.hollow ? "hollow" : ""} ${p.over ? "over" : ""}`));
    return { px, py, order: p.index * 1e4 + i, row: p.row, lines: p.lines };
  }));
}

// Horizontal bars. lines: [{name, value, parts: [[class, from, to, height]], ticks: [at], end, row, lines}].
function bars({ width, lines, label, scaleOf, numbers = 84 }) {
  const narrow = width < 480, names = narrow ? 0 : Math.min(190, width * 0.42), line = narrow ? 46 : 34, top = 8, above = narrow ? 18 : 0;
  const svg = canvas(width, top * 2 + line * lines.length, label), X = scaleOf(names, width - numbers);
  const fits = Math.floor((narrow ? width : names) / 7.2);
  const points = lines.map((bar, i) => {
    const y = top + i * line + above, tall = line - above, middle = y + tall / 2;
    const name = bar.name.length > fits ? bar.name.slice(0, fits - 1) + "…" : bar.name;
    svg.append(s("text", narrow ? { class: "bar-name", x: 0, y } : { class: "bar-name", x: names - 10, y: middle + 4, "text-anchor": "end" }, name));
    for (const [kind, from, to, high = tall - 14] of bar.parts) {
      const wide = X(to) - X(from);
      if (wide > 0.3) svg.append(s("rect", { class: kind, x: X(from), y: middle - high / 2, width: wide, height: high }));
    }
    for (const at of bar.ticks) svg.append(s("path", { class: "floor-tick", d: `M${X(at)},${y + 3}V${y + tall - 3}` }));
    svg.append(s("text", { class: "bar-value", x: X(bar.end) + 8, y: middle + 4 }, bar.value));
    return { px: (names + X(bar.end)) / 2, py: middle, order: i, row: bar.row, lines: () => bar.lines };
  });
  return interactive({ svg, width }, points, (y) => Math.floor((y - top) / line));
}

// All samples in the order they were taken, the clock behind them, and how often each time occurred.
function strip({ width, samples, clocks, row, round }) {
  const height = 220, side = Math.min(120, width * 0.24), lo = Math.min(...samples), hi = Math.max(...samples), pad = (hi - lo) * 0.08 || lo * 0.01;
  const y = [lo - pad, hi + pad];
  const chart = plane({ width, height, x: [0, samples.length + 1], y, log: false, xTicks: linearTicks(0, samples.length), yTicks: linearTicks(...y),
    xLabel: "sample, as taken", yLabel: "ms", xText: commas, yText: (t) => digits(t), right: side, label: `${samples.length} samples from ${ms(lo)} to ${ms(hi)}` });
  const { layer, svg, X, Y } = chart;
  if (isNumber(row.low)) {
    layer.append(s("rect", { class: "band", x: chart.left, width: chart.right - chart.left, y: Y(row.high), height: Math.max(1, Y(row.low) - Y(row.high)) }));
  }
  layer.append(s("path", { class: "median", d: `M${chart.left},${Y(row.median)}H${chart.right}` }));
  if (clocks.length > 1) {
    const C = scale(false, Math.min(...clocks) - 1, Math.max(...clocks) + 1, chart.bottom - 4, chart.top + 4), step = samples.length / clocks.length;
    layer.append(s("path", { class: "clock", d: path(clocks.map((c, i) => [X((i + 0.5) * step + 0.5), C(c)])) }));
  }
  const points = samples.map((v, i) => {
    const px = X(i + 1), py = Y(v), clock = clocks.length === samples.length ? `, ${commas(Math.round(clocks[i]))} MHz` : "";
    layer.append(s("circle", { class: "sample", cx: px.toFixed(1), cy: py.toFixed(1), r: samples.length > 200 ? 1.6 : 2.4 }));
    return { px, py, order: i, lines: () => [`sample ${i * round + 1}`, ms(v) + clock] };
  });
  const count = Math.max(6, Math.min(28, Math.ceil(Math.sqrt(samples.length) * 1.5))), bins = new Array(count).fill(0);
  for (const v of samples) bins[Math.min(count - 1, Math.floor((v - lo) / (hi - lo || 1) * count))] += 1;
  const tallest = Math.max(...bins), cell = (Y(lo) - Y(hi)) / count;
  bins.forEach((n, i) => {
    if (n) svg.append(s("rect", { class: "bin", x: chart.right + 10, y: Y(lo) - (i + 1) * cell + 0.5, width: Math.max(1, (side - 16) * n / tallest), height: Math.max(1, cell - 1) }));
  });
  chart.write("axis-label", [chart.right + 10, height - 6], "how often");
  return interactive(chart, points);
}
