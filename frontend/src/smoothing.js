// Smooths a column over the x axis, for the eye.

/** Over how many steps, or seconds, a chart can be smoothed. */
export const LENGTHS = [0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

/**
 * An average in which the weight of a value halves with each `length` of the x axis.
 *
 * The weights depend on the distances only, so that the line is as smooth in a long
 * training, whose buckets have many steps, as in a short one. A value stands for the time
 * since the one before it. Gaps, null or undefined, stay.
 */
export function smooth(x, column, length) {
  if (!length) return column;
  let sum = 0, weight = 0, before = null;
  return column.map((value, i) => {
    if (value === null || value === undefined) return value;
    const kept = before === null ? 0 : 0.5 ** ((x[i] - before) / length);
    const added = before === null ? 1 - 0.5 ** (1 / length) : 1 - kept;
    before = x[i];
    sum = kept * sum + added * value;
    weight = kept * weight + added;
    return sum / weight;
  });
}
