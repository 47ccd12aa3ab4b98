// The chart of one metric: its choice, its plane, and its readout.
import { Chart } from "./chart.js";
import { h } from "./dom.js";
import { Readout, sentence } from "./readout.js";

export class Panel {
  #select = h("select", { "aria-label": "Metric" });
  #remove = h("button", { type: "button", title: "Remove this chart", "aria-label": "Remove this chart" }, "×");
  #plane = h("div", { class: "nbdist-plane", role: "slider", tabindex: "0", "aria-valuenow": "0" });
  #readout = new Readout();
  #chart;
  #picture = null;
  #index = null;
  element;

  /**
   * Panels with the same `key` share the cursor. Calls `onChoose(name)`, `onRemove()`, and
   * `onUnzoom`, `onPan` and `onScale` as a `Chart` does.
   */
  constructor({ key, onChoose, onRemove, ...events }) {
    this.#select.addEventListener("change", () => onChoose(this.#select.value));
    this.#remove.addEventListener("click", onRemove);
    this.#plane.addEventListener("keydown", (event) => this.#onKey(event));
    this.#plane.addEventListener("blur", () => this.#chart.leave());
    this.#chart = new Chart(this.#plane, { key, ...events, onCursor: (...cursor) => this.#onCursor(...cursor) });
    this.element = h("div", { class: "nbdist-panel" },
      h("div", { class: "nbdist-choice" }, this.#select, this.#remove),
      h("div", { class: "nbdist-chart" }, this.#plane, this.#readout.element));
  }

  /** Draws a picture, as `Chart` does; `names` are the metrics to choose from. */
  draw(picture, names, alone) {
    this.#picture = picture;
    const shown = [...this.#select.options].map((option) => option.value);
    if (names.join("\n") !== shown.join("\n")) {
      this.#select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    }
    this.#select.value = picture.label;
    this.#remove.hidden = alone;
    this.#chart.draw(picture);
    this.#describe();
  }

  /** Brings one rank to the front; null brings none. */
  highlight(rank) {
    this.#chart.highlight(rank);
  }

  unzoom() {
    this.#chart.unzoom();
  }

  /** Shows a part of the x axis. */
  show(min, max) {
    this.#chart.show(min, max);
  }

  /** Where the chart's plane is within this panel's element, as `Chart` has it. */
  get plane() {
    return this.#chart.plane;
  }

  destroy() {
    this.#chart.destroy();
    this.element.remove();
  }

  #describe() {
    const { aligned, label, x, asBand } = this.#picture;
    const last = aligned.x.length - 1;
    const at = Math.min(this.#index ?? last, last);
    const kind = asBand ? "median and range of the ranks" : "one line for each rank";
    const attributes = {
      "aria-label": `${label} by ${x}, ${kind}; arrow keys read the values, plus and minus zoom, with Shift the arrow keys move`,
      "aria-valuemin": 0,
      "aria-valuemax": Math.max(0, last),
      "aria-valuenow": Math.max(0, at),
      "aria-valuetext": last < 0 ? "no values" : sentence(this.#picture, at, this.#chart.marksAt(at)),
    };
    for (const [name, value] of Object.entries(attributes)) this.#plane.setAttribute(name, value);
  }

  #onCursor(index, left, top) {
    this.#index = index ?? null;
    if (this.#index === null || !this.#picture) return this.#readout.hide();
    const inset = this.#plane.querySelector(".u-over");
    const marks = this.#chart.marksAt(index);
    this.#readout.show(this.#picture, index, marks, left + inset.offsetLeft, top + inset.offsetTop);
    this.#describe();
  }

  #onKey(event) {
    const chart = this.#chart;
    const views = { "+": () => chart.zoom(0.5), "=": () => chart.zoom(0.5), "-": () => chart.zoom(2) };
    if (event.shiftKey) Object.assign(views, { ArrowLeft: () => chart.pan(-0.25), ArrowRight: () => chart.pan(0.25) });
    if (event.key in views) {
      event.preventDefault();
      return views[event.key]();
    }
    const last = (this.#picture?.aligned.x.length ?? 0) - 1;
    const at = this.#index ?? last;
    const page = Math.ceil(last / 10);
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - page, PageUp: at + page, Home: 0, End: last };
    if (last < 0 || !(event.key in moves)) return;
    event.preventDefault();
    this.#chart.pointAt(Math.min(last, Math.max(0, moves[event.key])));
  }
}
