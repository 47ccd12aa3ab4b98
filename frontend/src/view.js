// One view of a model: puts the parts together. The chart is drawn at most once a
// frame, text and table four times a second: faster, nobody reads them.
import { shown, withInstead, without, withOneMore } from "./choice.js";
import { byStep, byTime, smoothed } from "./columns.js";
import { Controls } from "./controls.js";
import { h, setText } from "./dom.js";
import { Legend } from "./legend.js";
import { placeBySteps, placeByTime } from "./marks.js";
import { themeOf, watchTheme } from "./palette.js";
import { Panel } from "./panel.js";
import { position } from "./readout.js";
import { Status } from "./status.js";
import { Strip } from "./strip.js";
import { RankTable } from "./table.js";

const MOST_LINES = 12;
const TEXT_EVERY_MS = 250;
const TRAITS = ["metrics", "x", "log", "smoothing", "details"];
const HEIGHT = 260;
/** Where there are several charts. */
const LOW_HEIGHT = 190;
/** The part of the screen that the charts have when the monitor fills it. */
const SCREEN_SHARE = 0.55;

let views = 0;

export class View {
  #model;
  #store;
  #root;
  #empty;
  #charts = h("div");
  #strip = new Strip();
  #panels = [];
  #key = `nbdist-${views++}`;
  #status = new Status();
  #controls;
  #legend;
  #slow = h("p", { class: "nbdist-slow" });
  #events = h("ul", { class: "nbdist-unseen", "aria-label": "Events" });
  #table = new RankTable();
  #pictures = [];
  #frame = 0;
  #ticking;
  #endings;

