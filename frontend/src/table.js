// One row for each rank: where it runs, how busy it is, what it last logged. Where there
// are several hosts, one row for each of them, which hides and shows those of its ranks.
import { h, setText } from "./dom.js";
import { bandwidth, memory, number, percent, reading } from "./format.js";
import { stroke } from "./palette.js";
import { ACTIVITIES } from "./store.js";

/** With more hosts, their ranks are hidden at first. */
const MOST_OPEN_HOSTS = 4;

/**
 * The columns. `shows(devices)` tells whether one is there at all, `detail` whether only
 * with the details. `make()` makes a cell's content: { element, draw(what) }; `what` has
 * those of `Row.draw`.
 */
const COLUMNS = [
  { title: "Device", make: () => new Place() },
  { title: "Utilisation", make: () => new Load() },
  { title: "Time", make: () => new TimeBar() },
  { title: "Memory", make: () => new Memory() },
  { title: "GPU", shows: anyOf("temperature", "power"), make: () => text(({ device }) => card(device)) },
  { title: "Tensors", detail: true, shows: anyOf("reserved"), hint: "What torch's allocator has given out, of what it has reserved", make: () => text(({ device }) => memory(device?.allocated, device?.reserved)) },
  { title: "CPU", detail: true, number: true, hint: "In percent of one core", make: () => text(({ device }) => percent(device?.cpu)) },
  { title: "Resident", detail: true, number: true, hint: "Host memory of the process", make: () => text(({ device }) => memory(device?.resident)) },
  { title: "Disk", detail: true, number: true, hint: "What the process reads from disks and writes to them", make: () => text(({ device }) => bandwidth(device?.disk)) },
  { title: "Network", detail: true, number: true, hint: "What the host sends and receives", make: () => text(({ device }) => bandwidth(device?.network)) },
  { title: "Bus", detail: true, number: true, hint: "Bus bandwidth of the fastest large collective in the last second", make: () => text(({ device }) => bandwidth(device?.bandwidth)) },
  { title: "Step", number: true, make: () => text(({ step }) => number(step)) },
  { title: "Behind", number: true, hint: "Steps behind the rank that is ahead", make: () => text(({ behind }) => number(behind)) },
];

