// Colours that everyone can tell apart (Okabe and Ito, 2008), on any theme.

const HUES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "TEXT", "#F0E442"];
const DASHES = [[], [6, 3], [2, 3]];

/** A rank's line: eight colours, then the same with dashes. Eighth-to-last is the text's. */
export function stroke(rank, theme) {
  const hue = HUES[rank % HUES.length];
  return hue === "TEXT" ? theme.text : hue;
}

export function dash(rank) {
  return DASHES[Math.floor(rank / HUES.length) % DASHES.length];
}

/** The colours in force at an element, which JupyterLab's theme sets. */
export function themeOf(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    text: style.color,
    grid: colour("--nbdist-grid"),
    band: colour("--nbdist-band"),
    middle: colour("--nbdist-accent"),
    font: `12px ${style.fontFamily}`,
    activities: ["compute", "communication", "data", "other"].map((name) => colour(`--nbdist-${name}`)),
  };
}

/** Calls `listener()` when the theme changes; returns the function that ends it. */
export function watchTheme(listener) {
  const observer = new MutationObserver(listener);
  const attributes = ["data-jp-theme-name", "data-jp-theme-light", "class", "style"];
  observer.observe(document.body, { attributes: true, attributeFilter: attributes });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", listener);
  return () => {
    observer.disconnect();
    dark.removeEventListener("change", listener);
  };
}
