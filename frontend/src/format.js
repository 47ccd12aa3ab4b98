// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** As short as it gets: for axes and steps. */
export function number(value) {
  if (value === undefined || value === null) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return size >= 1000 ? value.toFixed(1) : String(Number(value.toPrecision(4)));
}

/** With four digits: values below each other line up. */
export function reading(value) {
  const short = number(value);
  return /^-?\d\.\d+$/.test(short) ? value.toPrecision(4) : short;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value)} %`;
}

/** "61/80 GiB": both in the unit of the greater. */
export function memory(used, total) {
  if (used === null || used === undefined) return "–";
  const exponent = Math.min(UNITS.length - 1, Math.floor(Math.log2(total || used || 1) / 10));
  const scaled = (bytes) => {
    const size = bytes / 1024 ** exponent;
    return size < 10 ? String(Number(size.toFixed(1))) : size.toFixed(0);
  };
  const amount = total ? `${scaled(used)}/${scaled(total)}` : scaled(used);
  return `${amount} ${UNITS[exponent]}`;
}

/** "12 MB/s", in powers of 1000. */
export function bandwidth(bytesPerSecond) {
  if (bytesPerSecond === null || bytesPerSecond === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = bytesPerSecond, unit = 0;
  while (size >= 999.5 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
  return `${size < 10 && unit ? size.toFixed(1) : size.toFixed(0)} ${units[unit]}/s`;
}

/** "1:05:09", "2:03", "12 s", "0.5 s". */
export function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (parts[0] === 0) parts.shift();
  return parts.map((p, i) => (i ? String(p).padStart(2, "0") : p)).join(":");
}
