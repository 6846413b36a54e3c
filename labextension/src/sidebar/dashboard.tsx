/** A cluster in the main area: how far it is, its curves, its nodes as a table, who was waited for, what happened. */

import * as React from 'react';

import type { ClusterView, EventView, NodeView } from '../generated';
import { Charts, CHOICE } from './charts';
import { progress } from './clusters';
import type { Act } from './controls';
import { conditionOf, Facts, isBusy, isGone, rateOf, vitalsOf, Waits } from './facts';
import { useOpened } from './folding';
import { ABSENT, ago, byteCount, clock, duration, integer, number } from './format';
import { Logs } from './logs';
import { Memory } from './nodes';
import { nodeColour } from './palette';
import { curvesOf, Store } from './store';
import { Tabs } from './tabs';
import { Banner } from './view';

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
  // Here, so that a look at the logs does not lose it.
  const [choice, setChoice] = React.useState(CHOICE);
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
              <Charts cluster={cluster} curves={curvesOf(state, name)} choice={choice} choose={setChoice} />
              <Nodes state={cluster} />
              <Waits state={cluster} />
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

const HEADINGS = ['Node', 'Device', 'State', 'Memory', 'Step', 'Loss', 'Samples/s', 'Round', 'Waited', 'Checkpoint'];

function Nodes({ state }: { state: ClusterView }): React.JSX.Element {
  return (
    // It can be focused, so that the arrow keys scroll it where the tab is narrow.
    <div className="nbc-dash-wide" role="region" aria-label="Nodes" tabIndex={0}>
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
    </div>
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
        {node.replaying || conditionOf(node).filter(Boolean).join(': ')}
        <Note text={node.left_out} />
        <Note text={node.busy && node.waiting ? `waiting: ${node.waiting}` : ''} />
      </td>
      <td>
        <Memory node={node} />
        <Note text={node.memory_peak ? `peak ${byteCount(node.memory_peak)}` : ''} />
      </td>
      <td>{integer(node.step)}</td>
      <td>{isGone(node) ? ABSENT : number(node.loss)}</td>
      <td>{(isBusy(node, state) && rateOf(node).map(Math.round).map(integer)[0]) || ABSENT}</td>
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
  const [isOpen, setOpen] = useOpened('events of a dashboard', false);
  const latest = events[events.length - 1];
  return (
    <details className="nbc-dash-fold" open={isOpen} onToggle={event => setOpen(event.currentTarget.open)}>
      <summary>
        <h3>Events</h3> <span className="nbc-side-hint">{latest && `${clock(latest.time, now)} ${latest.text}`}</span>
      </summary>
      <ol className="nbc-dash-events">
        {[...events].reverse().map((event, index) => (
          <li key={events.length - index} data-level={event.level}>
            <time>{clock(event.time, now)}</time> {event.level !== 'info' && <b>{event.level}: </b>}
            {event.text}
          </li>
        ))}
      </ol>
    </details>
  );
}
