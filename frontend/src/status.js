// One line on how things go; and now and then, the same aloud.
import { h, setText } from "./dom.js";
import { duration, number } from "./format.js";

// Without a step for so long, nor for three steps, nothing runs.
const FRESH_MS = 3000;
const ALOUD_EVERY_MS = 15000;
const MINUTE_MS = 60000;

export class Status {
  #dot = h("span", { class: "dot" });
  #text = h("span");
  #aloud = h("span", { class: "nbdist-unseen", "aria-live": "polite" });
  #changed = -Infinity;
  #spoken = -Infinity;
  #step = null;
  #speed = new Speed();
  element = h("div", { class: "nbdist-status" }, this.#dot, this.#text, this.#aloud);

  draw(store, name, now = performance.now()) {
    const latest = latestOf(store.metrics.get(name));
    const step = store.lastStep();
    if (step !== null && step !== this.#step) this.#changed = now;
    this.#step = step;
    const running = now - this.#changed < Math.max(FRESH_MS, 3000 / (store.eta?.rate || Infinity));
    this.#dot.classList.toggle("running", running);
    setText(this.#text, describe(store, running, this.#speed.take(step, now)));
    if (latest.length && step !== null && now - this.#spoken > ALOUD_EVERY_MS) {
      this.#spoken = now;
      setText(this.#aloud, aloud(name, step, latest, store.eta));
    }
  }
}

/** Steps per second over the last minute in which this view was there. */
export class Speed {
  #points = [];

  /** Takes the step at a time in milliseconds; null if it is unknown. */
  take(step, now) {
    if (step === null) return null;
    const last = this.#points.at(-1);
    if (last && step < last.step) this.#points = [];
    if (!last || step !== last.step || !this.#points.length) this.#points.push({ step, now });
    while (this.#points.length > 2 && this.#points[1].now <= now - MINUTE_MS) this.#points.shift();
    const [from, to] = [this.#points[0], this.#points.at(-1)];
    return to.now > from.now ? (1000 * (to.step - from.step)) / (to.now - from.now) : null;
  }
}

function latestOf(metric) {
  return metric ? [...metric.ranks.values()].map((series) => series.latest) : [];
}

/** What a line says on how far the ranks are: "120 of 500 steps", "1.8 steps/s", "3:31 left". */
export function progress(eta, running) {
  const parts = [`${number(eta.done)} of ${number(eta.total)} ${eta.unit}`];
  if (running && eta.rate !== null) parts.push(`${speed(eta.rate)} ${eta.unit}/s`);
  if (running && eta.left_s !== null) parts.push(left(eta));
  return parts;
}

function describe(store, running, perSecond) {
  const ranks = store.ranks.size || store.allRanks().length;
  const parts = [running ? "running" : "idle", `${ranks} ${ranks === 1 ? "rank" : "ranks"}`];
  if (store.eta) parts.push(...progress(store.eta, running));
  else if (store.lastStep() !== null) {
    parts.push(`step ${number(store.lastStep())}`);
    if (running && perSecond) parts.push(`${speed(perSecond)} steps/s`);
  }
  const lost = store.lost.reduce((sum, [, count]) => sum + count, 0);
  if (lost) parts.push(`${number(lost)} records lost`);
  return parts.join(" · ");
}

function speed(perSecond) {
  return number(Number(perSecond.toPrecision(3)));
}

function left({ left_s }) {
  return `${duration(Math.round(left_s))} left`;
}

function aloud(name, step, latest, eta) {
  const values = latest.map((sample) => sample.value);
  const [least, most] = [Math.min(...values), Math.max(...values)].map(number);
  const range = least === most ? least : `from ${least} to ${most}`;
  const rest = eta && eta.left_s !== null ? ` ${left(eta)}.` : "";
  return `Step ${number(step)}: ${name} ${range}.${rest}`;
}
