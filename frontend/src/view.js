// One view of a model: puts the parts together. The chart is drawn at most once a
// frame, text and table four times a second: faster, nobody reads them.
import { Chart } from "./chart.js";
import { byStep, byTime } from "./columns.js";
import { Controls } from "./controls.js";
import { h, setText } from "./dom.js";
import { Legend } from "./legend.js";
import { placeBySteps, placeByTime } from "./marks.js";
import { themeOf, watchTheme } from "./palette.js";
import { position, Readout, sentence } from "./readout.js";
import { Status } from "./status.js";
import { RankTable } from "./table.js";

const MOST_LINES = 12;
const TEXT_EVERY_MS = 250;
const TRAITS = ["metric", "x", "log"];

export class View {
  #model;
  #store;
  #root;
  #plane;
  #empty;
  #chart;
  #status = new Status();
  #controls;
  #legend;
  #readout = new Readout();
  #slow = h("p", { class: "nbdist-slow" });
  #events = h("ul", { class: "nbdist-unseen", "aria-label": "Events" });
  #table = new RankTable();
  #picture = null;
  #index = null;
  #frame = 0;
  #ticking;
  #endings;

  constructor(element, model, store) {
    this.#model = model;
    this.#store = store;
    this.#controls = new Controls(model);
    const highlight = (rank) => this.#chart.highlight(rank);
    this.#legend = new Legend(store.hidden, () => this.#schedule(), highlight);
    this.#build(element);
    this.#chart = new Chart(this.#plane, (...cursor) => this.#onCursor(...cursor));
    this.#ticking = setInterval(() => this.#drawText(), TEXT_EVERY_MS);
    this.#endings = [
      store.subscribe(() => this.#schedule()),
      watchTheme(() => this.#schedule()),
      this.#watchSize(),
      this.#watchTraits(),
    ];
    this.#schedule();
    this.#drawText();
  }

  destroy() {
    cancelAnimationFrame(this.#frame);
    clearInterval(this.#ticking);
    for (const end of this.#endings) end();
    this.#chart.destroy();
  }

  #build(element) {
    this.#plane = h("div", {
      class: "nbdist-plane", role: "slider", tabindex: "0",
      onkeydown: (event) => this.#onKey(event),
      onblur: () => this.#onCursor(null),
    });
    this.#empty = h("p", { class: "nbdist-empty" },
      "Nothing logged yet. In a ", h("code", {}, "%%distributed"), " cell: ",
      h("code", {}, "nbdist.log(loss=loss)"));
    // JupyterLab leaves the keys to what is inside this attribute.
    this.#root = h("section", { class: "nbdist-monitor", "aria-label": "nbdist monitor", "data-lm-suppress-shortcuts": "true" },
      h("header", {}, this.#status.element, this.#controls.element),
      h("div", { class: "nbdist-chart" }, this.#plane, this.#empty, this.#readout.element),
      this.#events,
      this.#legend.element,
      this.#slow,
      h("div", { class: "nbdist-scroll" }, this.#table.element),
      hideStatic(this.#model));
    element.append(this.#root);
  }

  #watchTraits() {
    const changed = () => this.#schedule();
    for (const trait of TRAITS) this.#model.on(`change:${trait}`, changed);
    return () => TRAITS.forEach((trait) => this.#model.off(`change:${trait}`, changed));
  }

  /** Its first call comes when the view gets into the page, with colours and width. */
  #watchSize() {
    const observer = new ResizeObserver(() => this.#schedule());
    observer.observe(this.#plane);
    return () => observer.disconnect();
  }

  #schedule() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  #draw() {
    const names = [...this.#store.metrics.keys()];
    const name = this.#metricShown();
    const theme = themeOf(this.#plane);
    const ranks = this.#store.allRanks();
    this.#controls.draw(names, name);
    this.#legend.draw(ranks, theme);
    this.#empty.hidden = names.length > 0;
    if (name) this.#drawChart(name, ranks.filter((rank) => !this.#store.hidden.has(rank)), theme);
    this.#root.dataset.sequence = this.#store.sequence;
  }

  #drawText() {
    const name = this.#metricShown();
    this.#status.draw(this.#store, name);
    this.#slow.hidden = !this.#store.slow;
    setText(this.#slow, this.#store.slow);
    this.#listEvents();
    this.#table.draw(this.#store, name, themeOf(this.#plane));
  }

  /** What the marks of the chart say, for a screen reader. */
  #listEvents() {
    const { marks = [], x } = this.#picture ?? {};
    const texts = marks.map((mark) => `${position(x, mark.x)}: ${mark.text}`);
    this.#events.hidden = texts.length === 0;
    if (texts.join("\n") === [...this.#events.children].map((item) => item.textContent).join("\n")) return;
    this.#events.replaceChildren(...texts.map((text) => h("li", {}, text)));
  }

  #metricShown() {
    const wanted = this.#model.get("metric");
    const [first = ""] = this.#store.metrics.keys();
    return this.#store.metrics.has(wanted) ? wanted : first;
  }

  #drawChart(name, ranks, theme) {
    const metric = this.#store.metrics.get(name);
    const [x, log] = [this.#model.get("x"), this.#model.get("log")];
    const origin = this.#store.origin();
    const aligned = x === "time" ? byTime(metric, ranks, origin) : byStep(metric, ranks);
    const marks = x === "time"
      ? placeByTime(this.#store.marks, metric, origin, aligned.x.at(-1) ?? 0)
      : placeBySteps(this.#store.marks, metric);
    this.#picture = { aligned, asBand: aligned.ranks.size > MOST_LINES, x, log, label: name, marks, theme };
    this.#chart.draw(this.#picture);
    this.#describe();
  }

  #describe() {
    const { aligned, label, x, asBand } = this.#picture;
    const last = aligned.x.length - 1;
    const at = Math.min(this.#index ?? last, last);
    const kind = asBand ? "median and range of the ranks" : "one line for each rank";
    const attributes = {
      "aria-label": `${label} by ${x}, ${kind}; arrow keys read the values`,
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
    const last = (this.#picture?.aligned.x.length ?? 0) - 1;
    const at = this.#index ?? last;
    const page = Math.ceil(last / 10);
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - page, PageUp: at + page, Home: 0, End: last };
    if (last < 0 || !(event.key in moves)) return;
    event.preventDefault();
    this.#chart.pointAt(Math.min(last, Math.max(0, moves[event.key])));
  }
}

/** Hides the static picture of the same monitor for as long as this view is there. */
function hideStatic(model) {
  const name = `nbdist-static-${model.get("picture")}`;
  return h("style", {}, `.${name}, .jp-OutputArea-child:has(.${name}) { display: none }`);
}
