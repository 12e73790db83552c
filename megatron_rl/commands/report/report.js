"use strict";
// Texts of the run enter the page by textContent only.
const { charts, colors } = JSON.parse(document.getElementById("json").textContent);
const MARGIN = { left: 52, right: 10, top: 8, bottom: 34 };
const color = line => line.color === "ink" ? "var(--ink)" : `var(--c${line.color % colors})`;

function make(tag, parent, text = "", className = "") {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (className) element.className = className;
  parent?.append(element);
  return element;
}
function draw(tag, parent, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
function number(x, unit = "") {
  if (unit === "fraction") return Number((100 * x).toPrecision(3)) + "%";
  const size = Math.abs(x);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return x.toExponential(2).replace(/\.?0+e/, "e");
  return Number(x.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}
function ticks(low, high, most, log) {
  if (log) {
    const found = [], decades = Math.log10(high / low);
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const m of decades > 2.5 ? [1] : [1, 2, 5])
        if (m * 10 ** e >= low && m * 10 ** e <= high) found.push(m * 10 ** e);
    if (found.length > 1) return found.filter((_, i) => i % Math.ceil(found.length / most) === 0);
  }
  const rough = (high - low) / most, base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * base).find(s => s >= rough), found = [];
  for (let i = Math.ceil(low / step); i <= high / step + 1e-9; i++) found.push(i * step);
  return found;
}
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const x of values) if (x !== null) { low = Math.min(low, x); high = Math.max(high, x); }
  return [low, high];
}
const values = (chart, names) => chart.lines.flatMap(l => names.flatMap(n => l[n] ?? []));

