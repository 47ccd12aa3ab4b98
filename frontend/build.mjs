// Bundles src/ into nbdist/widgets/static/, or into the folder named on the command line.
import { readFile, writeFile, mkdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "../nbdist/widgets/static");
const uplot = join(here, "node_modules/uplot");

const { version } = JSON.parse(await readFile(join(uplot, "package.json"), "utf8"));
const licence = await readFile(join(uplot, "LICENSE"), "utf8");
const banner =
  `/*! Built from frontend/ by build.mjs: do not edit.\n` +
  ` * It contains uPlot ${version} (https://github.com/leeoniya/uPlot), MIT licence,\n` +
  ` * ${licence.match(/Copyright.*/)[0]}; see uPlot.LICENSE beside this file. */`;

await mkdir(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { monitor: "src/index.js" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  banner: { js: banner },
});
await build({
  absWorkingDir: here,
  entryPoints: { monitor: "src/style.css" },
  outdir: out,
  bundle: true,
  minify: true,
  target: "es2022",
  charset: "utf8",
  banner: { css: banner },
});
await writeFile(join(out, "uPlot.LICENSE"), licence);
