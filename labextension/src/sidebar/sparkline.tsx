/** A curve as SVG. Places without a number are gaps. */

import * as React from 'react';

import type { IPoint } from './curves';

/** One line of a chart. */
export interface ILine {
  readonly name: string;
  readonly colour: string;
  readonly points: readonly IPoint[];
  /** Of an earlier run. */
  readonly faint?: boolean;
  /** 0: solid, else another pattern for each number. */
  readonly dash?: number;
}

/** What a chart has from left to right. */
export type Across = 'time' | 'step';

/** `line` for a logarithmic axis: the decimal logarithm of each value; what is not above 0 is a gap. */
export function logarithmic(line: ILine): ILine {
  const of = (value: number | null): number | null => (value !== null && value > 0 ? Math.log10(value) : null);
  return { ...line, points: line.points.map(point => ({ ...point, value: of(point.value) })) };
}

/** Least and greatest value, and time or step, of all lines. */
export interface IRange {
  readonly from: number;
  readonly to: number;
  readonly low: number;
  readonly high: number;
}

/** What `lines` span; null where none has a number. */
export function rangeOf(lines: readonly ILine[], across: Across = 'time'): IRange | null {
  let range: IRange | null = null;
  for (const { points } of lines) {
    for (const { [across]: place, value } of points) {
      if (value !== null) {
        const { from, to, low, high }: IRange = range ?? { from: place, to: place, low: value, high: value };
        range = {
          from: Math.min(from, place),
          to: Math.max(to, place),
          low: Math.min(low, value),
          high: Math.max(high, value)
        };
      }
    }
  }
  return range;
}

/** `points` as the `d` of a path in a box of `width` times `height`; a second run, whose steps begin again, is a new line. */
export function pathOf(
  points: readonly IPoint[],
  range: IRange,
  width: number,
  height: number,
  across: Across = 'time'
): string {
  const breadth = range.to - range.from || 1;
  const span = range.high - range.low || 1;
  let command = 'M';
  let path = '';
  let before = -Infinity;
  for (const { [across]: place, value } of points) {
    if (value === null) {
      command = 'M';
      continue;
    }
    const x = ((place - range.from) / breadth) * width;
    const y = height - ((value - range.low) / span) * height;
    path += `${place < before ? 'M' : command}${x.toFixed(1)} ${y.toFixed(1)}`;
    command = 'L';
    before = place;
  }
  return path;
}

const WIDTH = 96;
const HEIGHT = 20;

/** The loss of a node, small; `label` is what a screen reader says. */
export function Sparkline({ line, label }: { line: ILine; label: string }): React.JSX.Element {
  const range = rangeOf([line]);
  return (
    <svg
      className="nbc-side-spark"
      role="img"
      aria-label={label}
      viewBox={`-1 -2 ${WIDTH + 2} ${HEIGHT + 4}`}
      preserveAspectRatio="none"
    >
      <title>{label}</title>
      {range && <path d={pathOf(line.points, range, WIDTH, HEIGHT)} stroke={line.colour} />}
    </svg>
  );
}
