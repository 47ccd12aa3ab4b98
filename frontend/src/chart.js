// The chart: uPlot, fed with columns; rebuilt only when its structure changes.
import uPlot from "uplot";
import { band, positive } from "./columns.js";
import { duration, number } from "./format.js";
import { near, paint } from "./marks.js";
import { dash, stroke } from "./palette.js";
import { smooth } from "./smoothing.js";

const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
const INVISIBLE = { points: { show: false }, stroke: "transparent", width: 0 };

export class Chart {
  #host;
  #events;
  #plot = null;
  #structure = "";
  #theme;
  #zoomed = false;
  #picture = null;
  #highlighted = null;

  /**
   * `onCursor(index | null, left, top)` follows the pointer, in CSS pixels, also that of
   * another chart with the same `key`, with which this one is zoomed too. `onUnzoom()` is
   * called at a double click, `onPan(min, max)` when another part of the x axis is wanted,
   * and `onScale()` when another one is shown.
   */
  constructor(host, events) {
    this.#host = host;
    this.#events = events;
  }

  /**
   * Draws a picture:
   * { aligned, asBand, x: "step" | "time", span: [from, to], log, smoothing, label, marks,
   * theme, height }. A zoom stays.
   */
  draw(picture) {
    this.#picture = picture;
    this.#theme = picture.theme;
    const { columns, series, bands } = compose(picture, this.#highlighted, () => this.#theme);
    const structure = JSON.stringify([
      picture.asBand, picture.x, picture.log, picture.label, picture.smoothing > 0,
      [...picture.aligned.ranks.keys()],
      series.length, this.#highlighted,
    ]);
    if (structure !== this.#structure) this.#build(picture, series, bands, columns);
    this.#structure = structure;
    this.#fit();
    this.#setData(columns);
  }

  /** Brings one rank to the front; null brings none. */
  highlight(rank) {
    if (rank === this.#highlighted) return;
    this.#highlighted = rank;
    if (this.#picture) this.draw(this.#picture);
  }

  /** Moves the cursor to a position of the x axis, as the pointer would. */
  pointAt(index) {
    if (!this.#plot) return;
    const left = this.#plot.valToPos(this.#plot.data[0][index], "x");
    this.#plot.setCursor({ left, top: this.#plot.over.clientHeight / 2 }, true, true);
  }

  /** Takes the cursor away, as the pointer does when it leaves. */
  leave() {
    this.#plot?.setCursor({ left: -10, top: -10 }, true, true);
  }

  /** Lets the next drawing show the whole chart. */
  unzoom() {
    this.#zoomed = false;
  }

  /** Shows a part of the x axis. */
  show(min, max) {
    this.#zoomed = true;
    this.#plot?.setScale("x", { min, max });
  }

  /** Where the plane is: { left, width, min, max }; null before the first drawing. */
  get plane() {
    if (!this.#plot) return null;
    const { left, width } = this.#plot.bbox;
    const { min, max } = this.#plot.scales.x;
    return { left: left / devicePixelRatio, width: width / devicePixelRatio, min, max };
  }

  /** Asks for the part of the x axis that lies by a share of the width beside this one. */
  pan(share) {
    if (!this.#plot) return;
    const { min, max } = this.#plot.scales.x;
    const [from, to] = this.#picture.span;
    const wanted = share * (max - min);
    const by = wanted > 0 ? Math.min(wanted, Math.max(0, to - max)) : Math.max(wanted, Math.min(0, from - min));
    if (by) this.#events.onPan(min + by, max + by);
  }

  /** Asks for a part that is `factor` times as wide, around the cursor or the middle. */
  zoom(factor) {
    if (!this.#plot) return;
    const { min, max } = this.#plot.scales.x;
    const [from, to] = this.#picture.span;
    const { idx } = this.#plot.cursor;
    const middle = idx === null || idx === undefined ? (min + max) / 2 : this.#plot.data[0][idx];
    const width = factor * (max - min);
    if (width >= to - from) return this.#events.onUnzoom();
    const left = Math.min(Math.max(from, middle - width / 2), to - width);
    this.#events.onPan(left, left + width);
  }

  /** The marks beside a position of the x axis. */
  marksAt(index) {
    if (!this.#plot || !this.#picture.marks.length) return [];
    return near(this.#plot, this.#picture.marks, this.#plot.valToPos(this.#plot.data[0][index], "x"));
  }

  destroy() {
    this.#plot?.destroy();
  }

  #build(picture, series, bands, columns) {
    this.#plot?.destroy();
    this.#zoomed = false;
    const options = {
      width: this.#width(),
      height: picture.height,
      legend: { show: false },
      padding: [12, 24, 0, 0],
      scales: { x: { time: false, range: (_, min, max) => (this.#zoomed ? [min, max] : this.#picture.span) }, y: picture.log ? { distr: 3 } : {} },
      axes: this.#axes(picture),
      series: [{}, ...series],
      bands,
      cursor: {
        y: false, drag: { x: true, y: false }, points: { size: 7 },
        bind: { mousedown: (_, __, zoom) => (event) => (event.shiftKey ? this.#drag(event) : zoom(event)) },
        sync: { key: this.#events.key, scales: ["x", null], setSeries: false },
      },
      hooks: {
        setCursor: [(plot) => this.#events.onCursor(plot.cursor.idx, plot.cursor.left, plot.cursor.top)],
        draw: [(plot) => paint(plot, this.#picture.marks, this.#theme)],
        setSelect: [(plot) => (this.#zoomed = plot.select.width > 0)],
        setScale: [() => this.#events.onScale()],
      },
    };
    this.#plot = new uPlot(options, columns, this.#host);
    this.#plot.over.addEventListener("dblclick", this.#events.onUnzoom);
    this.#plot.over.addEventListener("wheel", (event) => this.#onWheel(event), { passive: false });
  }

  /** Pans with the pointer until the button is released. */
  #drag(event) {
    event.preventDefault();
    let x = event.clientX;
    const width = this.#plot.over.clientWidth;
    const ending = new AbortController();
    const move = ({ clientX }) => {
      this.pan((x - clientX) / width);
      x = clientX;
    };
    window.addEventListener("mousemove", move, { signal: ending.signal });
    window.addEventListener("mouseup", () => ending.abort(), { signal: ending.signal });
  }

  /** A touchpad, or a wheel with Shift, pans a zoomed chart; otherwise the page scrolls. */
  #onWheel(event) {
    const delta = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (!this.#zoomed || Math.abs(delta) < Math.abs(event.shiftKey ? 0 : event.deltaY)) return;
    event.preventDefault();
    this.pan(delta / this.#plot.over.clientWidth);
  }

  #setData(columns) {
    const { min, max } = this.#plot.scales.x;
    this.#plot.setData(columns, !this.#zoomed);
    if (this.#zoomed) this.#plot.setScale("x", { min, max });
  }

  #axes({ x, label }) {
    const common = {
      stroke: () => this.#theme.text,
      font: this.#theme.font,
      labelFont: this.#theme.font,
      labelSize: 20,
      grid: { stroke: () => this.#theme.grid, width: 1 },
      ticks: { stroke: () => this.#theme.grid, width: 1, size: 4 },
    };
    const time = { incrs: SECONDS, values: (_, splits) => splits.map(duration) };
    return [
      { ...common, size: 32, label: x, ...(x === "time" ? time : {}) },
      { ...common, size: 64, label, values: (_, splits) => splits.map((v) => (v === null ? "" : number(v))) },
    ];
  }

  #fit() {
    const { height } = this.#picture;
    if (this.#width() !== this.#plot.width || height !== this.#plot.height) {
      this.#plot.setSize({ width: this.#width(), height });
    }
  }

  #width() {
    return Math.max(200, this.#host.clientWidth);
  }
}

/** uPlot's columns, series and bands of a picture. */
function compose({ aligned, asBand, log, smoothing }, highlighted, theme) {
  const shape = asBand ? bandOf(aligned, smoothing, theme) : linesOf(aligned, highlighted, theme);
  const front = aligned.ranks.get(highlighted);
  if (asBand && front) {
    shape.columns.push(smooth(aligned.x, front.mean, smoothing));
    shape.series.push(line(highlighted, theme, 2.5));
  }
  const columns = log ? shape.columns.map(positive) : shape.columns;
  return { ...shape, columns: [aligned.x, ...columns] };
}

function bandOf(aligned, smoothing, theme) {
  const { low, middle, high } = band(aligned);
  return {
    columns: [high, low, smooth(aligned.x, middle, smoothing)],
    series: [
      { ...INVISIBLE, spanGaps: true },
      { ...INVISIBLE, spanGaps: true },
      { stroke: () => theme().middle, width: 2, spanGaps: true, points: { show: false } },
    ],
    bands: [{ series: [1, 2], fill: () => theme().band }],
  };
}

function linesOf(aligned, highlighted, theme) {
  const columns = [], series = [], bands = [];
  for (const [rank, { mean, low, high, raw }] of aligned.ranks) {
    const dimmed = highlighted !== null && highlighted !== rank;
    if (raw) {
      // What was smoothed, in the background.
      series.push({ ...line(rank, theme, 1, dimmed ? 0.1 : 0.25), points: { show: false } });
      columns.push(raw);
    }
    series.push(line(rank, theme, highlighted === rank ? 2.5 : 1.5, dimmed ? 0.25 : 1));
    columns.push(mean);
    if (raw || dimmed || low.every((value, i) => value === high[i])) continue;
    // Means of buckets: show how far the values in each bucket went.
    const at = columns.push(high, low);
    series.push({ ...INVISIBLE, spanGaps: true }, { ...INVISIBLE, spanGaps: true });
    bands.push({ series: [at - 1, at], fill: () => `color-mix(in srgb, ${stroke(rank, theme())} 18%, transparent)` });
  }
  return { columns, series, bands };
}

function line(rank, theme, width, alpha = 1) {
  return {
    stroke: () => stroke(rank, theme()),
    dash: dash(rank),
    width,
    alpha,
    spanGaps: true,
    points: { show: (plot, i, first, last) => last - first < 30, size: 5 },
  };
}