function scales(chart, width, height) {
  let [x0, x1] = extent(values(chart, ["x"]).filter(x => !chart.log || x > 0));
  if (!(x1 > x0)) [x0, x1] = chart.log && x0 > 0 ? [x0 / 2, x0 * 2] : [0, Math.max(1, 2 * x1)];
  if (!(x0 > 0)) chart.log = false;
  let [y0, y1] = extent([...values(chart, ["y", "low", "high"]),
                         ...chart.guides.filter(g => g[0] === "y").map(g => g[1])]);
  const pad = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 1;
  const floor = y0 >= 0 ? 0 : -Infinity;  // what is never negative has no axis below 0
  [y0, y1] = [Math.max(floor, y0 - pad), y1 + pad];
  const scale = chart.log ? Math.log : x => x;
  const [a, b] = [scale(x0), scale(x1)];
  const inner = width - MARGIN.left - MARGIN.right, tall = height - MARGIN.top - MARGIN.bottom;
  return { x0, x1, y0, y1, x: v => MARGIN.left + inner * (scale(v) - a) / (b - a),
           y: v => MARGIN.top + tall * (y1 - v) / (y1 - y0) };
}
function axes(svg, chart, s, width, height) {
  const bottom = height - MARGIN.bottom, place = { "text-anchor": "end", "dominant-baseline": "middle" };
  for (const y of ticks(s.y0, s.y1, 5, false)) {
    draw("line", svg, { x1: MARGIN.left, x2: width - MARGIN.right, y1: s.y(y), y2: s.y(y),
                        stroke: "var(--line)" });
    draw("text", svg, { x: MARGIN.left - 6, y: s.y(y), ...place }, number(y, chart.unit));
  }
  for (const x of ticks(s.x0, s.x1, Math.max(2, Math.floor(width / 90)), chart.log)) {
    draw("line", svg, { x1: s.x(x), x2: s.x(x), y1: bottom, y2: bottom + 4, stroke: "var(--gray)" });
    const atEnd = s.x(x) > width - MARGIN.right - 30;
    draw("text", svg, { x: atEnd ? width - MARGIN.right : s.x(x), y: bottom + 15,
                        "text-anchor": atEnd ? "end" : "middle" }, number(x));
  }
  draw("line", svg, { x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom,
                      stroke: "var(--gray)" });
  const middle = (MARGIN.left + width - MARGIN.right) / 2;
  draw("text", svg, { x: middle, y: height - 4, "text-anchor": "middle" }, chart.axis);
  const dots = { stroke: "var(--ink)", "stroke-dasharray": "1 3" };
  for (const [axis, value, text] of chart.guides) {
    if (axis === "y") {
      draw("line", svg, { x1: MARGIN.left, x2: width - MARGIN.right, y1: s.y(value), y2: s.y(value), ...dots });
      draw("text", svg, { x: MARGIN.left + 6, y: s.y(value) - 4 }, text);
    } else if (value >= s.x0 && value <= s.x1) {
      const right = s.x(value) > middle;  // the text goes where there is space for it
      draw("line", svg, { x1: s.x(value), x2: s.x(value), y1: MARGIN.top, y2: bottom, ...dots });
      draw("text", svg, { x: s.x(value) + (right ? -5 : 5), y: bottom - 6,
                          "text-anchor": right ? "end" : "start" }, text);
    }
  }
  for (const [step] of chart.marks)
    if (step >= s.x0 && step <= s.x1)
      draw("line", svg, { x1: s.x(step), x2: s.x(step), y1: MARGIN.top, y2: bottom, class: "mark",
                          stroke: "var(--red)", "stroke-dasharray": "4 3", opacity: 0.7 });
}
function path(xs, ys, s) {
  let text = "", pen = "M";
  xs.forEach((x, i) => {
    if (ys[i] === null || x < s.x0) { pen = "M"; return; }
    text += `${pen}${s.x(x).toFixed(1)} ${s.y(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return text;
}
function lines(svg, chart, s) {
  const inside = chart.lines.filter(l => l.kind !== "dots");
  for (const line of [...inside, ...chart.lines.filter(l => l.kind === "dots")]) {
    if (line.kind === "band") {
      const back = path([...line.x].reverse(), [...line.low].reverse(), s).replace(/^M/, "L");
      draw("path", svg, { d: path(line.x, line.high, s) + back + "Z", fill: color(line), opacity: 0.14 });
    } else if (line.kind === "dots" || line.x.length === 1) {
      line.x.forEach((x, i) => {
        if (x < s.x0 || line.y[i] === null) return;
        const at = s.x(x), e = line.error?.[i] ?? 0;
        draw("line", svg, { x1: at, x2: at, y1: s.y(line.y[i] - e), y2: s.y(line.y[i] + e),
                            stroke: color(line) });
        draw("circle", svg, { cx: at, cy: s.y(line.y[i]), r: 3.5, fill: color(line) });
      });
    } else {
      draw("path", svg, { d: path(line.x, line.y, s), fill: "none", stroke: color(line),
                          "stroke-width": line.kind === "dash" ? 1.3 : 1.8, "stroke-linejoin": "round",
                          ...(line.kind === "dash" ? { "stroke-dasharray": "5 4" } : {}) });
    }
  }
}
function tell(chart, s, tip, cursor, event) {
  const box = cursor.ownerSVGElement.getBoundingClientRect(), at = event.clientX - box.left;
  let best = null;
  for (const x of new Set(values(chart, ["x"])))
    if (x >= s.x0 && (best === null || Math.abs(s.x(x) - at) < Math.abs(s.x(best) - at))) best = x;
  if (best === null) return;
  const texts = [`${chart.axis.replace(/^compute \((.*)\)$/, "$1")} ${number(best)}`];
  for (const [step, text] of chart.marks) if (Math.abs(s.x(step) - at) < 5) texts.push(`${step}: ${text}`);
  for (const line of chart.lines) {
    const i = line.x.indexOf(best);
    if (!line.name || i < 0) continue;
    const value = line.kind === "band"
      ? `${number(line.low[i], chart.unit)} to ${number(line.high[i], chart.unit)}`
      : line.y[i] === null ? "none" : number(line.y[i], chart.unit);
    const error = line.error?.[i] ? ` ± ${number(line.error[i], chart.unit)}` : "";
    texts.push(`${line.name}: ${value}${error}`);
  }
  cursor.setAttribute("x1", s.x(best));
  cursor.setAttribute("x2", s.x(best));
  cursor.setAttribute("opacity", 1);
  tip.hidden = false;
  tip.textContent = texts.join("\n");
  const left = s.x(best) > box.width / 2;
  tip.style.left = left ? "auto" : `${s.x(best) + 10}px`;
  tip.style.right = left ? `${box.width - s.x(best) + 10}px` : "auto";
  tip.style.top = `${Math.max(0, event.clientY - box.top)}px`;
}
function plot(figure, chart) {
  const holder = figure.querySelector(".plot"), width = holder.clientWidth || 370;
  const height = chart.unit === "fraction" && chart.guides.length ? 320 : 210;
  const svg = draw("svg", make("div", null), { width, height, viewBox: `0 0 ${width} ${height}`,
                                               role: "img", "aria-label": chart.title });
  const s = scales(chart, width, height);
  axes(svg, chart, s, width, height);
  lines(svg, chart, s);
  const cursor = draw("line", svg, { y1: MARGIN.top, y2: height - MARGIN.bottom, opacity: 0,
                                     stroke: "var(--gray)" });
  const tip = figure.querySelector(".tip");
  svg.onpointermove = svg.onpointerdown = event => tell(chart, s, tip, cursor, event);
  svg.onpointerleave = () => { tip.hidden = true; cursor.setAttribute("opacity", 0); };
  holder.replaceChildren(svg);
}
function build(figure) {
  const chart = charts[figure.dataset.chart];
  const unit = chart.unit && chart.unit !== "fraction" ? ` [${chart.unit}]` : "";
  make("h3", figure, chart.title + unit);
  if (chart.log) {
    const button = make("button", figure, "linear");
    button.onclick = () => {
      button.textContent = chart.log ? "logarithmic" : "linear";
      chart.log = !chart.log;
      plot(figure, chart);
    };
  }
  const holder = make("div", figure, "", "plot");
  holder.style.position = "relative";
  const named = chart.lines.filter(l => l.name), list = make("ul", figure);
  for (const line of named.length > 1 ? named : []) {
    const item = make("li", list);
    make("i", item, "", line.kind).style.background = color(line);
    item.append(line.name);
  }
  if (chart.notes.length) {
    const about = make("details", figure, "", "about");
    make("summary", about, "what this is");
    for (const note of chart.notes) make("p", about, note);
  }
  make("div", figure, "", "tip").hidden = true;
  plot(figure, chart);
}
const figures = document.querySelectorAll("figure[data-chart]");
figures.forEach(build);
let seen = document.body.clientWidth;
window.onresize = () => {
  if (document.body.clientWidth === seen) return;
  seen = document.body.clientWidth;
  figures.forEach(figure => plot(figure, charts[figure.dataset.chart]));
};
for (const section of document.querySelectorAll("body > section")) {
  const link = make("a", document.getElementById("nav"), section.querySelector("h2").textContent);
  link.href = "#" + encodeURIComponent(section.id);
}
document.documentElement.dataset.charts = figures.length;
document.documentElement.dataset.overflow = document.body.scrollWidth - document.body.clientWidth;
