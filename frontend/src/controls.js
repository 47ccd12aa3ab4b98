// The choices of a view but for its metrics: more charts, smoothing, axes, details, size.
import { h } from "./dom.js";
import { LENGTHS } from "./smoothing.js";

export class Controls {
  #model;
  #add;
  #axes;
  #smooth = h("input", {
    type: "range", min: 0, max: LENGTHS.length - 1, step: 1,
    oninput: () => this.#set("smoothing", LENGTHS[this.#smooth.value]),
  });
  #length = h("span", { class: "length" });
  #log = h("input", { type: "checkbox", onchange: () => this.#set("log", this.#log.checked) });
  #details;
  #screen;
  element;

  /**
   * Smoothing, axis, logarithm and details are traits of the model. `onAdd()` is called
   * for one more chart, and `onScreen()` for the whole screen or back.
   */
  constructor(model, { onAdd, onScreen }) {
    this.#model = model;
    this.#add = h("button", { type: "button", title: "Add a chart of another metric", onclick: onAdd }, "+ chart");
    this.#axes = ["step", "time"].map((axis) => h("button", {
      type: "button", onclick: () => this.#set("x", axis),
    }, axis));
    this.#details = h("button", {
      type: "button", title: "More columns of each rank", onclick: () => this.#set("details", !this.#model.get("details")),
    }, "details");
    this.#screen = h("button", {
      type: "button", title: "Fill the screen", "aria-label": "Fill the screen", onclick: onScreen,
    }, "⤢");
    this.#screen.hidden = !document.fullscreenEnabled;
    this.element = h("div", { class: "nbdist-controls" },
      this.#add,
      h("label", { title: "Average over the steps or seconds around each value" }, "smooth", this.#smooth, this.#length),
      h("span", { class: "choice", role: "group", "aria-label": "X axis" }, ...this.#axes),
      h("label", {}, this.#log, "log"),
      this.#details,
      this.#screen);
  }

  draw(hasMore, fillsScreen) {
    this.#add.hidden = !hasMore;
    this.#log.checked = this.#model.get("log");
    this.#drawSmoothing();
    this.#details.setAttribute("aria-pressed", String(this.#model.get("details")));
    this.#screen.setAttribute("aria-pressed", String(fillsScreen));
    for (const button of this.#axes) {
      button.setAttribute("aria-pressed", String(button.textContent === this.#model.get("x")));
    }
  }

  #drawSmoothing() {
    const length = this.#model.get("smoothing");
    const nearest = LENGTHS.reduce((a, b) => (Math.abs(b - length) < Math.abs(a - length) ? b : a));
    this.#smooth.value = LENGTHS.indexOf(nearest);
    const unit = this.#model.get("x") === "time" ? "s" : "steps";
    this.#length.textContent = length ? `${length} ${unit}` : "off";
    this.#smooth.setAttribute("aria-valuetext", this.#length.textContent);
  }

  #set(name, value) {
    this.#model.set(name, value);
    this.#model.save_changes();
  }
}
