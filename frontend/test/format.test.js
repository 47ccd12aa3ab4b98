import assert from "node:assert/strict";
import { test } from "node:test";
import { bandwidth, duration, memory, number, percent, reading } from "../src/format.js";

function check(format, cases) {
  for (const [value, text] of cases) assert.equal(format(value), text, String(value));
}

test("numbers", () => {
  check(number, [
    [0, "0"], [1200, "1,200"], [0.34867, "0.3487"], [0.5, "0.5"], [12345.678, "12345.7"],
    [0.00001234, "1.23e-5"], [1.5e12, "1.50e12"], [-2.5, "-2.5"],
    [NaN, "NaN"], [Infinity, "∞"], [-Infinity, "−∞"], [undefined, "–"], [null, "–"],
  ]);
});

test("readings line up", () => {
  check(reading, [[0.635, "0.6350"], [1.08, "1.080"], [3, "3"], [NaN, "NaN"], [0.00001, "1.00e-5"]]);
});

test("percent", () => {
  check(percent, [[0, "0 %"], [49.6, "50 %"], [null, "–"], [undefined, "–"]]);
});

test("memory takes the unit of the greater", () => {
  const GiB = 2 ** 30;
  assert.equal(memory(61.3 * GiB, 80 * GiB), "61/80 GiB");
  assert.equal(memory(0.5 * GiB, 139 * GiB), "0.5/139 GiB");
  assert.equal(memory(300 * 2 ** 20, null), "300 MiB");
  assert.equal(memory(0, 0), "0 B");
  assert.equal(memory(null, null), "–");
});

test("durations", () => {
  check(duration, [[0.5, "0.5 s"], [12, "12 s"], [123, "2:03"], [3909, "1:05:09"]]);
});

test("bandwidths", () => {
  check(bandwidth, [
    [0, "0 B/s"], [999, "999 B/s"], [1234, "1.2 kB/s"], [56.7e6, "57 MB/s"], [999.6e6, "1.0 GB/s"],
    [3.2e9, "3.2 GB/s"], [null, "–"], [undefined, "–"],
  ]);
});
