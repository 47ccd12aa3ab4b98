// Things that happened to the ranks: where they lie in a chart, and how they look.
//
// A mark has a time. In a chart over steps it lies at the step that any rank had logged
// last, so that it divides the values from before it from those after it.

const REACH_PX = 6;
/** In the order of painting, in which what has followed a death comes before it. */
const COLOURS = {
  commit: null, replaced: "#009E73", resized: "#009E73", restarted: "#009E73",
  interrupted: "#E69F00", nan: "#CC79A7", lost: "#D55E00",
};
const KINDS = Object.keys(COLOURS);

/** The marks since the metric's first value, each with its `x` over the steps. */
export function placeBySteps(marks, metric) {
  const every = [...metric.ranks.values()];
  const placed = marks.map((mark) => ({ ...mark, x: lastStep(every, mark.time) }));
  return placed.filter(({ x }) => x !== null);
}

/** The same over seconds since `origin`. What comes after the last value lies at its end. */
export function placeByTime(marks, metric, origin, end) {
  return placeBySteps(marks, metric).map((mark) => ({ ...mark, x: Math.min(mark.time - origin, end) }));
}

/** The placed marks beside a position of the x axis, on a uPlot. */
export function near(plot, placed, left) {
  return placed.filter((mark) => Math.abs(plot.valToPos(mark.x, "x") - left) <= REACH_PX);
}

/**
 * Draws the placed marks that are within the chart: a line, and a flag unless it is a commit's.
 *
 * Where marks of several kinds are at one step, the flags lie below each other, and dashes show
 * the line of each.
 */
export function paint(plot, placed, theme) {
  const { ctx, bbox } = plot;
  const scale = devicePixelRatio;
  const { min, max } = plot.scales.x;
  ctx.save();
  const shown = placed.filter(({ x }) => x >= min && x <= max);
  const columns = shown.map((mark) => ({ ...mark, left: Math.round(plot.valToPos(mark.x, "x", true)) }));
  for (const { kind, left, above } of stacked(columns)) {
    ctx.strokeStyle = ctx.fillStyle = COLOURS[kind] ?? theme.text;
    ctx.lineWidth = scale;
    ctx.globalAlpha = kind === "commit" ? 0.35 : 1;
    ctx.setLineDash(kind === "commit" ? [scale, 3 * scale] : above ? [6 * scale, 6 * scale] : []);
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    if (kind !== "commit") flag(ctx, left, bbox.top + above * 9 * scale, 5 * scale);
  }
  ctx.restore();
}

/**
 * The marks in the order of painting, one of each kind in a column.
 *
 * @param columns - Marks with the position `left` of their column.
 * @returns The marks with `above`, the number of flags that lie above theirs.
 */
export function stacked(columns) {
  const kinds = new Map();
  const ordered = [...columns].sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind));
  const first = ordered.filter(({ kind, left }) => {
    const here = kinds.get(left) ?? kinds.set(left, new Set()).get(left);
    return !here.has(kind) && here.add(kind);
  });
  const flags = new Map();
  return first.map((mark) => {
    const above = flags.get(mark.left) ?? 0;
    if (mark.kind !== "commit") flags.set(mark.left, above + 1);
    return { ...mark, above };
  });
}

function flag(ctx, left, top, size) {
  ctx.beginPath();
  ctx.moveTo(left - size, top - size);
  ctx.lineTo(left + size, top - size);
  ctx.lineTo(left, top + size / 2);
  ctx.fill();
}

/** The step of the last value that any rank had logged at a time; null before the first. */
function lastStep(every, time) {
  let [latest, step] = [-Infinity, null];
  for (const { times, steps } of every) {
    const i = upTo(times, time) - 1;
    if (i >= 0 && times[i] > latest) [latest, step] = [times[i], steps[i]];
  }
  return step;
}

/** How many of the ascending numbers are at most `limit`. */
function upTo(numbers, limit) {
  let [low, high] = [0, numbers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= limit) low = middle + 1;
    else high = middle;
  }
  return low;
}
