import assert from "node:assert/strict";
import { test } from "node:test";
import { placeBySteps, placeByTime, stacked } from "../src/marks.js";
import { Store } from "../src/store.js";
import { rows, update } from "./messages.js";

function metric(series) {
  const store = new Store();
  store.apply(...update(0, series.map(([rank, values]) => ["loss", rank, 1, 0, values])));
  return store.metrics.get("loss");
}

const at = (time) => ({ time, kind: "lost", text: "" });
const steps = (placed) => placed.map(({ x }) => x);

test("a mark lies at the step that was logged last", () => {
  const two = metric([[0, rows([5, 4, 3, 2])], [1, rows([7, 6])]]);
  assert.deepEqual(steps(placeBySteps([at(1000), at(1001.5), at(1002.5), at(2000)], two)), [0, 1, 2, 3]);
});

test("what was before the first value is not in the chart", () => {
  const one = metric([[0, rows([5, 4], 10)]]);
  assert.deepEqual(steps(placeBySteps([at(1009.9), at(1010)], one)), [10]);
  assert.deepEqual(placeBySteps([at(1)], metric([[0, rows([5])]])), []);
});

test("the values of a rank that has left do not attract later marks", () => {
  const left = [1, rows([1, 1, 1, 1], 500).map(([step, , ...rest]) => [step, 900, ...rest])];
  assert.deepEqual(steps(placeBySteps([at(1001)], metric([[0, rows([5, 4, 3])], left]))), [1]);
});

test("over time, a mark after the last value lies at the end", () => {
  const one = metric([[0, rows([5, 4, 3])]]);
  assert.deepEqual(steps(placeByTime([at(999), at(1001.5), at(1010)], one, 1000, 2)), [1.5, 2]);
});

test("marks of several kinds at one step are all seen", () => {
  const marks = [
    { kind: "lost", left: 7 }, { kind: "lost", left: 7 }, { kind: "replaced", left: 7 },
    { kind: "commit", left: 7 }, { kind: "lost", left: 9 },
  ];
  assert.deepEqual(
    stacked(marks).map(({ kind, left, above }) => [kind, left, above]),
    [["commit", 7, 0], ["replaced", 7, 0], ["lost", 7, 1], ["lost", 9, 0]],
  );
});
