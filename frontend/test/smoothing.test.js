import assert from "node:assert/strict";
import { test } from "node:test";
import { smooth } from "../src/smoothing.js";

const range = (from, to, by = 1) => Array.from({ length: Math.round((to - from) / by) }, (_, i) => from + i * by);

test("without a length, a column is what it was", () => {
  const column = [1, 2];
  assert.equal(smooth([0, 1], column, 0), column);
});

test("a constant stays", () => {
  for (const value of smooth(range(0, 50), Array(50).fill(3), 10)) assert.ok(Math.abs(value - 3) < 1e-12);
});

test("a step has come half of its way after the length", () => {
  const column = range(0, 2000).map((x) => (x < 1000 ? 0 : 1));
  const smoothed = smooth(range(0, 2000), column, 20);
  assert.ok(Math.abs(smoothed[1000 + 19] - 0.5) < 1e-6);
  assert.ok(Math.abs(smoothed[1000 + 39] - 0.75) < 1e-6);
});

test("a long training is as smooth as a short one", () => {
  // The same steps, once one by one and once in buckets of 8 steps with their means.
  const x = range(0, 4096);
  const values = x.map((step) => Math.sin(step / 300) + (step % 2 ? 0.5 : -0.5));
  const buckets = range(0, 4096, 8);
  const means = buckets.map((first) => values.slice(first, first + 8).reduce((a, b) => a + b, 0) / 8);
  const each = smooth(x, values, 100), coarse = smooth(buckets, means, 100);
  for (let i = 20; i < buckets.length; i++) assert.ok(Math.abs(coarse[i] - each[buckets[i] + 7]) < 0.03, `${i}`);
});

test("a training that goes on does not change the line that was there", () => {
  const values = range(0, 500).map((step) => Math.cos(step));
  const short = smooth(range(0, 100), values.slice(0, 100), 10);
  assert.deepEqual(smooth(range(0, 500), values, 10).slice(0, 100), short);
});

test("gaps stay, and the line goes on after them", () => {
  const smoothed = smooth([0, 1, 2, 3], [1, null, undefined, 1], 5);
  assert.deepEqual(smoothed.map((v) => v ?? null), [1, null, null, 1]);
});
