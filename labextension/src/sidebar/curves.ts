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
/** Of each job, the newest, as `protocol/runs.py` keeps them: what a page shows is the same after it is loaded again. */
const KEPT_RUNS = 8;
/** The numbers of runs that begin in one cell, as `protocol/runs.py` has it. */
const IN_A_CELL = 1000;

/** The key of curve `name` of a node, or of the global model of `job`, in a run of it. No name holds a line break. */
export function curveKey(node: string, name: string, job = '', run = 0): string {
  return `${node}\n${job}\n${run}\n${name}`;
}

/** The loss, or another number, of a node, or (`node` empty) of the global model, in one run of a job. */
export interface ILoss {
  readonly node: string;
  readonly job: string;
  readonly run: number;
  readonly points: readonly IPoint[];
  /** No run of this job was begun later, and no later cell has trained another job. */
  readonly newest: boolean;
  /** `generator`, `model run 2`; empty where nothing else is drawn. */
  readonly ofRun: string;
  /** 0, 1, 2 ... for the jobs in the order in which they appeared. */
  readonly dash: number;
}

/** Names of what is trained for or reported, those begun first first, but the loss before all. */
export function metricsIn(curves: Curves): readonly string[] {
  const names = new Set([...curves.keys()].map(key => key.split('\n')[3]));
  names.delete('memory');
  return names.delete('loss') ? ['loss', ...names] : [...names];
}

/** The losses of the nodes, or of the global models: every run of every job, those begun first first. */
export function lossesIn(curves: Curves, ofNodes: boolean, metric = 'loss'): readonly ILoss[] {
  const rows = [...curves]
    .map(([key, points]) => ({ parts: key.split('\n'), points }))
    .filter(({ parts }) => parts[3] === metric && (parts[0] !== '') === ofNodes)
    .map(({ parts, points }) => ({ node: parts[0], job: parts[1], run: Number(parts[2]), points }));
  const jobs = [...new Set(rows.map(row => row.job))];
  const runs = new Map(
    jobs.map(job => [
      job,
      [...new Set(rows.filter(row => row.job === job).map(row => row.run))].sort((one, other) => one - other)
    ])
  );
  const cell = Math.floor(Math.max(0, ...rows.map(row => row.run)) / IN_A_CELL);
  return rows
    .map(row => {
      const ofJob = runs.get(row.job) ?? [];
      const name = row.job || 'nc.report';
      const named = ofJob.length > 1 ? `${name} run ${ofJob.indexOf(row.run) + 1}` : name;
      const isOver = row.job !== '' && Math.floor(row.run / IN_A_CELL) < cell;
      const newest = row.run === ofJob[ofJob.length - 1] && !isOver;
      const ofRun = ofJob.length > 1 || jobs.length > 1 ? named : '';
      return { ...row, newest, ofRun, dash: jobs.indexOf(row.job) };
    })
    .sort((one, other) => one.run - other.run || one.dash - other.dash);
}

/** The loss of `node` that was begun last. */
export function newestLoss(curves: Curves, node: string): readonly IPoint[] {
  const begun = lossesIn(curves, true).filter(loss => loss.node === node && loss.points.length > 0);
  begun.sort((one, other) => one.points[0].time - other.points[0].time);
  return begun.length ? begun[begun.length - 1].points : [];
}

/**
 * `curves` with what `news` adds. Points that are known are left out; a long curve loses every second point, and a job
 * its oldest runs.
 */
export function extend(curves: Curves, news: readonly Curve[]): Curves {
  const next = new Map(curves);
  for (const curve of news) {
    const key = curveKey(curve.node, curve.name, curve.job, curve.run);
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
  forgetRuns(next);
  return next;
}

/** Take the curves out whose run is not one of its job's newest. */
function forgetRuns(curves: Map<string, readonly IPoint[]>): void {
  const runs = new Map<string, Set<number>>();
  for (const key of curves.keys()) {
    const [, job, run] = key.split('\n');
    runs.set(job, (runs.get(job) ?? new Set()).add(Number(run)));
  }
  for (const [job, numbers] of runs) {
    const old = new Set([...numbers].sort((one, other) => other - one).slice(KEPT_RUNS));
    for (const key of old.size ? [...curves.keys()] : []) {
      const parts = key.split('\n');
      if (parts[1] === job && old.has(Number(parts[2]))) {
        curves.delete(key);
      }
    }
  }
}

const FEW_POINTS = 50;
const SMOOTHING = 0.9;

/**
 * Whether the curves of nodes in a chart are drawn as running means where people wish it: all of them or none, or one
 * that ended early would seem to be elsewhere. A few points, measured now and then, are no noise.
 */
export function areNoise(losses: readonly ILoss[]): boolean {
  return losses.some(({ points }) => points.length > FEW_POINTS);
}

/**
 * The exponential mean up to each point, without the pull to the first (as Adam's first moment), as
 * `widgets/curves.py` has it; what is no number stays none and counts for nothing.
 */
export function smoothed(points: readonly IPoint[]): readonly IPoint[] {
  let [total, weight] = [0, 0];
  return points.map(point => {
    if (point.value === null) {
      return point;
    }
    total = SMOOTHING * total + (1 - SMOOTHING) * point.value;
    weight = SMOOTHING * weight + (1 - SMOOTHING);
    return { ...point, value: total / weight };
  });
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
