// What one model knows: filled by messages, read by views.

/** What a rank's time is divided into; each has a metric, such as "time/compute". */
export const ACTIVITIES = ["compute", "communication", "data", "other"];
export const SHARES = "time/";

const COLUMNS = ["steps", "times", "means", "lows", "highs"];

/** One rank's values of one metric, in buckets; the columns are parallel. */
export class Series {
  steps = [];
  times = [];
  means = [];
  lows = [];
  highs = [];
  latest = { step: NaN, time: NaN, value: NaN };
}

export class Store {
  /** name → { width, internal, ranks: Map(rank → Series) }, in the order of first logging */
  metrics = new Map();
  /** rank → { rank, host, device, name } */
  ranks = new Map();
  /** rank → the last device sample of nbdist/widgets/monitor.py */
  devices = new Map();
  /** [rank, count] of records that never arrived */
  lost = [];
  /** A sentence on the rank for which the others wait; "" if there is none. */
  slow = "";
  /** rank → its step in the training */
  steps = new Map();
  /** { unit, done, total, rate, left_s } of the slowest rank; null if the number of steps is unknown */
  eta = null;
  /** { time, kind, text } of what happened to the ranks, oldest first */
  marks = [];
  /** Ranks that the user does not want to see, in any view. */
  hidden = new Set();
  sequence = -1;
  #listeners = new Set();

  /** Takes a message in. False when one before it is missing: nothing can be used until everything comes. */
  apply(message, buffer) {
    if (!message.full && message.sequence !== this.sequence + 1) return false;
    this.sequence = message.sequence;
    if (message.full) {
      this.metrics.clear();
      this.devices.clear();
    }
    this.#readSeries(message.series, new NumberReader(buffer));
    this.ranks = new Map(
      message.ranks.map(([rank, host, device, name]) => [rank, { rank, host, device, name }]),
    );
    for (const device of message.devices) this.devices.set(device.rank, device);
    this.lost = message.lost;
    this.steps = new Map(message.steps);
    this.eta = message.eta;
    this.marks = message.marks ?? this.marks;
    this.slow = message.slow;
    for (const listener of this.#listeners) listener();
    return true;
  }

  /** Calls `listener()` after each message; returns the function that ends it. */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Every rank that is known of, in order. */
  allRanks() {
    const known = new Set([...this.ranks.keys(), ...this.devices.keys()]);
    for (const metric of this.metrics.values()) {
      for (const rank of metric.ranks.keys()) known.add(rank);
    }
    return [...known].sort((a, b) => a - b);
  }

  /** The metrics to choose from: those of the user before those of nbdist. */
  names() {
    const every = [...this.metrics.keys()];
    const order = (name) => (this.metrics.get(name).internal ? 1 : 0) + (name.startsWith(SHARES) ? 1 : 0);
    return every.sort((a, b) => order(a) - order(b));
  }

  /** The step of the rank that is ahead; null before the first. */
  lastStep() {
    return this.steps.size ? Math.max(...this.steps.values()) : null;
  }

  /** When the first sample that is still there was taken, in seconds. */
  origin() {
    let first = Infinity;
    for (const metric of this.metrics.values()) {
      for (const series of metric.ranks.values()) first = Math.min(first, ...series.times.slice(0, 1));
    }
    return first;
  }

  #readSeries(headers, numbers) {
    for (const [name, rank, width, start, count, internal] of headers) {
      const series = this.#series(name, rank, width, internal);
      const [step, time, value] = numbers.take(3);
      series.latest = { step, time, value };
      for (const column of COLUMNS) {
        series[column].length = start;
        series[column].push(...numbers.take(count));
      }
    }
  }

  #series(name, rank, width, internal) {
    if (!this.metrics.has(name)) this.metrics.set(name, { width, internal, ranks: new Map() });
    const metric = this.metrics.get(name);
    metric.width = width;
    if (!metric.ranks.has(rank)) metric.ranks.set(rank, new Series());
    return metric.ranks.get(rank);
  }
}

/** Reads float64s one after the other from a DataView, which may lie unaligned. */
class NumberReader {
  #numbers;
  #position = 0;

  constructor({ buffer, byteOffset, byteLength }) {
    this.#numbers = new Float64Array(buffer.slice(byteOffset, byteOffset + byteLength));
  }

  take(count) {
    this.#position += count;
    return this.#numbers.subarray(this.#position - count, this.#position);
  }
}
