import assert from "node:assert/strict";
import { test } from "node:test";
import { summary } from "../src/table.js";

const device = (fields) => ({
  device: "cuda:0", utilisation: [50], split: null, used: 10, total: 80, allocated: 1, reserved: 2,
  temperature: 60, power: 300, cpu: 100, resident: 5, disk: 1, network: 7, bandwidth: null, ...fields,
});

test("a host has the sums and means of its ranks, and the step of the last one", () => {
  const found = summary("node1", [
    { device: device({ split: [1, 0, 0, 0] }), step: 90, behind: 10 },
    { device: device({ utilisation: [70], temperature: 71, split: [0, 1, 0, 0], bandwidth: 3 }), step: 100, behind: 0 },
    { device: undefined },
  ]);
  assert.deepEqual([found.host, found.ranks, found.step, found.behind], ["node1", 3, 90, 10]);
  assert.deepEqual(found.device.utilisation, [60]);
  assert.deepEqual(found.device.split, [0.5, 0.5, 0, 0]);
  assert.deepEqual([found.device.used, found.device.total], [20, 160]);
  assert.deepEqual([found.device.temperature, found.device.power, found.device.network], [71, 600, 7]);
  assert.equal(found.device.bandwidth, 3);
});

test("a host of CPU ranks has its memory once", () => {
  const cpu = device({ device: "cpu", temperature: null, power: null });
  const { device: found } = summary("node1", [{ device: cpu }, { device: cpu }]);
  assert.deepEqual([found.used, found.total, found.temperature, found.power], [20, 80, null, null]);
});

test("a host whose ranks have not reported says nothing", () => {
  const found = summary("node1", [{ device: undefined, step: undefined }]);
  assert.deepEqual(found.device.utilisation, []);
  assert.equal(found.step, undefined);
  assert.equal(found.device.split, null);
});
