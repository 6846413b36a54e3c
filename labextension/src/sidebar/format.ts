/** Numbers as people read them, the same as `notebook_cluster/widgets/formatting.py` writes them. */

export const ABSENT = '–';
const UNITS = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];

/** `count` bytes in decimal units: `0 B`, `812 kB`, `1.2 GB`. */
export function byteCount(count: number): string {
  if (!Number.isFinite(count) || count <= 0) {
    return '0 B';
  }
  let [value, unit] = [count, 0];
  while (value >= 999.5 && unit < UNITS.length - 1) {
    [value, unit] = [value / 1000, unit + 1];
  }
  return `${value < 10 && unit > 0 ? value.toFixed(1) : value.toFixed(0)} ${UNITS[unit]}`;
}

/** A loss with four significant digits; a dash for null, which also stands for NaN and infinity. */
export function number(value: number | null): string {
  if (value === null || !Number.isFinite(value)) {
    return ABSENT;
  }
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e5)) {
    return value.toExponential(3);
  }
  return value.toFixed(size < 10 ? 4 : size < 100 ? 3 : size < 1000 ? 2 : 1);
}

/** `1 node`, `3 nodes`. */
export function plural(count: number, word: string): string {
  return `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;
}

/** Seconds as `40 s ago`, `3 min ago`, `2 h ago`. */
export function ago(seconds: number): string {
  const whole = Math.max(seconds, 0);
  if (whole < 90) {
    return `${whole.toFixed(0)} s ago`;
  }
  return whole < 5400 ? `${(whole / 60).toFixed(0)} min ago` : `${(whole / 3600).toFixed(0)} h ago`;
}
