// A button for each rank: click hides it, Shift-click leaves it alone.
import { h } from "./dom.js";
import { stroke } from "./palette.js";

export class Legend {
  element = h("div", { class: "nbdist-legend", role: "group", "aria-label": "Ranks shown" });
  #hidden;
  #onChange;
  #onHighlight;
  #ranks = [];

  /** Changes the set `hidden`, then calls `onChange()`; `onHighlight(rank | null)`. */
  constructor(hidden, onChange, onHighlight) {
    this.#hidden = hidden;
    this.#onChange = onChange;
    this.#onHighlight = onHighlight;
  }

  draw(ranks, theme) {
    if (ranks.join() !== this.#ranks.join()) {
      this.#ranks = ranks;
      this.element.replaceChildren(...ranks.map((rank) => this.#chip(rank)));
    }
    for (const [i, chip] of [...this.element.children].entries()) {
      chip.style.setProperty("--rank", stroke(ranks[i], theme));
      chip.setAttribute("aria-pressed", String(!this.#hidden.has(ranks[i])));
    }
  }

  #chip(rank) {
    const leave = () => this.#onHighlight(null);
    const enter = () => this.#onHighlight(this.#hidden.has(rank) ? null : rank);
    return h("button", {
      type: "button",
      title: `Rank ${rank}: click to hide or show, Shift-click to show it alone`,
      "aria-label": `Rank ${rank}`,
      onclick: (event) => {
        this.#toggle(rank, event.shiftKey);
        enter(); // a hidden rank is not in front of the others
      },
      onpointerenter: enter, onpointerleave: leave, onfocus: enter, onblur: leave,
    }, String(rank));
  }

  #toggle(rank, alone) {
    if (alone) this.#showAlone(rank);
    else if (!this.#hidden.delete(rank)) this.#hidden.add(rank);
    this.#onChange();
  }

  #showAlone(rank) {
    const others = this.#ranks.filter((other) => other !== rank);
    const wasAlone = others.every((other) => this.#hidden.has(other));
    this.#hidden.clear();
    if (!wasAlone) for (const other of others) this.#hidden.add(other);
  }
}
