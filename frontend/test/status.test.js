import assert from "node:assert/strict";
import { test } from "node:test";
import { rate } from "../src/status.js";
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