export class RankTable {
  #head = h("tr");
  #built = "";
  #rows = new Map();
  #hosts = new Map();
  /** host → whether its ranks are shown, where the user has chosen. */
  #chosen = new Map();
  element = h("table", { class: "nbdist-ranks" },
    h("caption", { class: "nbdist-unseen" }, "Ranks: device, load, and latest values"),
    h("thead", {}, this.#head));

  /** A row for each rank, with a value of each of the metrics `names`. */
  draw(store, names, details, theme) {
    const ranks = store.allRanks();
    const devices = [...store.devices.values()];
    const columns = COLUMNS.filter(({ detail, shows }) => (!detail || details) && (!shows || shows(devices)));
    const hosts = groups(store, ranks);
    const built = JSON.stringify([[...hosts], names, columns.map(({ title }) => title)]);
    if (built !== this.#built) this.#build(hosts, names, columns);
    this.#built = built;
    const whats = new Map(ranks.map((rank) => [rank, what(store, rank, names, theme)]));
    for (const rank of ranks) this.#rows.get(rank).draw(whats.get(rank));
    for (const [host, row] of this.#hosts) row.draw(summary(host, hosts.get(host).map((rank) => whats.get(rank))));
  }

  #build(hosts, names, columns) {
    const values = names.length ? names : ["Value"];
    const titles = values.map((name) => ({ title: name, number: true }));
    this.#head.replaceChildren(heading({ title: "Rank" }), ...[...columns, ...titles].map(heading));
    this.#rows.clear();
    this.#hosts.clear();
    const bodies = [...hosts].map(([host, ranks]) => {
      const rows = ranks.map((rank) => {
        this.#rows.set(rank, new Row(columns, values.length));
        return this.#rows.get(rank).element;
      });
      if (hosts.size === 1) return h("tbody", {}, ...rows);
      const row = new HostRow(columns, values.length, (shown) => {
        this.#chosen.set(host, shown);
        for (const each of rows) each.hidden = !shown;
      });
      this.#hosts.set(host, row);
      row.show(this.#chosen.get(host) ?? hosts.size <= MOST_OPEN_HOSTS);
      return h("tbody", {}, row.element, ...rows);
    });
    for (const body of [...this.element.querySelectorAll("tbody")]) body.remove();
    this.element.append(...bodies);
  }
}

/** host → ranks. Ranks that have left are with the first one. */
function groups(store, ranks) {
  const found = new Map();
  const first = [...store.ranks.values()][0]?.host ?? "";
  for (const rank of ranks) {
    const host = store.ranks.get(rank)?.host ?? first;
    found.set(host, [...(found.get(host) ?? []), rank]);
  }
  return found;
}

/** What a row says of a rank. */
function what(store, rank, names, theme) {
  const gone = store.ranks.size > 0 && !store.ranks.has(rank);
  const step = store.steps.get(rank);
  return {
    rank, gone,
    info: store.ranks.get(rank),
    device: gone ? undefined : store.devices.get(rank),
    step,
    behind: step === undefined ? undefined : store.lastStep() - step,
    latest: names.map((name) => store.metrics.get(name).ranks.get(rank)?.latest),
    colour: stroke(rank, theme),
  };
}

/** What a row says of a host: sums, means, and the rank that is last. */
export function summary(host, whats) {
  const devices = whats.map(({ device }) => device).filter(Boolean);
  const known = (pick) => devices.map(pick).filter((value) => value !== null && value !== undefined);
  const over = (reduce) => (name) => {
    const values = known((device) => device[name]);
    return values.length ? reduce(values) : null;
  };
  const add = (values) => values.reduce((a, b) => a + b, 0);
  const [sum, most] = [over(add), over((values) => Math.max(...values))];
  const loads = known((device) => device.utilisation.at(-1));
  const splits = known((device) => device.split);
  const steps = whats.map(({ step }) => step).filter((step) => step !== undefined);
  return {
    host,
    ranks: whats.length,
    device: {
      utilisation: loads.length ? [add(loads) / loads.length] : [],
      split: splits.length ? ACTIVITIES.map((_, i) => add(splits.map((split) => split[i])) / splits.length) : null,
      // Of CPU ranks, the total is the host's.
      used: sum("used"), total: devices.every(({ device }) => device === "cpu") ? most("total") : sum("total"),
      allocated: sum("allocated"), reserved: sum("reserved"), temperature: most("temperature"), power: sum("power"),
      cpu: sum("cpu"), resident: sum("resident"), disk: sum("disk"), network: most("network"), bandwidth: most("bandwidth"),
    },
    step: steps.length ? Math.min(...steps) : undefined,
    behind: steps.length ? Math.max(...whats.map(({ behind }) => behind ?? 0)) : undefined,
    latest: [],
  };
}

/** The cells of a row but for its heading. */
class Cells {
  #cells;
  #values;
  elements;

  constructor(columns, count) {
    this.#cells = columns.map(({ make }) => make());
    this.#values = Array.from({ length: count }, () => h("td", { class: "number" }));
    const cell = (column, i) => h("td", column.number ? { class: "number" } : {}, this.#cells[i].element);
    this.elements = [...columns.map(cell), ...this.#values];
  }

  draw(each) {
    for (const cell of this.#cells) cell.draw(each);
    this.#values.forEach((cell, i) => setText(cell, each.latest[i] ? reading(each.latest[i].value) : "–"));
  }
}

class Row {
  #mark = h("span", { class: "mark" });
  #number = h("span");
  #cells;
  element;

  constructor(columns, count) {
    this.#cells = new Cells(columns, count);
    this.element = h("tr", {}, h("th", { scope: "row" }, this.#mark, this.#number), ...this.#cells.elements);
  }

  draw(each) {
    this.element.classList.toggle("gone", each.gone);
    this.#mark.style.background = each.colour;
    setText(this.#number, String(each.rank));
    this.#cells.draw(each);
  }
}

class HostRow {
  #button = h("button", { type: "button", onclick: () => this.show(!this.#shown) });
  #shown = true;
  #onToggle;
  #cells;
  element;

  /** Calls `onToggle(shown)` when the ranks of the host are to be hidden or shown. */
  constructor(columns, count, onToggle) {
    this.#onToggle = onToggle;
    this.#cells = new Cells(columns, count);
    this.element = h("tr", { class: "host" }, h("th", { scope: "row" }, this.#button), ...this.#cells.elements);
  }

  show(shown) {
    this.#shown = shown;
    this.#button.setAttribute("aria-expanded", String(shown));
    this.#onToggle(shown);
  }

  draw(each) {
    const count = each.ranks === 1 ? "1 rank" : `${each.ranks} ranks`;
    setText(this.#button, `${this.#shown ? "▾" : "▸"} ${each.host}: ${count}`);
    this.#cells.draw(each);
  }
}

/** A cell of text. */
function text(of) {
  const element = h("span");
  return { element, draw: (each) => setText(element, of(each)) };
}

class Place {
  element = h("span");

  draw({ gone, info, device, host }) {
    if (host !== undefined) return setText(this.element, "");
    const name = info?.device ?? device?.device ?? "–";
    setText(this.element, gone ? "left" : info ? `${info.host}:${name}` : name);
    setTitle(this.element, info?.name ?? "");
  }
}

class Load {
  #spark = new Sparkline();
  #percent = h("span", { class: "percent" });
  element = h("span", { class: "load" }, this.#spark.element, this.#percent);

  draw({ device, host }) {
    setText(this.#percent, percent(device?.utilisation.at(-1)));
    this.#spark.draw(host === undefined ? (device?.utilisation ?? []) : []);
  }
}

class Memory {
  #fill = h("span");
  #bar = h("span", { class: "bar", role: "meter", "aria-label": "Memory", "aria-valuemin": "0", "aria-valuemax": "100" }, this.#fill);
  #amount = h("span", { class: "amount" });
  element = h("span", { class: "memory" }, this.#bar, this.#amount);

  draw({ device }) {
    const { used = null, total } = device ?? {};
    const share = used !== null && total ? Math.min(100, (100 * used) / total) : null;
    this.#bar.hidden = share === null;
    if (share !== null) {
      this.#fill.style.width = `${share}%`;
      this.#bar.setAttribute("aria-valuenow", share.toFixed(0));
    }
    setText(this.#amount, memory(used, total));
  }
}

/** The shares of what the main thread does, of the last code that ran. */
class TimeBar {
  #parts = ACTIVITIES.map((name) => h("span", { class: name }));
  element = h("span", { class: "bar time", role: "img" }, ...this.#parts);

  draw({ device }) {
    const shares = device?.split;
    this.element.hidden = !shares;
    if (!shares) return;
    this.#parts.forEach((part, i) => (part.style.width = `${100 * shares[i]}%`));
    const words = ACTIVITIES.map((name, i) => `${name} ${percent(100 * shares[i])}`).join(", ");
    setTitle(this.element, words);
    this.element.setAttribute("aria-label", words);
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

/** "64 °C · 312 W". */
function card(device) {
  const { temperature = null, power = null } = device ?? {};
  const parts = [];
  if (temperature !== null) parts.push(`${temperature.toFixed(0)} °C`);
  if (power !== null) parts.push(`${power.toFixed(0)} W`);
  return parts.join(" · ") || "–";
}

function anyOf(...names) {
  return (devices) => devices.some((device) => names.some((name) => (device[name] ?? null) !== null));
}

function setTitle(element, title) {
  if (element.title !== title) element.title = title;
}

function heading({ title, number: numeric, hint }) {
  const attributes = { scope: "col" };
  if (numeric) attributes.class = "number";
  if (hint) attributes.title = hint;
  return h("th", attributes, title);
}
