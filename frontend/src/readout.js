// What the chart says at the cursor: a box for the eye, a sentence for the ear.
import { h, setText } from "./dom.js";
import { duration, number, reading } from "./format.js";
import { stroke } from "./palette.js";

const MANY = 12;

export class Readout {
  element = h("div", { class: "nbdist-readout", hidden: true, "aria-hidden": "true" });

  hide() {
    this.element.hidden = true;
  }

  /** Shows all ranks' values and the marks at one place of the chart, beside the cursor. */
  show(picture, index, marks, left, top) {
    const { aligned, theme } = picture;
    const values = valuesAt(aligned, index);
    const grid = h("div", { class: values.length > MANY ? "grid many" : "grid" });
    for (const [rank, value] of values) grid.append(entry(rank, value, theme));
    const title = h("div", { class: "title" }, place(picture, index));
    const events = marks.map(({ kind, text }) => h("div", { class: `event ${kind}` }, text));
    this.element.replaceChildren(title, grid, ...events);
    this.element.hidden = false;
    this.#moveTo(left, top);
  }

  #moveTo(left, top) {
    const room = this.element.parentElement.clientWidth;
    const width = this.element.offsetWidth;
    const beside = left + 16 + width > room ? left - width - 16 : left + 16;
    this.element.style.transform = `translate(${Math.max(0, beside)}px, ${Math.max(0, top - 20)}px)`;
  }
}

/** "step 1,200" or "at 2:03". */
export function place({ aligned, x }, index) {
  return position(x, aligned.x[index]);
}

/** The same for a value of the x axis. */
export function position(x, value) {
  return x === "time" ? `at ${duration(value)}` : `step ${number(value)}`;
}

/** One sentence with every rank's value, and one for each mark. */
export function sentence(picture, index, marks) {
  const values = valuesAt(picture.aligned, index).map(([r, v]) => `rank ${r} ${number(v)}`);
  return [`${place(picture, index)}: ${values.join(", ")}`, ...marks.map(({ text }) => text)].join(". ");
}

function valuesAt(aligned, index) {
  return [...aligned.ranks].map(([rank, { mean }]) => [rank, mean[index]]);
}

function entry(rank, value, theme) {
  const mark = h("span", { class: "mark", style: `background:${stroke(rank, theme)}` });
  const name = h("span", { class: "rank" }, String(rank));
  const amount = h("span", { class: "value" });
  setText(amount, value === null ? "NaN" : reading(value));
  return h("span", { class: "entry" }, mark, name, amount);
}
