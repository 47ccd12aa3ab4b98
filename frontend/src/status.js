// One line on how things go; and now and then, the same aloud.
import { h, setText } from "./dom.js";
import { number } from "./format.js";

const FRESH_MS = 3000;
const ALOUD_EVERY_MS = 15000;

export class Status {
  #dot = h("span", { class: "dot" });
  #text = h("span");
  #aloud = h("span", { class: "nbdist-unseen", "aria-live": "polite" });
  #changed = -Infinity;
  #spoken = -Infinity;
  #step = NaN;
  element = h("div", { class: "nbdist-status" }, this.#dot, this.#text, this.#aloud);

  draw(store, name, now = performance.now()) {
    const latest = latestOf(store.metrics.get(name));
    const step = Math.max(...latest.map((sample) => sample.step));
    if (latest.length && step !== this.#step) this.#changed = now;
    this.#step = step;
    const running = now - this.#changed < FRESH_MS;
    this.#dot.classList.toggle("running", running);
    setText(this.#text, describe(store, name, latest, running));
    if (latest.length && now - this.#spoken > ALOUD_EVERY_MS) {
      this.#spoken = now;
      setText(this.#aloud, aloud(name, step, latest));
    }
  }
}

/** Steps per second over the last minute of the first rank that has any. */
export function rate(metric) {
  const series = metric ? [...metric.ranks.values()][0] : undefined;
  if (!series || series.steps.length < 2) return null;
  const { step, time } = series.latest;
  const from = Math.max(0, series.times.findIndex((t) => t > time - 60));
  const seconds = time - series.times[from];
  return seconds > 0 && step > series.steps[from] ? (step - series.steps[from]) / seconds : null;
}

function latestOf(metric) {
  return metric ? [...metric.ranks.values()].map((series) => series.latest) : [];
}

function describe(store, name, latest, running) {
  const ranks = store.ranks.size || store.allRanks().length;
  const parts = [running ? "running" : "idle", `${ranks} ${ranks === 1 ? "rank" : "ranks"}`];
  if (latest.length) parts.push(`step ${number(Math.max(...latest.map((s) => s.step)))}`);
  const speed = running ? rate(store.metrics.get(name)) : null;
  if (speed !== null) parts.push(`${number(Number(speed.toPrecision(3)))} steps/s`);
  const lost = store.lost.reduce((sum, [, count]) => sum + count, 0);
  if (lost) parts.push(`${number(lost)} records lost`);
  return parts.join(" · ");
}

function aloud(name, step, latest) {
  const values = latest.map((sample) => sample.value);
  const [least, most] = [Math.min(...values), Math.max(...values)].map(number);
  const range = least === most ? least : `from ${least} to ${most}`;
  return `Step ${number(step)}: ${name} ${range}.`;
}
