/**
 * Numbers and times as people read them, the same as `notebook_cluster/widgets/formatting.py` and
 * `notebook_cluster/protocol/clock.py` write them: `__tests__/shown.json` is held against both.
 */

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

/** A loss with four significant digits, 0 as `0`; a dash for null, which also stands for NaN and infinity. */
export function number(value: number | null): string {
  if (value === null || !Number.isFinite(value)) {
    return ABSENT;
  }
  if (value === 0) {
    return '0';
  }
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e5) {
    return value.toExponential(3).replace(/e([+-])(\d)$/, 'e$10$2');
  }
  const digits = size < 10 ? 4 : size < 100 ? 3 : size < 1000 ? 2 : 1;
  return value.toLocaleString('en', { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** `text` of another machine without what turns its direction or is no character to see, cut to `limit`. */
export function plain(text: string, limit: number): string {
  const seen = text.replace(UNSEEN, ' ');
  return seen.length > limit ? `${seen.slice(0, limit - 1)}…` : seen;
}

/** `1 node`, `3 nodes`. */
export function plural(count: number, word: string): string {
  return `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;
}

const LARGEST = 2 ** 36;
const two = (value: number): string => String(value).padStart(2, '0');
const dayOf = (moment: Date): string =>
  `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;

/**
 * A moment (seconds since 1970) in local time: `14:03:10`, with its date where that is not the day of `today`
 * (default: now): `2026-11-19 14:03:10`. A dash for what is no moment.
 */
export function clock(seconds: number | null, today: number | null = null): string {
  if (seconds === null || !(seconds >= 0 && seconds < LARGEST)) {
    return ABSENT;
  }
  const moment = new Date(seconds * 1000);
  const time = [moment.getHours(), moment.getMinutes(), moment.getSeconds()].map(two).join(':');
  const isToday = dayOf(moment) === dayOf(today === null ? new Date() : new Date(today * 1000));
  return isToday ? time : `${dayOf(moment)} ${time}`;
}

const LENGTHS: readonly (readonly [number, number, string])[] = [
  [90, 1, 's'],
  [5400, 60, 'min'],
  [129_600, 3600, 'h'],
  [Infinity, 86_400, 'd']
];

/** Seconds as `40 s ago`, `3 min ago`, `2 h ago`, `5 d ago`. */
export function ago(seconds: number): string {
  const [, unit, name] = LENGTHS.find(([limit]) => seconds < limit) ?? LENGTHS[3];
  return `${(Math.max(seconds, 0) / unit).toFixed(0)} ${name} ago`;
}

/** A share (1: all) as `93 %`, held between 0 and 100. */
export function percent(share: number): string {
  return `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(0)} %`;
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
