/** The curves of a dashboard: a number that was reported, over time and by step, and memory; chosen as in the notebook's panel. */

import * as React from 'react';

import type { ClusterView } from '../generated';
import { areNoise, Curves, curveKey, lossesIn, metricsIn, smoothed } from './curves';
import { byteCount, integer, number, plain } from './format';
import { nodeColour } from './palette';
import { Save } from './saving';
import { Across, ILine, IRange, logarithmic, pathOf, rangeOf } from './sparkline';

const DASHES = [undefined, '10 5', '3 4', '12 4 3 4'];
const WIDTH = 600;
const HEIGHT = 180;
/** As in the notebook's panel. */
const MOST_METRICS = 40;
const LONGEST_NAME = 40;

/** What the curves show. */
export interface IChoice {
  readonly metric: string;
  /** Nodes' numbers as a running mean; those of a global model are never. */
  readonly smooth: boolean;
  /** What is not above 0 is a gap. */
  readonly log: boolean;
}

/** What they show before anybody has chosen. */
export const CHOICE: IChoice = { metric: 'loss', smooth: true, log: false };

interface ICharts {
  readonly cluster: ClusterView;
  readonly curves: Curves;
  readonly choice: IChoice;
  readonly choose: (choice: IChoice) => void;
}

/** The charts below the choice of what they show. */
export function Charts({ cluster, curves, choice, choose }: ICharts): React.JSX.Element {
  const metrics = metricsIn(curves).slice(0, MOST_METRICS);
  // A cluster of the same name that was started again may report other numbers.
  const metric = metrics.includes(choice.metric) ? choice.metric : (metrics[0] ?? CHOICE.metric);
  const shown = { ...choice, metric };
  const memory: ILine[] = cluster.nodes.map(node => ({
    name: node.name,
    colour: nodeColour(node),
    points: curves.get(curveKey(node.name, 'memory')) ?? []
  }));
  const lines = linesOf(cluster, curves, shown);
  const scaled = choice.log ? lines.map(logarithmic) : lines;
  const measured = (): readonly ILine[] => linesOf(cluster, curves, { ...shown, smooth: false });
  const format = choice.log ? (value: number) => number(10 ** value) : number;
  const title = titleOf(metric);
  return (
    <>
      {metrics.length > 0 && <Choice metrics={metrics} choice={shown} choose={choose} />}
      <div className="nbc-dash-charts">
        <Chart title={title} lines={scaled} measured={measured} format={format} />
        <Chart title={`${title} by step`} lines={scaled} measured={measured} format={format} across="step" />
        <Chart title="Memory" lines={memory} measured={() => memory} format={byteCount} />
      </div>
    </>
  );
}

interface IChoiceRow {
  readonly metrics: readonly string[];
  readonly choice: IChoice;
  readonly choose: (choice: IChoice) => void;
}

function Choice({ metrics, choice, choose }: IChoiceRow): React.JSX.Element {
  return (
    <div className="nbc-dash-choice" role="group" aria-label="Curves">
      <select
        aria-label="Number that the curves show"
        value={choice.metric}
        onChange={event => choose({ ...choice, metric: event.target.value })}
      >
        {metrics.map(metric => (
          <option key={metric} value={metric}>
            {titleOf(metric)}
          </option>
        ))}
      </select>
      <Switch label="Smoothed" checked={choice.smooth} set={smooth => choose({ ...choice, smooth })} />
      <Switch label="Logarithmic" checked={choice.log} set={log => choose({ ...choice, log })} />
    </div>
  );
}

interface ISwitch {
  readonly label: string;
  readonly checked: boolean;
  readonly set: (checked: boolean) => void;
}

function Switch({ label, checked, set }: ISwitch): React.JSX.Element {
  return (
    <label>
      <input type="checkbox" checked={checked} onChange={event => set(event.target.checked)} /> {label}
    </label>
  );
}

function titleOf(metric: string): string {
  return metric === 'loss' ? 'Loss' : plain(metric, LONGEST_NAME);
}

