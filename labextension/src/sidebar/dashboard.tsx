/** A cluster in the main area: how far it is, its curves, its nodes as a table, who was waited for, what happened. */

import * as React from 'react';

import type { ClusterView, EventView, NodeView } from '../generated';
import { progress } from './clusters';
import type { Act } from './controls';
import { Curves, curveKey, lossesIn, newestLoss } from './curves';
import { Facts, rateOf, vitalsOf, Waits } from './facts';
import { ABSENT, ago, byteCount, clock, duration, integer, number } from './format';
import { Logs } from './logs';
import { Memory } from './nodes';
import { nodeColour } from './palette';
import { Across, ILine, IRange, pathOf, rangeOf } from './sparkline';
import { curvesOf, Store } from './store';
import { Tabs } from './tabs';
import { Banner } from './view';

const DASHES = [undefined, '10 5', '3 4', '12 4 3 4'];
const WIDTH = 600;
const HEIGHT = 180;

interface IDashboard {
  readonly store: Store;
  /** Of the cluster. */
  readonly name: string;
  readonly act: Act;
  readonly tryNow: () => void;
}

/** Draws cluster `name` anew when the store changes. */
export function Dashboard({ store, name, act, tryNow }: IDashboard): React.JSX.Element {
  const state = React.useSyncExternalStore(store.subscribe, store.state);
  const row = state.overview?.clusters.find(candidate => candidate.name === name);
  const cluster = row?.state;
  const isRunning = row?.condition === 'running';
  const [part, setPart] = React.useState(PARTS[0]);
  // The log of a cluster that has ended cannot be asked for any more.
  const chosen = isRunning ? part : PARTS[0];
  return (
    // It can be focused, so that the arrow keys scroll it.
    <div className="nbc-side nbc-dash" role="region" aria-label={`dashboard of ${name}`} tabIndex={0}>
      <Banner state={state} tryNow={tryNow} />
      <h2>
        {name} <span className="nbc-side-progress">{cluster && row.condition === 'running' && progress(cluster)}</span>
      </h2>
      {state.overview && row?.condition !== 'running' && (
        <p role="status">{row ? `${row.condition}${row.reason && `: ${row.reason}`}` : 'This cluster does not run.'}</p>
      )}
      {cluster && (
        <Tabs
          label={`parts of ${name}`}
          names={isRunning ? PARTS : PARTS.slice(0, 1)}
          chosen={chosen}
          onChoose={setPart}
        >
          {chosen === LOGS ? (
            <Logs state={cluster} act={act} />
          ) : (
            <>
              <Facts state={cluster} />
              <Charts cluster={cluster} curves={curvesOf(state, name)} />
              <Nodes state={cluster} />
              {cluster.jobs.length > 0 && <Waits job={cluster.jobs[0]} />}
              <Events events={cluster.events} now={cluster.now} />
            </>
          )}
        </Tabs>
      )}
    </div>
  );
}

const LOGS = 'Logs';
const PARTS = ['Overview', LOGS];

function Charts({ cluster, curves }: { cluster: ClusterView; curves: Curves }): React.JSX.Element {
  const memory: ILine[] = cluster.nodes.map(node => ({
    name: node.name,
    colour: nodeColour(node),
    points: curves.get(curveKey(node.name, 'memory')) ?? []
  }));
  const colours = new Map(cluster.nodes.map(node => [node.name, nodeColour(node)]));
  const lines: ILine[] = lossesIn(curves, true)
    .filter(({ node }) => colours.has(node))
    .map(({ node, points, newest, ofRun, dash }) => ({
      name: ofRun ? `${node}, ${ofRun}` : node,
      colour: colours.get(node) ?? '',
      points,
      faint: !newest,
      dash
    }));
  // Drawn last, so that it lies above those of the nodes.
  const globals: ILine[] = lossesIn(curves, false).map(({ job, points, newest, ofRun }) => {
    const name = cluster.jobs.length > 1 ? `global model of ${job}` : 'global model';
    return { name: newest ? name : `${name}, ${ofRun}`, colour: 'var(--jp-ui-font-color1)', points, faint: !newest };
  });
  const without = cluster.nodes.filter(node => newestLoss(curves, node.name).length === 0);
  const silent: ILine[] = without.map(node => ({ name: node.name, colour: nodeColour(node), points: [] }));
  const losses = [...lines.filter(line => line.faint), ...lines.filter(line => !line.faint), ...silent, ...globals];
  return (
    <div className="nbc-dash-charts">
      <Chart title="Loss" lines={losses} format={number} />
      <Chart title="Loss by step" lines={losses} format={number} across="step" />
      <Chart title="Memory" lines={memory} format={byteCount} />
    </div>
  );
}

interface IChart {
  readonly title: string;
  readonly lines: readonly ILine[];
  readonly format: (value: number) => string;
  readonly across?: Across;
}

/** Curves with least and greatest value. Screen readers hear the range; the table below has the numbers. */
export function Chart({ title, lines, format, across = 'time' }: IChart): React.JSX.Element {
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

const HEADINGS = ['Node', 'Device', 'State', 'Memory', 'Step', 'Loss', 'Samples/s', 'Round', 'Waited', 'Checkpoint'];

function Nodes({ state }: { state: ClusterView }): React.JSX.Element {
  return (
    <table className="nbc-dash-table">
      <thead>
        <tr>
          {HEADINGS.map(heading => (
            <th key={heading} scope="col">
              {heading}
            </th>
          ))}
        </tr>
      </thead>
      <tbody>
        {state.nodes.map(node => (
          <Row key={node.name} node={node} state={state} />
        ))}
      </tbody>
    </table>
  );
}

function Row({ node, state }: { node: NodeView; state: ClusterView }): React.JSX.Element {
  const age = node.checkpoint_time === null || state.now === null ? null : state.now - node.checkpoint_time;
  return (
    <tr>
      <th scope="row" style={{ borderLeftColor: nodeColour(node) }}>
        {node.name}
        <Note text={node.peer === node.name ? '' : `on ${node.peer}`} />
      </th>
      <td>
        {node.device_name || node.device}
        <Note text={vitalsOf(node, state.peers)} />
      </td>
      <td>
        {node.replaying || (node.reason ? `${node.condition}: ${node.reason}` : node.condition)}
        <Note text={node.left_out} />
        <Note text={node.busy && node.waiting ? `waiting: ${node.waiting}` : ''} />
      </td>
      <td>
        <Memory node={node} />
        <Note text={node.memory_peak ? `peak ${byteCount(node.memory_peak)}` : ''} />
      </td>
      <td>{integer(node.step)}</td>
      <td>{number(node.loss)}</td>
      <td>{rateOf(node).map(Math.round).map(integer)[0] ?? ABSENT}</td>
      <td>{integer(node.last_round)}</td>
      <td>{duration(node.round_wait)}</td>
      <td>
        {node.checkpoint || ABSENT}
        <Note text={node.checkpoint && age !== null ? ago(age) : ''} />
      </td>
    </tr>
  );
}

function Note({ text }: { text: string }): React.JSX.Element | null {
  return text ? <div className="nbc-side-hint">{text}</div> : null;
}

function Events({ events, now }: { events: readonly EventView[]; now: number | null }): React.JSX.Element {
  return (
    <section aria-label="Events">
      <h3>Events</h3>
      <ol className="nbc-dash-events">
        {[...events].reverse().map((event, index) => (
          <li key={events.length - index} data-level={event.level}>
            <time>{clock(event.time, now)}</time> {event.level !== 'info' && <b>{event.level}: </b>}
            {event.text}
          </li>
        ))}
      </ol>
    </section>
  );
}
