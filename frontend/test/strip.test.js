import assert from "node:assert/strict";
import { test } from "node:test";
import { Store } from "../src/store.js";
import { rowsOf } from "../src/strip.js";
import { update } from "./messages.js";

/** A store whose ranks have these shares: rank → [step, time, compute, communication, data, other][]. */
function storeOf(samples) {
  const names = ["compute", "communication", "data", "other"];
  const series = Object.entries(samples).flatMap(([rank, rows]) => names.map((name, i) => (
    [`time/${name}`, Number(rank), 1, 0, rows.map(([step, time, ...shares]) => [step, time, shares[i], shares[i], shares[i]]), true])));
  const store = new Store();
  store.apply(...update(0, series));
  return store;
}

test("each sample covers the steps since the one before it", () => {
  const store = storeOf({ 1: [[10, 1, 0.5, 0.5, 0, 0], [20, 2, 0.1, 0.2, 0.7, 0], [40, 3, 1, 0, 0, 0]] });
  const [row] = rowsOf({ store, ranks: [0, 1], x: "step", origin: 0 });
  assert.equal(row.rank, 1, "a rank without samples has no row");
  assert.deepEqual(row.intervals.map(({ from, to }) => [from, to]), [[-10, 10], [10, 20], [20, 40]]);
  assert.deepEqual(row.intervals[1].shares, [0.1, 0.2, 0.7, 0]);
});

test("the time between two cells is empty", () => {
  const store = storeOf({ 0: [1, 2, 3, 63, 64].map((time) => [time, 1000 + time, 1, 0, 0, 0]) });
  const [row] = rowsOf({ store, ranks: [0], x: "time", origin: 1000 });
  assert.deepEqual(row.intervals.map(({ from, to }) => [from, to]), [[0, 1], [1, 2], [2, 3], [61, 63], [63, 64]]);
});

test("of very many ranks, those that communicate least have rows", () => {
  const samples = Object.fromEntries(Array.from({ length: 100 }, (_, rank) => [rank, [[0, 0, rank === 90 ? 1 : 0.1, rank === 90 ? 0 : 0.9, 0, 0]]]));
  const rows = rowsOf({ store: storeOf(samples), ranks: Object.keys(samples).map(Number), x: "step", origin: 0 });
  assert.equal(rows.length, 64);
  assert.ok(rows.some(({ rank }) => rank === 90));
});
