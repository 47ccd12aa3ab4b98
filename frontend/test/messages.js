// Messages as the kernel makes them, for tests.

/** series: [metric, rank, width, start, rows of [step, time, mean, low, high]][] */
export function update(sequence, series, { full = sequence === 0, ...rest } = {}) {
  const numbers = [];
  for (const [, , , , rows] of series) {
    const [step, time, mean] = rows.at(-1);
    numbers.push(step, time, mean);
    for (let column = 0; column < 5; column++) numbers.push(...rows.map((row) => row[column]));
  }
  const message = {
    kind: "update", sequence, full,
    series: series.map(([metric, rank, width, start, rows, internal]) => (
      [metric, rank, width, start, rows.length, Boolean(internal)])),
    ranks: [], devices: [], lost: [], steps: [], slow: "", marks: null, eta: null, ...rest,
  };
  return [message, unaligned(numbers)];
}

/** Rows of exact values at consecutive steps. */
export function rows(values, firstStep = 0) {
  return values.map((value, i) => [firstStep + i, 1000 + firstStep + i, value, value, value]);
}

/** A view that starts at an odd byte, as those of a websocket frame do. */
function unaligned(numbers) {
  const bytes = new Uint8Array(8 * numbers.length + 3);
  bytes.set(new Uint8Array(Float64Array.from(numbers).buffer), 3);
  return new DataView(bytes.buffer, 3);
}
