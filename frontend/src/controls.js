// The choices of a view: metric, x axis, logarithm. Each is a trait of the model.
import { h } from "./dom.js";

export class Controls {
  #model;
  #metric = h("select", { "aria-label": "Metric", onchange: () => this.#set("metric", this.#metric.value) });
  #axes;
  #log = h("input", { type: "checkbox", onchange: () => this.#set("log", this.#log.checked) });
  element;

  constructor(model) {
    this.#model = model;
    this.#axes = ["step", "time"].map((axis) => h("button", {
      type: "button", onclick: () => this.#set("x", axis),
    }, axis));
    this.element = h("div", { class: "nbdist-controls" },
      this.#metric,
      h("span", { class: "choice", role: "group", "aria-label": "X axis" }, ...this.#axes),
      h("label", {}, this.#log, "log"));
  }

  draw(names, metric) {
    const shown = [...this.#metric.options].map((option) => option.value);
    if (names.join("\n") !== shown.join("\n")) {
      this.#metric.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    }
    this.#metric.hidden = names.length === 0;
    this.#metric.value = metric;
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
