// The choices of a view but for its metrics: more charts, x axis, logarithm.
import { h } from "./dom.js";

export class Controls {
  #model;
  #add;
  #axes;
  #log = h("input", { type: "checkbox", onchange: () => this.#set("log", this.#log.checked) });
  element;

  /** Axis and logarithm are traits of the model; `onAdd()` is called for one more chart. */
  constructor(model, onAdd) {
    this.#model = model;
    this.#add = h("button", { type: "button", title: "Add a chart of another metric", onclick: onAdd }, "+ chart");
    this.#axes = ["step", "time"].map((axis) => h("button", {
      type: "button", onclick: () => this.#set("x", axis),
    }, axis));
    this.element = h("div", { class: "nbdist-controls" },
      this.#add,
      h("span", { class: "choice", role: "group", "aria-label": "X axis" }, ...this.#axes),
      h("label", {}, this.#log, "log"));
  }

  draw(hasMore) {
    this.#add.hidden = !hasMore;
    this.#log.checked = this.#model.get("log");
    for (const button of this.#axes) {
      button.setAttribute("aria-pressed", String(button.textContent === this.#model.get("x")));
    }
  }

  #set(name, value) {
    this.#model.set(name, value);
    this.#model.save_changes();
  }
}