  constructor(element, model, store) {
    this.#model = model;
    this.#store = store;
    this.#controls = new Controls(model, {
      onAdd: () => this.#choose(withOneMore), onScreen: () => this.#toggleScreen(),
    });
    const highlight = (rank) => this.#panels.forEach((panel) => panel.highlight(rank));
    this.#legend = new Legend(store.hidden, () => this.#schedule(), highlight);
    this.#build(element);
    this.#ticking = setInterval(() => this.#drawText(), TEXT_EVERY_MS);
    this.#endings = [
      store.subscribe(() => this.#schedule()),
      watchTheme(() => this.#schedule()),
      this.#watchSize(),
      this.#watchTraits(),
      this.#watchScreen(),
    ];
    this.#schedule();
    this.#drawText();
  }

  destroy() {
    cancelAnimationFrame(this.#frame);
    clearInterval(this.#ticking);
    for (const end of this.#endings) end();
    for (const panel of this.#panels) panel.destroy();
  }

  #build(element) {
    this.#empty = h("p", { class: "nbdist-empty" },
      "Nothing logged yet. In a ", h("code", {}, "%%distributed"), " cell: ",
      h("code", {}, "nbdist.log(loss=loss)"));
    // JupyterLab leaves the keys to what is inside this attribute.
    this.#root = h("section", { class: "nbdist-monitor", "aria-label": "nbdist monitor", "data-lm-suppress-shortcuts": "true" },
      h("header", {}, this.#status.element, this.#controls.element),
      this.#charts,
      this.#strip.element,
      this.#empty,
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

  #watchScreen() {
    const changed = () => this.#schedule();
    document.addEventListener("fullscreenchange", changed);
    return () => document.removeEventListener("fullscreenchange", changed);
  }

  get #fillsScreen() {
    return document.fullscreenElement === this.#root;
  }

  #toggleScreen() {
    const change = this.#fillsScreen ? document.exitFullscreen() : this.#root.requestFullscreen();
    change.catch((error) => console.warn("nbdist:", error)); // the front end may forbid it
  }

  /** Its first call comes when the view gets into the page, with colours and width. */
  #watchSize() {
    const observer = new ResizeObserver(() => this.#schedule());
    observer.observe(this.#charts);
    return () => observer.disconnect();
  }

  #schedule() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  #draw() {
    const names = this.#store.names();
    const chosen = this.#metricsShown();
    const theme = themeOf(this.#root);
    const ranks = this.#store.allRanks();
    const visible = ranks.filter((rank) => !this.#store.hidden.has(rank));
    this.#controls.draw(names.length > chosen.length, this.#fillsScreen);
    this.#legend.draw(ranks, theme);
    this.#empty.hidden = chosen.length > 0;
    this.#drawCharts(chosen, names, visible, theme);
    this.#drawStrip(visible, theme);
    this.#root.dataset.sequence = this.#store.sequence;
  }

  #drawStrip(ranks, theme) {
    const picture = { store: this.#store, ranks, x: this.#model.get("x"), origin: this.#store.origin(), theme };
    this.#strip.draw(picture, this.#panels[0]?.plane);
  }

  #drawText() {
    const names = this.#metricsShown();
    this.#status.draw(this.#store, names[0]);
    this.#slow.hidden = !this.#store.slow;
    setText(this.#slow, this.#store.slow);
    this.#listEvents();
    this.#table.draw(this.#store, names, this.#model.get("details") || this.#fillsScreen, themeOf(this.#root));
  }

  /** What the marks of the chart say, for a screen reader. */
  #listEvents() {
    const { marks = [], x } = this.#pictures[0] ?? {};
    const texts = marks.map((mark) => `${position(x, mark.x)}: ${mark.text}`);
    this.#events.hidden = texts.length === 0;
    if (texts.join("\n") === [...this.#events.children].map((item) => item.textContent).join("\n")) return;
    this.#events.replaceChildren(...texts.map((text) => h("li", {}, text)));
  }

  #metricsShown() {
    return shown(this.#model.get("metrics"), this.#store.names());
  }

  /** Changes the chosen metrics by one of the functions of choice.js. */
  #choose(change, ...args) {
    this.#model.set("metrics", change(this.#model.get("metrics"), this.#store.names(), ...args));
    this.#model.save_changes();
  }

  #drawCharts(chosen, names, ranks, theme) {
    this.#keepPanels(chosen.length);
    const common = {
      x: this.#model.get("x"), log: this.#model.get("log"), smoothing: this.#model.get("smoothing"), theme,
      height: this.#height(chosen.length),
    };
    this.#pictures = chosen.map((name) => ({ ...this.#align(name, ranks, common), ...common, label: name }));
    const ends = this.#pictures.flatMap(({ aligned }) => [aligned.x[0], aligned.x.at(-1)]).filter(Number.isFinite);
    const span = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
    for (const [i, picture] of this.#pictures.entries()) {
      const choices = names.filter((name) => name === picture.label || !chosen.includes(name));
      this.#panels[i].draw({ ...picture, span }, choices, chosen.length === 1);
    }
  }

  #height(count) {
    const low = count > 1 ? LOW_HEIGHT : HEIGHT;
    return this.#fillsScreen ? Math.max(low, Math.floor((SCREEN_SHARE * window.innerHeight) / count)) : low;
  }

  #align(name, ranks, { x, smoothing }) {
    const metric = this.#store.metrics.get(name);
    const origin = this.#store.origin();
    const aligned = x === "time" ? byTime(metric, ranks, origin) : byStep(metric, ranks);
    const marks = x === "time"
      ? placeByTime(this.#store.marks, metric, origin, aligned.x.at(-1) ?? 0)
      : placeBySteps(this.#store.marks, metric);
    const asBand = aligned.ranks.size > MOST_LINES;
    return { aligned: asBand ? aligned : smoothed(aligned, smoothing), asBand, marks };
  }

  #keepPanels(count) {
    while (this.#panels.length > count) this.#panels.pop().destroy();
    while (this.#panels.length < count) {
      const i = this.#panels.length;
      const panel = new Panel({
        key: this.#key,
        onChoose: (name) => this.#choose(withInstead, this.#pictures[i].label, name),
        onRemove: () => this.#choose(without, this.#pictures[i].label),
        onUnzoom: () => this.#unzoom(),
        onPan: (min, max) => this.#panels.forEach((each) => each.show(min, max)),
        onScale: () => this.#schedule(),
      });
      this.#panels.push(panel);
      this.#charts.append(panel.element);
    }
  }

  #unzoom() {
    for (const panel of this.#panels) panel.unzoom();
    this.#schedule();
  }
}

/** Hides the static picture of the same monitor for as long as this view is there. */
function hideStatic(model) {
  const name = `nbdist-static-${model.get("picture")}`;
  return h("style", {}, `.${name}, .jp-OutputArea-child:has(.${name}) { display: none }`);
}
