// Lines up the ranks' series on one x axis: what the chart draws.
//
// In a column, undefined is "nothing here" (the line goes on), null is a gap: a value
// that is no finite number.

import { smooth } from "./smoothing.js";

const MAX_BINS = 600;

/** The metric over steps. Buckets of the ranks share their steps. */
export function byStep(metric, ranks) {
  const chosen = pick(metric, ranks);
  const x = sortedUnion(chosen.map(([, series]) => series.steps));
  const index = new Map(x.map((step, i) => [step, i]));
  return align(x, chosen, (series) =>
    // As long as the union is the union: the common case costs nothing.
    series.steps.length === x.length ? inPlace(series) : scatter(series, x.length, (i) => index.get(series.steps[i])),
  );
}

/** The metric over seconds since `origin`. Ranks meet in equal bins of time. */
export function byTime(metric, ranks, origin) {
  const chosen = pick(metric, ranks);
  const end = Math.max(...chosen.map(([, series]) => series.times.at(-1) ?? origin));
  const longest = Math.max(0, ...chosen.map(([, series]) => series.times.length));
  const bins = Math.min(MAX_BINS, longest);
  const width = (end - origin) / bins || 1;
  const x = Array.from({ length: bins }, (_, i) => (i + 0.5) * width);
  const binOf = (time) => Math.max(0, Math.min(bins - 1, Math.floor((time - origin) / width)));
  return align(x, chosen, (series) => scatter(series, bins, (i) => binOf(series.times[i])));
}

/** The ranks' lines smoothed over a length of the x axis; `raw` is what they were. */
export function smoothed(aligned, length) {
  if (!length) return aligned;
  const each = ([rank, columns]) => [rank, { ...columns, mean: smooth(aligned.x, columns.mean, length), raw: columns.mean }];
  return { x: aligned.x, ranks: new Map([...aligned.ranks].map(each)) };
}

/** Least, middle and greatest over the ranks, at each x. */
export function band(aligned) {
  const each = [...aligned.ranks.values()];
  const means = new Float64Array(each.length);
  const low = [], middle = [], high = [];
  for (let i = 0; i < aligned.x.length; i++) {
    let count = 0, least = Infinity, most = -Infinity;
    for (const rank of each) {
      if (isNumber(rank.mean[i])) means[count++] = rank.mean[i];
      if (isNumber(rank.low[i])) least = Math.min(least, rank.low[i]);
      if (isNumber(rank.high[i])) most = Math.max(most, rank.high[i]);
    }
    low.push(least === Infinity ? undefined : least);
    high.push(most === -Infinity ? undefined : most);
    middle.push(count ? median(means.subarray(0, count).sort()) : undefined);
  }
  return { x: aligned.x, low, middle, high };
}

/** The column without what a logarithmic axis cannot show. */
export function positive(column) {
  return column.map((value) => (value <= 0 ? null : value));
}

function pick(metric, ranks) {
  return ranks.filter((r) => metric.ranks.has(r)).map((r) => [r, metric.ranks.get(r)]);
}

function sortedUnion(lists) {
  const longest = lists.reduce((a, b) => (b.length > a.length ? b : a), []);
  const known = new Set(longest);
  for (const list of lists) for (const value of list) known.add(value);
  if (known.size === longest.length) return [...longest];
  return [...Float64Array.from(known).sort()];
}

function align(x, chosen, columnsOf) {
  return { x, ranks: new Map(chosen.map(([rank, series]) => [rank, columnsOf(series)])) };
}

function inPlace({ means, lows, highs }) {
  return { mean: finite(means), low: finite(lows), high: finite(highs) };
}

function scatter(series, length, slotOf) {
  const mean = Array(length).fill(undefined);
  const low = Array(length).fill(undefined);
  const high = Array(length).fill(undefined);
  const counts = new Uint32Array(length);
  for (let i = 0; i < series.means.length; i++) {
    const slot = slotOf(i);
    const n = ++counts[slot];
    mean[slot] = n === 1 ? series.means[i] : mean[slot] + (series.means[i] - mean[slot]) / n;
    low[slot] = n === 1 ? series.lows[i] : Math.min(low[slot], series.lows[i]);
    high[slot] = n === 1 ? series.highs[i] : Math.max(high[slot], series.highs[i]);
  }
  return { mean: finite(mean), low: finite(low), high: finite(high) };
}

/** The column itself where it can be drawn as it is; it is only read. */
function finite(column) {
  const drawable = (v) => v === undefined || Number.isFinite(v);
  return column.every(drawable) ? column : column.map((v) => (drawable(v) ? v : null));
}

function isNumber(value) {
  return value !== undefined && value !== null;
}

function median(sorted) {
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
