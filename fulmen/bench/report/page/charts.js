// Charts as inline SVG, drawn to the width they have.

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
const canvas = (width, height, label) => s("svg", { class: "chart walk", viewBox: `0 0 ${width} ${height}`,
  role: "group", tabindex: "0", "aria-roledescription": "chart", "aria-label": label });

// Axes, grid and a clipped layer: `draw` a line on it, `write` text anywhere, `point` at what the reader may ask for.
let planes = 0;
function plane({ width, height, x, y, xTicks, yTicks, xLabel, yLabel, label, log = true, xText,
  yText = (t) => digits(t, 1), side = 16 }) {
  const left = 58, top = 26, bottom = height - 42, right = width - side, id = "clip" + (planes += 1);
  const svg = canvas(width, height, label), X = scale(log, ...x, left, right), Y = scale(log, ...y, bottom, top);
  const layer = s("g", { "clip-path": `url(#${id})` });
  const write = (px, py, text, anchor) => svg.append(s("text", { x: px, y: py, "text-anchor": anchor }, text));
  const draw = (kind, points, style = "") =>
    layer.append(s("path", { class: kind, style, d: path(points.map(([a, b]) => [X(a), Y(b)])) }));
  const point = (a, b, shape, lines, row) => svg.append(stop(s("g",
    { class: "place", transform: `translate(${X(a).toFixed(1)},${Y(b).toFixed(1)})` },
    s("circle", { class: "hit", r: 9 }), shape), lines, row));
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
  return { svg, layer, X, Y, left, right, write, draw, point };
}

// Times over N. series: [{index, points: [{n, y, row, lo, hi, hollow}], fit}]; floors: [[[n, y], ...], ...].
function curves({ width, series, floors, label, lines }) {
  const all = series.flatMap((one) => one.points), ns = ascending(unique(all.map((p) => p.n)));
  const x = extent(ns, 1.12), y = extent([...all.map((p) => p.y), ...floors.flat().map((p) => p[1])], 1.4);
  const { svg, draw, point } = plane({ width, height: 320, x, y, xTicks: ns, yTicks: logTicks(...y),
    xLabel: "N, tokens", yLabel: "ms", label, xText: short });
  for (const floor of floors) draw("floor", floor);
  for (const { index, fit, points } of series) {
    const colour = tint(index), sorted = [...points].sort((a, b) => a.n - b.n);
    if (fit?.time) {
      const used = sorted.filter((p) => fit.used.includes(p.n)), mx = mean(used.map((p) => Math.log(p.n)));
      const my = mean(used.map((p) => Math.log(p.y)));
      draw("fit", [used[0].n, used.at(-1).n].map((n) => [n, Math.exp(my + fit.time[0] * (Math.log(n) - mx))]), colour);
    }
    draw("line", sorted.map((p) => [p.n, p.y]), colour);
    sorted.forEach((p, i) => {
      if (isNumber(p.lo)) draw("line thin", [[p.n, p.lo], [p.n, p.hi]], colour);
      point(p.n, p.y, mark(index, p.hollow && "hollow"), () => lines(p, sorted[i - 1]), p.row);
    });
  }
  return svg;
}

// roofs: [{name, flops, bytes}], the hard one first; points: [{x, y, row, index, hollow, lines}].
function roofline({ width, roofs, points, label }) {
  const [unit, yLabel] = DATA.flops_unit, y = extent([...roofs.map((r) => r.flops), ...points.map((p) => p.y)], 1.8);
  const x = extent([...points.map((p) => p.x), ...roofs.map((roof) => roof.flops / roof.bytes)], 2.2);
  const { svg, draw, write, point, right, Y } = plane({ width, height: Math.max(300, Math.min(460, width * 0.48)),
    x, y, xTicks: logTicks(...x, 9), yTicks: logTicks(...y), label, xLabel: "FLOP per byte, at the floor", yLabel,
    xText: (t) => digits(t, 1), yText: (t) => digits(t / unit, 1) });
  roofs.forEach((roof, i) => {
    const knee = roof.flops / roof.bytes;
    draw("roof " + roof.name, [[x[0], x[0] * roof.bytes], [knee, roof.flops], [x[1], roof.flops]]);
    const said = width < 560 ? roof.name : `${roof.name} ${flops(roof.flops)} · ${traffic(roof.bytes)}`;
    write(right, Y(roof.flops) + (i ? 14 : -6), said, "end");
  });
  for (const p of points) point(p.x, p.y, mark(p.index, p.hollow && "hollow"), p.lines, p.row);
  return svg;
}