function linesOf(cluster: ClusterView, curves: Curves, { metric, smooth }: IChoice): readonly ILine[] {
  const colours = new Map(cluster.nodes.map(node => [node.name, nodeColour(node)]));
  const order = [...colours.keys()];
  const losses = lossesIn(curves, true, metric).filter(({ node }) => colours.has(node));
  const asMeans = smooth && areNoise(losses);
  const lines: ILine[] = [...losses]
    .sort((one, other) => order.indexOf(one.node) - order.indexOf(other.node))
    .map(({ node, points, newest, ofRun, dash }) => ({
      name: ofRun ? `${node}, ${ofRun}` : node,
      colour: colours.get(node) ?? '',
      points: asMeans ? smoothed(points) : points,
      faint: !newest,
      dash
    }));
  // Drawn last, so that it lies above those of the nodes.
  const globals: ILine[] = lossesIn(curves, false, metric).map(({ job, points, newest, ofRun }) => {
    const name = cluster.jobs.length > 1 ? `global model of ${job}` : 'global model';
    return { name: newest ? name : `${name}, ${ofRun}`, colour: 'var(--jp-ui-font-color1)', points, faint: !newest };
  });
  const told = new Set(losses.filter(({ points }) => points.length > 0).map(({ node }) => node));
  const without = cluster.nodes.filter(node => !told.has(node.name));
  const silent: ILine[] = without.map(node => ({ name: node.name, colour: nodeColour(node), points: [] }));
  return [...lines.filter(line => line.faint), ...lines.filter(line => !line.faint), ...silent, ...globals];
}

interface IChart {
  readonly title: string;
  readonly lines: readonly ILine[];
  /** The same as they came: neither smoothed nor for a logarithmic axis. */
  readonly measured: () => readonly ILine[];
  readonly format: (value: number) => string;
  readonly across?: Across;
}

/** Curves with least and greatest value. Screen readers hear the range; the table below has the numbers. */
export function Chart({ title, lines, measured, format, across = 'time' }: IChart): React.JSX.Element {
  const range = rangeOf(lines, across);
  const label = range
    ? `${title} ${extent(range, across)}, from ${format(range.low)} to ${format(range.high)}`
    : `${title}: no values yet`;
  return (
    <figure className="nbc-dash-chart">
      <figcaption>
        {title} <span className="nbc-side-progress">{range && extent(range, across)}</span>
      </figcaption>
      {range ? (
        <>
          <svg role="img" aria-label={label} viewBox={`0 -4 ${WIDTH} ${HEIGHT + 8}`} preserveAspectRatio="none">
            <path className="nbc-dash-grid" d={`M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT}H${WIDTH}`} />
            {lines.map(line => (
              <path
                key={line.name}
                d={pathOf(line.points, range, WIDTH, HEIGHT, across)}
                stroke={line.colour}
                strokeOpacity={line.faint ? 0.3 : undefined}
                strokeDasharray={DASHES[(line.dash ?? 0) % DASHES.length]}
              />
            ))}
          </svg>
          <span className="nbc-dash-high">{format(range.high)}</span>
          <span className="nbc-dash-low">{format(range.low)}</span>
          <ul className="nbc-dash-legend">
            {lines.map(line => (
              <li key={line.name} className={line.faint ? 'nbc-dash-faint' : undefined}>
                <span style={{ background: line.colour }} /> {line.name}
              </li>
            ))}
          </ul>
          <Save
            chart={{
              ...{ name: title, title: `${title} ${extent(range, across)}`, lines, measured },
              ...{ range, across, format, dashes: DASHES }
            }}
          />
        </>
      ) : (
        <p className="nbc-side-hint">No values yet.</p>
      )}
    </figure>
  );
}

function extent({ from, to }: IRange, across: Across): string {
  return across === 'time' ? `over ${Math.round(to - from)} s` : `${integer(from)} to ${integer(to)}`;
}
