/** The curves of a cluster as far as this page has seen them. */

import type { Curve } from '../generated';

/** One point: seconds since the epoch, the step, and null where the value was NaN or infinite. */
export interface IPoint {
  readonly time: number;
  readonly step: number;
  readonly value: number | null;
}

/** Key of a curve -> its points, oldest first. */
export type Curves = ReadonlyMap<string, readonly IPoint[]>;

const MOST_POINTS = 400;

/** The key of curve `name` of a node, or of the global model of `job`. Neither name holds a line break. */
export function curveKey(node: string, name: string, job = ''): string {
  return `${node}\n${job}\n${name}`;
}

/** `curves` with what `news` adds. Points that are known are left out; a long curve loses every second point. */
export function extend(curves: Curves, news: readonly Curve[]): Curves {
  const next = new Map(curves);
  for (const curve of news) {
    const key = curveKey(curve.node, curve.name, curve.job);
    const known = next.get(key) ?? [];
    const newest = known.length ? known[known.length - 1].time : -Infinity;
    const count = Math.min(curve.step.length, curve.time.length, curve.value.length);
    const added: IPoint[] = [];
    for (let index = 0; index < count; index++) {
      const time = curve.time[index];
      if (time !== null && time > newest) {
        added.push({ time, step: curve.step[index], value: curve.value[index] });
      }
    }
    if (added.length) {
      next.set(key, thin([...known, ...added]));
    }
  }
  return next;
}

/** The newest value that is a number, or null. */
export function newest(points: readonly IPoint[]): number | null {
  for (let index = points.length - 1; index >= 0; index--) {
    if (points[index].value !== null) {
      return points[index].value;
    }
  }
  return null;
}

// First and newest point stay, so that a curve begins and ends where it does.
function thin(points: readonly IPoint[]): readonly IPoint[] {
  let kept = points;
  while (kept.length > MOST_POINTS) {
    const last = kept.length - 1;
    kept = kept.filter((_, index) => index === 0 || (last - index) % 2 === 0);
  }
  return kept;
}
