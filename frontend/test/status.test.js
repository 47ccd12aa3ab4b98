import assert from "node:assert/strict";
import { test } from "node:test";
import { progress, rate } from "../src/status.js";
import { Store } from "../src/store.js";
import { rows, update } from "./messages.js";

function metric(values) {
  const store = new Store();
  store.apply(...update(0, [["loss", 0, 1, 0, values]]));
  return store.metrics.get("loss");
}

test("the rate is that of the last minute", () => {
  const slowThenFast = [...rows([1, 1]), [2, 2000, 1, 1, 1], [12, 2002, 1, 1, 1]];
  assert.equal(rate(metric(slowThenFast)), 5);
});

test("there is no rate without two steps", () => {
  assert.equal(rate(undefined), null);
  assert.equal(rate(metric(rows([1]))), null);
});

test("the progress ends with the time that is left", () => {
  const eta = { unit: "steps", done: 1200, total: 10000, rate: 1.8049, left_s: 4875.4 };
  assert.deepEqual(progress(eta, true), ["1,200 of 10,000 steps", "1.8 steps/s", "1:21:15 left"]);
  assert.deepEqual(progress(eta, false), ["1,200 of 10,000 steps"]);
  const stopped = { unit: "batches", done: 3, total: 9, rate: null, left_s: null };
  assert.deepEqual(progress(stopped, true), ["3 of 9 batches"]);
});
