// Which metrics have a chart.
import { SHARES } from "./store.js";

/** The chosen metrics that are known; the first of all where there is none. */
export function shown(chosen, known) {
  const found = chosen.filter((name) => known.includes(name));
  // The strip below the charts shows the shares of the time.
  return found.length ? found : known.slice(0, 1).filter((name) => !name.startsWith(SHARES));
}

/** The choice with one more chart, of the first metric that has none. */
export function withOneMore(chosen, known) {
  const next = known.find((name) => !shown(chosen, known).includes(name));
  return next === undefined ? chosen : [...explicit(chosen, known), next];
}

/** The choice with another metric in a chart's place. */
export function withInstead(chosen, known, old, name) {
  return explicit(chosen, known).map((each) => (each === old ? name : each));
}

/** The choice without a chart. */
export function without(chosen, known, old) {
  return explicit(chosen, known).filter((each) => each !== old);
}

/** Chosen metrics that nobody has logged yet stay, unless they are all of them. */
function explicit(chosen, known) {
  return chosen.some((name) => known.includes(name)) ? chosen : shown(chosen, known);
}
