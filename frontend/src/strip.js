// A row for each rank below the charts: what its time was spent in, along the same x axis.
import { h } from "./dom.js";
import { percent } from "./format.js";
import { position } from "./readout.js";
import { ACTIVITIES, SHARES } from "./store.js";

const MOST_ROWS = 64;
const HEIGHTS = [[8, 16], [16, 11], [32, 7], [MOST_ROWS, 4]];
const GAP = 1;

export class Strip {
  #canvas = h("canvas", { role: "img" });
  #said = h("span", { class: "nbdist-said", "aria-live": "off" });
  #keys = h("div", { class: "nbdist-keys" },
    "Time ", ...ACTIVITIES.map((name) => h("span", { class: "key" }, h("span", { class: `mark ${name}` }), name)), this.#said);
  #picture = null;
  element = h("div", { class: "nbdist-strip" }, this.#keys, this.#canvas);

  constructor() {
    this.#canvas.addEventListener("pointermove", (event) => this.#say(event));
    this.#canvas.addEventListener("pointerleave", () => (this.#said.textContent = ""));
  }

  /**
   * Draws { store, ranks, x: "step" | "time", origin, theme } along the plane of a chart:
   * { left, width, min, max }, in CSS pixels and in units of the axis. Null hides it.
   */
  draw(picture, plane) {
    const rows = picture && plane ? rowsOf(picture) : [];
    this.element.hidden = rows.length === 0;
    if (!rows.length) return;
    const height = HEIGHTS.find(([most]) => rows.length <= most)[1];
    this.#picture = { ...picture, rows, plane, height };
    const width = this.element.clientWidth;
    const scale = devicePixelRatio;
    const size = [Math.round(width * scale), Math.round(rows.length * (height + GAP) * scale)];
    if (this.#canvas.width !== size[0] || this.#canvas.height !== size[1]) {
      [this.#canvas.width, this.#canvas.height] = size;
      Object.assign(this.#canvas.style, { width: `${width}px`, height: `${rows.length * (height + GAP)}px` });
    }
    const context = this.#canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, size[1] / scale);
    rows.forEach((row, i) => this.#drawRow(context, row, i * (height + GAP)));
    this.#canvas.setAttribute("aria-label", summary(rows));
  }

  #drawRow(context, { rank, intervals }, top) {
    const { plane, theme, height } = this.#picture;
    if (height >= 11) {
      context.fillStyle = theme.text;
      context.font = theme.font;
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(String(rank), plane.left - 8, top + height / 2);
    }
    const place = (x) => plane.left + ((Math.min(Math.max(x, plane.min), plane.max) - plane.min) / (plane.max - plane.min)) * plane.width;
    for (const { from, to, shares } of intervals) {
      if (to < plane.min || from > plane.max) continue;
      const [left, right] = [place(from), place(to)];
      let bottom = top + height;
      shares.forEach((share, i) => {
        context.fillStyle = theme.activities[i];
        context.fillRect(left, bottom - share * height, Math.max(right - left, 0.5), share * height);
        bottom -= share * height;
      });
    }
  }

  /** Says what a rank did at the pointer. */
  #say({ offsetX, offsetY }) {
    const { rows, plane, height, x } = this.#picture;
    const row = rows[Math.floor(offsetY / (height + GAP))];
    const at = plane.min + ((offsetX - plane.left) / plane.width) * (plane.max - plane.min);
    const found = row?.intervals.find(({ from, to }) => from <= at && at <= to);
    this.#said.textContent = found ? `rank ${row.rank}, ${position(x, found.to)}: ${inWords(found.shares)}` : "";
  }
}

/** The rows to draw. Of very many ranks, those that communicate least: the slow ones. */
export function rowsOf({ store, ranks, x, origin }) {
  const rows = ranks.map((rank) => ({ rank, intervals: intervalsOf(store, rank, x, origin) }));
  const known = rows.filter(({ intervals }) => intervals.length);
  if (known.length <= MOST_ROWS) return known;
  const communicates = ({ intervals }) => intervals.at(-1).shares[1];
  const slowest = [...known].sort((a, b) => communicates(a) - communicates(b)).slice(0, MOST_ROWS);
  return slowest.sort((a, b) => a.rank - b.rank);
}

/** { from, to, shares }[] of one rank: each sample's shares, since the sample before it. */
function intervalsOf(store, rank, x, origin) {
  const series = ACTIVITIES.map((name) => store.metrics.get(SHARES + name)?.ranks.get(rank));
  if (series.some((each) => !each)) return [];
  const ends = x === "time" ? series[0].times.map((time) => time - origin) : series[0].steps;
  const usual = medianGap(ends);
  // Between cells there are no samples.
  const longest = x === "time" ? 2 * usual : Infinity;
  return ends.map((to, i) => ({
    from: Math.max(i ? ends[i - 1] : to - usual, to - longest),
    to,
    shares: series.map(({ means }) => means[i]),
  }));
}

function medianGap(ends) {
  const gaps = ends.slice(1).map((end, i) => end - ends[i]).sort((a, b) => a - b);
  return gaps[gaps.length >> 1] ?? 1;
}

function inWords(shares) {
  return ACTIVITIES.map((name, i) => `${name} ${percent(100 * shares[i])}`).join(", ");
}

/** What a screen reader says: the last shares of each rank. */
function summary(rows) {
  const last = rows.map(({ rank, intervals }) => `rank ${rank}: ${inWords(intervals.at(-1).shares)}`);
  return `What each rank's time was spent in. Last, ${last.join("; ")}`;
}
