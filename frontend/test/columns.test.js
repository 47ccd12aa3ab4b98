import assert from "node:assert/strict";
import { test } from "node:test";
import { band, byStep, byTime, positive } from "../src/columns.js";
import { Store } from "../src/store.js";
import { rows, update } from "./messages.js";

function metric(series) {
  const store = new Store();
  store.apply(...update(0, series.map(([rank, values]) => ["loss", rank, 1, 0, values])));
  return store.metrics.get("loss");
}

test("ranks line up on the union of their steps", () => {
  const ahead = metric([[0, rows([5, 4, 3])], [1, rows([7, 6])], [2, rows([1], 9)]]);
  const { x, ranks } = byStep(ahead, [0, 1, 2]);
  assert.deepEqual(x, [0, 1, 2, 9]);
  assert.deepEqual(ranks.get(1).mean, [7, 6, undefined, undefined]);
  assert.deepEqual(ranks.get(2).mean, [undefined, undefined, undefined, 1]);
});

test("only the chosen ranks are there, and only if they logged", () => {
  const { ranks } = byStep(metric([[0, rows([5])], [1, rows([7])]]), [1, 3]);
  assert.deepEqual([...ranks.keys()], [1]);
});

test("what is no finite number is a gap", () => {
  const { ranks } = byStep(metric([[0, rows([5, NaN, Infinity, 2])]]), [0]);
  assert.deepEqual(ranks.get(0).mean, [5, null, null, 2]);
});

test("a slower rank's line is longer in time", () => {
  const fast = [0, 1, 2, 3].map((i) => [i, 1000 + i, i, i, i]);
  const slow = [0, 1, 2, 3].map((i) => [i, 1000 + 2 * i, i, i, i]);
  const { x, ranks } = byTime(metric([[0, fast], [1, slow]]), [0, 1], 1000);
  assert.equal(x.length, 4);
  assert.deepEqual(ranks.get(0).mean, [0.5, 2, 3, undefined]);
  assert.deepEqual(ranks.get(0).low, [0, 2, 3, undefined]);
  assert.deepEqual(ranks.get(1).mean, [0, 1, 2, 3]);
});

test("one point has a place in time", () => {
  const { x, ranks } = byTime(metric([[0, rows([5])]]), [0], 1000);
  assert.equal(x.length, 1);
  assert.deepEqual(ranks.get(0).mean, [5]);
});

test("no rank at all draws nothing", () => {
  const one = metric([[0, rows([5])]]);
  assert.deepEqual(byStep(one, []).x, []);
  assert.deepEqual(byTime(one, [], 1000).x, []);
});

test("the band spans all ranks around their median", () => {
  const aligned = byStep(metric([[0, rows([1, NaN])], [1, rows([2, 5])], [2, rows([9])]]), [0, 1, 2]);
  const { low, middle, high } = band(aligned);
  assert.deepEqual(low, [1, 5]);
  assert.deepEqual(middle, [2, 5]);
  assert.deepEqual(high, [9, 5]);
});

test("the band keeps the spikes within buckets", () => {
  const bucket = [[0, 1000, 2, 1, 50]];
  const { middle, high } = band(byStep(metric([[0, bucket], [1, rows([2])]]), [0, 1]));
  assert.deepEqual([middle, high], [[2], [50]]);
});

test("a logarithm leaves out what is not positive", () => {
  assert.deepEqual(positive([1, 0, -1, undefined, null]), [1, null, null, undefined, null]);
});

test("64 ranks of 2,000 buckets line up within a frame's time", () => {
  const many = metric(Array.from({ length: 64 }, (_, rank) => [rank, rows(Array(2000).fill(rank))]));
  const ranks = [...many.ranks.keys()];
  const start = performance.now();
  const { middle } = band(byStep(many, ranks));
  assert.equal(middle[1999], 31.5);
  assert.ok(performance.now() - start < 1000);
});
