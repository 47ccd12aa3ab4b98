// One row for each rank: where it runs, how busy it is, what it last logged.
import { h, setText } from "./dom.js";
import { memory, number, percent, reading } from "./format.js";
import { stroke } from "./palette.js";

const ACTIVITIES = ["compute", "communication", "data"];
const HEADINGS = ["Rank", "Device", "Utilisation", "Time", "Memory", "Step"];

export class RankTable {
  #body = h("tbody");
  #names = [];
  #head = h("tr");
  #rows = new Map();
  element = h("table", { class: "nbdist-ranks" },
    h("caption", { class: "nbdist-unseen" }, "Ranks: device, load, and latest values"),
    h("thead", {}, this.#head),
    this.#body);

  /** A row for each rank, with a value of each of the metrics `names`. */
  draw(store, names, theme) {
    const ranks = store.allRanks();
    const isBuilt = ranks.join() === [...this.#rows.keys()].join() && names.join("\n") === this.#names.join("\n");
    if (!isBuilt || !this.#head.firstChild) this.#build(ranks, names);
    const metrics = names.map((name) => store.metrics.get(name));
    for (const rank of ranks) {
      const gone = store.ranks.size > 0 && !store.ranks.has(rank);
      this.#rows.get(rank).draw({
        gone,
        info: store.ranks.get(rank),
        device: gone ? undefined : store.devices.get(rank),
        latest: metrics.map((metric) => metric.ranks.get(rank)?.latest),
        colour: stroke(rank, theme),
      });
    }
  }

  #build(ranks, names) {
    this.#names = names;
    const values = names.length ? names : ["Value"];
    const columns = values.map((name) => h("th", { scope: "col", class: "number" }, name));
    this.#head.replaceChildren(...HEADINGS.map(heading), ...columns);
    this.#rows = new Map(ranks.map((rank) => [rank, new Row(rank, values.length)]));
    this.#body.replaceChildren(...[...this.#rows.values()].map((row) => row.element));
  }
}

class Row {
  #mark = h("span", { class: "mark" });
  #where = h("td");
  #spark = new Sparkline();
  #load = h("span", { class: "percent" });
  #time = new TimeBar();
  #fill = h("span");
  #bar = h("span", { class: "bar", role: "meter", "aria-label": "Memory", "aria-valuemin": "0", "aria-valuemax": "100" }, this.#fill);
  #amount = h("span", { class: "amount" });
  #step = h("td", { class: "number" });
  #values;
  element;

  constructor(rank, count) {
    this.#values = Array.from({ length: count }, () => h("td", { class: "number" }));
    this.element = h("tr", {},
      h("th", { scope: "row" }, this.#mark, String(rank)),
      this.#where,
      h("td", { class: "load" }, this.#spark.element, this.#load),
      h("td", {}, this.#time.element),
      h("td", { class: "memory" }, this.#bar, this.#amount),
      this.#step,
      ...this.#values);
  }

  draw({ gone, info, device, latest, colour }) {
    this.element.classList.toggle("gone", gone);
    this.#mark.style.background = colour;
    setText(this.#where, gone ? "left" : place(info, device));
    setTitle(this.#where, info?.name ?? "");
    setText(this.#load, percent(device?.utilisation.at(-1)));
    this.#spark.draw(device?.utilisation ?? []);
    this.#time.draw(device?.split);
    this.#drawMemory(device);
    setText(this.#step, latest[0] ? number(latest[0].step) : "–");
    this.#values.forEach((cell, i) => setText(cell, latest[i] ? reading(latest[i].value) : "–"));
  }

  #drawMemory(device) {
    const { used, total, own } = device ?? {};
    const share = used !== null && total ? Math.min(100, (100 * used) / total) : null;
    this.#bar.hidden = share === null;
    if (share !== null) {
      this.#fill.style.width = `${share}%`;
      this.#bar.setAttribute("aria-valuenow", share.toFixed(0));
    }
    setText(this.#amount, memory(used, total));
    setTitle(this.#amount, own ? `${memory(own)} of it this rank's own` : "");
  }
}

/** The shares of what the main thread does, of the last code that ran. */
class TimeBar {
  #parts = ACTIVITIES.map((name) => h("span", { class: name }));
  element = h("span", { class: "bar time", role: "img" }, ...this.#parts);

  draw(shares) {
    this.element.hidden = !shares;
    if (!shares) return;
    this.#parts.forEach((part, i) => (part.style.width = `${100 * shares[i]}%`));
    const text = ACTIVITIES.map((name, i) => `${name} ${percent(100 * shares[i])}`).join(", ");
    setTitle(this.element, text);
    this.element.setAttribute("aria-label", text);
  }
}

/** A minute of percentages; above 100 (several cores) the scale grows. */
class Sparkline {
  static #NS = "http://www.w3.org/2000/svg";
  element = document.createElementNS(Sparkline.#NS, "svg");
  #line = document.createElementNS(Sparkline.#NS, "polyline");
  #drawn = "";

  constructor() {
    this.element.setAttribute("viewBox", "0 0 60 16");
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("aria-hidden", "true");
    this.element.append(this.#line);
  }

  draw(values) {
    const known = values.filter((value) => value !== null);
    const top = Math.max(100, ...known);
    const first = 60 - known.length;
    const points = known.map((v, i) => `${first + i + 0.5},${(15 - (14 * v) / top).toFixed(1)}`);
    const drawn = points.join(" ");
    if (drawn !== this.#drawn) this.#line.setAttribute("points", (this.#drawn = drawn));
  }
}

function setTitle(element, title) {
  if (element.title !== title) element.title = title;
}

function heading(text) {
  const numeric = text === "Step";
  const content = text === "Time" ? activities() : text;
  return h("th", numeric ? { scope: "col", class: "number" } : { scope: "col" }, content);
}

function place(info, device) {
  const name = info?.device ?? device?.device ?? "–";
  return info ? `${info.host}:${name}` : name;
}

/** "Time", and what the colours of its bars mean. */
function activities() {
  const keys = ACTIVITIES.map((name) => h("span", { class: "key" }, h("span", { class: `mark ${name}` }), name));
  return h("span", { class: "keys" }, "Time ", ...keys);
}
