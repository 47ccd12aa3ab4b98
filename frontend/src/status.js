// One line on how things go; and now and then, the same aloud.
import { h, setText } from "./dom.js";
import { duration, number } from "./format.js";

// Without a step for so long, nor for three steps, nothing runs.
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
    const running = now - this.#changed < Math.max(FRESH_MS, 3000 / (store.eta?.rate || Infinity));
    this.#dot.classList.toggle("running", running);
    setText(this.#text, describe(store, name, latest, running));
    if (latest.length && now - this.#spoken > ALOUD_EVERY_MS) {
      this.#spoken = now;
      setText(this.#aloud, aloud(name, step, latest, store.eta));
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

/** What a line says on how far the ranks are: "120 of 500 steps", "1.8 steps/s", "3:31 left". */
export function progress(eta, running) {
  const parts = [`${number(eta.done)} of ${number(eta.total)} ${eta.unit}`];
  if (running && eta.rate !== null) parts.push(`${speed(eta.rate)} ${eta.unit}/s`);
  if (running && eta.left_s !== null) parts.push(left(eta));
  return parts;
}

function describe(store, name, latest, running) {
  const ranks = store.ranks.size || store.allRanks().length;
  const parts = [running ? "running" : "idle", `${ranks} ${ranks === 1 ? "rank" : "ranks"}`];
  if (store.eta) parts.push(...progress(store.eta, running));
  else parts.push(...steps(store.metrics.get(name), latest, running));
  const lost = store.lost.reduce((sum, [, count]) => sum + count, 0);
  if (lost) parts.push(`${number(lost)} records lost`);
  return parts.join(" · ");
}

function steps(metric, latest, running) {
  const parts = [];
  if (latest.length) parts.push(`step ${number(Math.max(...latest.map((s) => s.step)))}`);
  const measured = running ? rate(metric) : null;
  if (measured !== null) parts.push(`${speed(measured)} steps/s`);
  return parts;
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
