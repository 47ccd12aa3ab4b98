import assert from "node:assert/strict";
import { test } from "node:test";
import { shown, withInstead, without, withOneMore } from "../src/choice.js";

const KNOWN = ["loss", "lr", "accuracy"];

test("what nobody has logged has no chart, and the first metric is the default", () => {
  assert.deepEqual(shown(["accuracy", "later", "loss"], KNOWN), ["accuracy", "loss"]);
  assert.deepEqual(shown([], KNOWN), ["loss"]);
  assert.deepEqual(shown(["later"], KNOWN), ["loss"]);
  assert.deepEqual(shown(["later"], []), []);
  assert.deepEqual(shown([], ["time/data"]), [], "the strip has it");
  assert.deepEqual(shown(["time/data"], [...KNOWN, "time/data"]), ["time/data"]);
});

test("one more chart is of the first metric without one", () => {
  assert.deepEqual(withOneMore([], KNOWN), ["loss", "lr"]);
  assert.deepEqual(withOneMore(["lr", "later"], KNOWN), ["lr", "later", "loss"]);
  assert.deepEqual(withOneMore(KNOWN, KNOWN), KNOWN);
});

test("another metric takes the place of a chart, and a chart can go", () => {
  assert.deepEqual(withInstead([], KNOWN, "loss", "lr"), ["lr"]);
  assert.deepEqual(withInstead(["loss", "later", "lr"], KNOWN, "lr", "accuracy"), ["loss", "later", "accuracy"]);
  assert.deepEqual(withInstead(["later"], KNOWN, "loss", "lr"), ["lr"]);
  assert.deepEqual(without(["loss", "later", "lr"], KNOWN, "loss"), ["later", "lr"]);
});
