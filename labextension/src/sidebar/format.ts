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

/** Seconds as `40 ms`, `3.4 s`, `2 min 05 s`, `1 h 12 min` or `3 d 4 h`; a dash for null. */
export function duration(seconds: number | null): string {
  if (seconds === null || !Number.isFinite(seconds)) {
    return ABSENT;
  }
  const whole = Math.max(seconds, 0);
  if (whole < 0.0995) {
    return `${(whole * 1000).toFixed(0)} ms`;
  }
  if (whole < 59.95) {
    return `${whole.toFixed(1)} s`;
  }
  const [minutes, rest] = [Math.floor(Math.round(whole) / 60), Math.round(whole) % 60];
  if (minutes < 60) {
    return `${minutes} min ${String(rest).padStart(2, '0')} s`;
  }
  const hours = Math.floor(minutes / 60);
  return hours < 24
    ? `${hours} h ${String(minutes % 60).padStart(2, '0')} min`
    : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** `1.8 ms ± 0.4 ms`: mean and mean deviation of a round trip; `1.8 ms` while the deviation is not known. */
export function roundTrip(milliseconds: number, jitter: number | null): string {
  const one = (value: number): string => (value < 10 ? `${value.toFixed(1)} ms` : duration(value / 1000));
  return jitter === null ? one(milliseconds) : `${one(milliseconds)} ± ${one(jitter)}`;
}

/** `count` with thousands separated, a dash for null. */
export function integer(count: number | null): string {
  return count?.toLocaleString('en') ?? ABSENT;
}
