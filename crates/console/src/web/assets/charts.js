// Charts: lines over time (uPlot), small lines in tables, and heat maps.

import { bytes, clock, element, number, span } from "./parts.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const COLOURS = ["--read", "--write", "--other", "--mark"];

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600];
const POWERS = Array.from({ length: 51 }, (_, at) => 2 ** at);
/** So few points are shown as points, since one makes no line. */
const FEW = 3;

const FORMS = { number, bytes: (value) => `${bytes(value)}/s`, span, plain: number, size: bytes };

/** Lines over time. `series` are { label, colour }; `marks()` are { ms, text, level }. */
export class TimeChart {
  constructor(title, series, form, { marks = () => [], height = 170, log = false } = {}) {
    Object.assign(this, { series, form: FORMS[form], marks, height, log, isBytes: form === "bytes" });
    this.data = [[], ...series.map(() => [])];
    this.box = element("div", { class: "plot" });
    this.node = element("figure", {}, element("figcaption", {}, title), this.box);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.box);
  }

  make() {
    const ink = colour("--quiet");
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "11px system-ui" };
    const text = this.form;
    this.plot = new uPlot({
      width: Math.max(this.box.clientWidth, 120),
      height: this.height,
      cursor: { points: { size: 6 }, y: false },
      scales: { y: this.log ? { distr: 3, log: 10 } : { range: (_, low, high) => [0, Math.max(high * 1.08, 1e-9)] } },
      axes: [
        { ...axis, size: 28, incrs: SECONDS, values: (_, splits) => splits.map((at) => clock(at * 1e9).slice(-8)), space: 76 },
        { ...axis, size: 62, ...(this.isBytes ? { incrs: POWERS } : {}), ...(this.log ? { grid: { show: false } } : {}),
          values: (_, splits) => splits.map((at) => (at === null || (this.log && Math.log10(at) % 1 > 1e-9) ? "" : text(at))) },
      ],
      series: [
        { value: (_, at) => (at === null ? "–" : clock(at * 1e9)) },
        ...this.series.map(({ label, colour: name }) => ({
          label, stroke: colour(name), width: 1.5,
          points: { show: (plot) => plot.data[0].length <= FEW, size: 4 },
          value: (_, value) => (value === null || value === undefined ? "–" : text(value)),
        })),
      ],
      hooks: { draw: [(plot) => this.drawMarks(plot)] },
    }, this.data, this.box);
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const { ms, level } of this.marks()) {
      const x = plot.valToPos(ms / 1000, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(level === "error" ? "--bad" : level === "warning" ? "--warn" : "--mark");
      ctx.setLineDash([3, 3]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** Times in milliseconds, and a list of values for each series. */
  set(times, values) {
    const last = times.at(-1) ?? 0;
    this.data = [times.map((ms) => ms / 1000), ...values.map((list) => list.map((value) => (this.log && !value ? null : value)))];
    if (!this.plot) { if (this.box.clientWidth) this.make(); return; }
    if (last) this.plot.setData(this.data);
  }

  resize() {
    if (!this.plot) this.make();
    else this.plot.setSize({ width: Math.max(this.box.clientWidth, 120), height: this.height });
  }

  restyle() { this.plot?.destroy(); this.plot = undefined; this.make(); }

  end() { this.observer.disconnect(); this.plot?.destroy(); }
}

/** A small line of numbers, on a canvas of its own. */
export function spark(canvas, values) {
  const scale = devicePixelRatio || 1;
  const [width, height] = [96, 22];
  if (canvas.width !== width * scale) { canvas.width = width * scale; canvas.height = height * scale; }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const high = Math.max(...values, 1e-9);
  context.strokeStyle = colour("--read");
  context.lineWidth = 1.25;
  context.beginPath();
  values.forEach((value, index) => {
    const x = width - (values.length - 1 - index) * (width / 59);
    const y = height - 2 - (value / high) * (height - 4);
    if (index === 0) context.moveTo(x, y); else context.lineTo(x, y);
  });
  context.stroke();
}

/** The latencies of each second: a row for each power of two, darker for more requests. */
export class HeatMap {
  constructor(title) {
    this.canvas = element("canvas", { class: "heat", role: "img" });
    this.words = element("span", { class: "quiet" });
    this.node = element("figure", {}, element("figcaption", {}, title, " ", this.words), this.canvas);
    this.columns = [];
    this.times = [];
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => { this.words.textContent = ""; });
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  set(times, columns, first) { Object.assign(this, { times, columns, first }); this.draw(); }

  frame() {
    const rows = this.columns[0]?.length ?? 24;
    const used = this.columns.reduce(([low, high], column) => {
      column.forEach((count, row) => { if (count) { low = Math.min(low, row); high = Math.max(high, row); } });
      return [low, high];
    }, [rows, -1]);
    const [low, high] = used[1] < 0 ? [3, 14] : [Math.max(used[0] - 1, 0), Math.min(used[1] + 1, rows - 1)];
    const width = this.canvas.clientWidth - 62;
    const height = this.canvas.clientHeight;
    const step = Math.max(width / Math.max(this.columns.length, 120), 1);
    return { low, high, width, height, step, left: 62, row: height / (high - low + 1) };
  }

  draw() {
    const scale = devicePixelRatio || 1;
    const { canvas } = this;
    if (!canvas.clientWidth) return;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const frame = this.frame();
    const highest = Math.max(1, ...this.columns.map((column) => Math.max(...column)));
    context.fillStyle = colour("--heat");
    this.columns.forEach((column, index) => {
      const x = frame.left + frame.width - (this.columns.length - index) * frame.step;
      if (x < frame.left) return;
      for (let row = frame.low; row <= frame.high; row += 1) {
        if (!column[row]) continue;
        context.globalAlpha = 0.12 + 0.88 * (Math.log1p(column[row]) / Math.log1p(highest));
        context.fillRect(x, frame.height - (row - frame.low + 1) * frame.row, Math.ceil(frame.step), Math.ceil(frame.row) - 0.5);
      }
    });
    context.globalAlpha = 1;
    context.fillStyle = colour("--quiet");
    context.font = "11px system-ui";
    context.textAlign = "right";
    const every = Math.ceil(16 / frame.row);
    for (let row = frame.low; row <= frame.high; row += every) {
      context.fillText(span(2 ** (row + this.first + 1)), 56, frame.height - (row - frame.low) * frame.row - 3);
    }
    this.canvas.setAttribute("aria-label", this.summary());
  }

  summary() {
    const sums = this.columns.reduce((all, column) => column.map((count, row) => count + (all[row] ?? 0)), []);
    const total = sums.reduce((one, other) => one + other, 0);
    if (!total) return "No reads or writes in this time.";
    const top = sums.indexOf(Math.max(...sums));
    return `Most of ${number(total)} reads and writes took up to ${span(2 ** (top + this.first + 1))}.`;
  }

  point(event) {
    const frame = this.frame();
    const index = this.columns.length - 1 - Math.floor((frame.left + frame.width - event.offsetX) / frame.step);
    const row = frame.low + Math.floor((frame.height - event.offsetY) / frame.row);
    const column = this.columns[index];
    if (!column || event.offsetX < frame.left) { this.words.textContent = ""; return; }
    this.words.textContent = `${clock(this.times[index] * 1e6)}: ${number(column[row] ?? 0)} of ${span(2 ** (row + this.first))} to ${span(2 ** (row + this.first + 1))}`;
  }

  restyle() { this.draw(); }

  end() { this.observer.disconnect(); }
}

/** A curve of x and y values, such as a miss-ratio curve. */
export function curve(title, points, { x = bytes, y = (value) => value.toFixed(2), mark } = {}) {
  const box = element("div", { class: "plot" });
  const node = element("figure", {}, element("figcaption", {}, title), box);
  requestAnimationFrame(() => {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    new uPlot({
      width: Math.max(box.clientWidth, 120), height: 160,
      scales: { x: { time: false }, y: { range: [0, 1] } },
      axes: [{ ...axis, values: (_, splits) => splits.map(x) }, { ...axis, size: 50, values: (_, splits) => splits.map(y) }],
      series: [{ label: "size", value: (_, value) => (value === null ? "–" : x(value)) },
        { label: "miss ratio", stroke: colour("--read"), width: 1.5, points: { show: false }, value: (_, value) => (value === null ? "–" : y(value)) }],
      hooks: { draw: [(plot) => {
        if (mark === undefined) return;
        const at = plot.valToPos(mark, "x", true);
        plot.ctx.strokeStyle = colour("--mark");
        plot.ctx.setLineDash([3, 3]);
        plot.ctx.beginPath();
        plot.ctx.moveTo(at, plot.bbox.top);
        plot.ctx.lineTo(at, plot.bbox.top + plot.bbox.height);
        plot.ctx.stroke();
      }] },
    }, [points.map(([size]) => size), points.map(([, ratio]) => ratio)], box);
  });
  return node;
}
