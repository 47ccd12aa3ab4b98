import assert from "node:assert/strict";
import { test } from "node:test";
import { Speed, progress } from "../src/status.js";

test("the speed is that of the last minute", () => {
  const speed = new Speed();
  assert.equal(speed.take(null, 0), null);
  assert.equal(speed.take(0, 0), null, "one step has no speed");
  assert.equal(speed.take(10, 1000), 10);
  for (let second = 2; second <= 90; second++) speed.take(10 + 2 * second, 1000 * second);
  assert.equal(speed.take(192, 91000), 2);
});

test("a training that begins again has the speed of its own steps", () => {
  const speed = new Speed();
  for (const [step, now] of [[0, 0], [1000, 1000]]) speed.take(step, now);
  assert.equal(speed.take(0, 2000), null);
  assert.equal(speed.take(5, 3000), 5);
});

test("the progress ends with the time that is left", () => {
  const eta = { unit: "steps", done: 1200, total: 10000, rate: 1.8049, left_s: 4875.4 };
  assert.deepEqual(progress(eta, true), ["1,200 of 10,000 steps", "1.8 steps/s", "1:21:15 left"]);
  assert.deepEqual(progress(eta, false), ["1,200 of 10,000 steps"]);
  const stopped = { unit: "batches", done: 3, total: 9, rate: null, left_s: null };
  assert.deepEqual(progress(stopped, true), ["3 of 9 batches"]);
});
