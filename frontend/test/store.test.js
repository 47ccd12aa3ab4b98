import assert from "node:assert/strict";
import { test } from "node:test";
import { Store } from "../src/store.js";
import { rows, update } from "./messages.js";

const means = (store, name, rank) => store.metrics.get(name).ranks.get(rank).means;

test("a full message and what follows it build the series", () => {
  const store = new Store();
  assert.ok(store.apply(...update(0, [["loss", 0, 1, 0, rows([3, 2])]])));
  assert.ok(store.apply(...update(1, [["loss", 0, 1, 1, rows([2.5, 1], 1)]])));
  assert.deepEqual(means(store, "loss", 0), [3, 2.5, 1]);
  assert.deepEqual(store.metrics.get("loss").ranks.get(0).latest, { step: 2, time: 1002, value: 1 });
});

test("a missing message is noticed, and a full message repairs it", () => {
  const store = new Store();
  store.apply(...update(0, [["loss", 0, 1, 0, rows([3])]]));
  assert.equal(store.apply(...update(2, [["loss", 0, 1, 2, rows([1], 2)]])), false);
  assert.equal(store.apply(...update(3, [["loss", 0, 1, 3, rows([0], 3)]])), false);
  assert.deepEqual(means(store, "loss", 0), [3], "nothing is drawn with a hole in it");
  store.apply(...update(4, [["loss", 0, 1, 0, rows([3, 2, 1, 0])]], { full: true }));
  assert.deepEqual(means(store, "loss", 0), [3, 2, 1, 0]);
  assert.equal(store.apply(...update(6, [])), false, "the next gap is noticed again");
});

test("the first message must be a full one", () => {
  const store = new Store();
  assert.equal(store.apply(...update(5, [["loss", 0, 1, 0, rows([3])]])), false);
  assert.equal(store.metrics.size, 0);
});

test("a full message forgets metrics that are gone", () => {
  const store = new Store();
  store.apply(...update(0, [["loss", 0, 1, 0, rows([3])]]));
  store.apply(...update(1, [["accuracy", 0, 1, 0, rows([1])]], { full: true }));
  assert.deepEqual([...store.metrics.keys()], ["accuracy"]);
});

test("ranks are known from the world, the devices and the series", () => {
  const store = new Store();
  const device = { rank: 10, device: "cpu", utilisation: [1], used: 1, total: 2, own: 1, cpu: 1 };
  store.apply(...update(0, [["loss", 2, 1, 0, rows([3])]], {
    ranks: [[0, "host", "cpu", "a CPU"]], devices: [device],
  }));
  assert.deepEqual(store.allRanks(), [0, 2, 10]);
  assert.equal(store.origin(), 1000);
  store.apply(...update(1, []));
  assert.equal(store.devices.get(10).used, 1, "a device that did not change stays");
});

test("marks stay until others come", () => {
  const store = new Store();
  const mark = { time: 1, kind: "lost", text: "rank 1 has died" };
  store.apply(...update(0, [], { marks: [mark] }));
  store.apply(...update(1, []));
  assert.deepEqual(store.marks, [mark]);
  store.apply(...update(2, [], { full: true, marks: [] }));
  assert.deepEqual(store.marks, []);
});

test("the user's metrics come first, and the shares of the time last", () => {
  const store = new Store();
  const row = rows([1]);
  store.apply(...update(0, [["time/data", 0, 1, 0, row, true], ["step_s", 0, 1, 0, row, true], ["loss", 0, 1, 0, row]]));
  assert.deepEqual(store.names(), ["loss", "step_s", "time/data"]);
});

test("the last step is that of the rank that is ahead", () => {
  const store = new Store();
  assert.equal(store.lastStep(), null);
  store.apply(...update(0, [], { steps: [[0, 7], [1, 9]] }));
  assert.equal(store.lastStep(), 9);
});

test("listeners are told until they leave", () => {
  const store = new Store();
  let calls = 0;
  const leave = store.subscribe(() => calls++);
  store.apply(...update(0, []));
  leave();
  store.apply(...update(1, []));
  assert.equal(calls, 1);
});