// Horizontal bars. lines: [{name, value, parts: [[class, from, to, height]], ticks: [at], end, row, lines}].
function bars({ width, lines, label, log, range, numbers = 84 }) {
  const narrow = width < 480, names = narrow ? 0 : Math.min(190, width * 0.42), line = narrow ? 46 : 34;
  const above = narrow ? 18 : 0, tall = line - above, fits = Math.floor((narrow ? width : names) / 7.2);
  const svg = canvas(width, 16 + line * lines.length, label), X = scale(log, ...range, names, width - numbers);
  lines.forEach((bar, i) => {
    const y = 8 + i * line + above, middle = y + tall / 2;
    const name = bar.name.length > fits ? bar.name.slice(0, fits - 1) + "…" : bar.name;
    const at = narrow ? { x: 0, y } : { x: names - 10, y: middle + 4, "text-anchor": "end" };
    const parts = bar.parts.filter(([, from, to]) => X(to) - X(from) > 0.3);
    svg.append(stop(s("g", { class: "place" }, s("rect", { class: "hit", y: y - above, width, height: line }),
      s("text", { class: "ink", ...at }, name), s("text", { class: "ink", x: X(bar.end) + 8, y: middle + 4 }, bar.value),
      parts.map(([kind, from, to, high = tall - 14]) => s("rect",
        { class: kind, x: X(from), y: middle - high / 2, width: X(to) - X(from), height: high })),
      bar.ticks.map((tick) => s("path", { class: "floor-tick", d: `M${X(tick)},${y + 3}V${y + tall - 3}` }))),
    () => bar.lines, bar.row));
  });
  return svg;
}

// All samples in the order they were taken, and how often each time occurred.
function strip(width, row) {
  const { samples } = row, height = 220, side = Math.min(120, width * 0.24), n = samples.length;
  const [lo, hi] = extent(samples, 1), pad = (hi - lo) * 0.08 || lo * 0.01, y = [lo - pad, hi + pad];
  const { svg, layer, Y, draw, point, write, left, right } = plane({ width, height, x: [0, n + 1], y, log: false, side,
    xTicks: linearTicks(0, n), yTicks: linearTicks(...y), xLabel: "sample, as taken", yLabel: "ms", xText: commas,
    yText: (t) => digits(t), label: `${n} samples from ${ms(lo)} to ${ms(hi)}` });
  const box = (parent, kind, x, top, wide, tall) =>
    parent.append(s("rect", { class: kind, x, y: top, width: Math.max(1, wide), height: Math.max(1, tall) }));
  if (isNumber(row.low)) box(layer, "band", left, Y(row.high), right - left, Y(row.low) - Y(row.high));
  draw("median", [[0, row.median], [n + 1, row.median]]);
  samples.forEach((v, i) => point(i + 1, v, s("circle", { class: "sample", r: n > 200 ? 1.6 : 2.4 }), () => {
    const clock = row.clocks.length === n ? `, ${commas(Math.round(row.clocks[i]))} MHz` : "";
    return [`sample ${i + 1}`, ms(v) + clock];
  }));
  const count = Math.max(6, Math.min(28, Math.ceil(Math.sqrt(n) * 1.5))), tall = (Y(lo) - Y(hi)) / count;
  const binOf = (v) => Math.min(count - 1, Math.floor((v - lo) / (hi - lo || 1) * count));
  const bins = groups(samples, binOf).map(([bin, some]) => [bin, some.length]);
  const most = Math.max(...bins.map(([, often]) => often));
  for (const [bin, often] of bins) {
    box(svg, "bin", right + 10, Y(lo) - (bin + 1) * tall + 0.5, (side - 16) * often / most, tall - 1);
  }
  write(right + 10, height - 6, "how often");
  return svg;
}
