/** What a dashboard says of a cluster in numbers, as the notebook panel does (`notebook_cluster/widgets/model.py`). */

import * as React from 'react';

import type { ClusterView, JobView, NodeView, PeerView } from '../generated';
import { byteCount, duration, integer, number, percent, plural, roundTrip } from './format';
import { nodeColour } from './palette';

/** A rate, or a wait, above it is not one. */
const MOST = 1e12;

/** One number with its name, and what it means. */
export interface IFact {
  readonly label: string;
  readonly value: string;
  readonly note: string;
}

/** The header: nodes, round, bytes, what they are less than, loss of the global model, samples a second, time. */
export function factsOf(state: ClusterView): IFact[] {
  const up = state.nodes.filter(isUp).length;
  const count = up < state.nodes.length ? `${up} of ${state.nodes.length}` : String(up);
  const facts = [{ label: 'Nodes', value: count, note: `generation ${state.generation}` }];
  const job = state.jobs[0];
  if (job) {
    facts.push(...factsOfJob(job));
  }
  const rates = atWork(state).filter(isUp).flatMap(rateOf);
  if (rates.length && (trains(state) || (state.cell?.status === 'running' && !state.jobs.length))) {
    const all = Math.round(rates.reduce((sum, rate) => sum + rate, 0));
    facts.push({ label: 'Samples/s', value: integer(all), note: `of ${plural(rates.length, 'node')}` });
  }
  if (state.now !== null && state.started !== null) {
    facts.push({ label: 'Up', value: duration(state.now - state.started), note: '' });
  }
  return facts;
}

function factsOfJob(job: JobView): IFact[] {
  const working = `${job.strategy} · ${plural(job.parameters, 'parameter')}`;
  const note = job.waiting_for.length ? `waiting for ${job.waiting_for.join(', ')}` : working;
  const facts = [
    { label: 'Round', value: integer(job.round), note },
    { label: 'Sent', value: byteCount(job.bytes_sent), note: 'by all nodes' }
  ];
  const saved = job.bytes_data_parallel - job.bytes_sent;
  if (job.bytes_sent > 0 && saved > 0) {
    const times = integer(Math.round(job.bytes_data_parallel / job.bytes_sent));
    facts.push({ label: 'Saved', value: byteCount(saved), note: `${times}× less than data parallel` });
  }
  if (job.loss !== null) {
    const measured = `measured at round ${integer(job.loss_round)}`;
    facts.push({ label: 'Global loss', value: number(job.loss), note: measured });
  }
  if (job.hash_mismatches) {
    facts.push({ label: 'Hash mismatches', value: integer(job.hash_mismatches), note: 'see events' });
  }
  return facts;
}

/**
 * The nodes but those that are gone, or have failed or were lost in the newest cell: their last numbers are no news. All
 * where none is left.
 */
export function atWork({ nodes, cell }: ClusterView): readonly NodeView[] {
  const working = nodes.filter(node => !isGone(node) && !['error', 'lost'].includes(cell?.nodes[node.name] ?? ''));
  return working.length ? working : nodes;
}

/** How a node is, for people, and why: one whose kernel has failed in the newest cell has failed. */
export function conditionOf({ condition, reason, failed }: NodeView): [NodeView['condition'] | 'failed', string] {
  return condition === 'ok' && failed ? ['failed', reason || failed] : [condition, reason];
}

/** Whether a node is there and works, or could. */
export function isUp({ condition }: NodeView): boolean {
  return condition === 'ok' || condition === 'suspect' || condition === 'refused';
}

/** Whether its last numbers are those of a moment that is over. */
export function isGone({ condition }: NodeView): boolean {
  return condition === 'lost' || condition === 'dead' || condition === 'asleep';
}

/** Whether the running cell trains the first job: one that an earlier cell trained is only remembered. */
export function trains({ cell, jobs }: ClusterView): boolean {
  return cell?.status === 'running' && jobs.length > 0 && jobs[0].cell === cell.id;
}

/** Samples a second, or nothing where they are not known, not a number, or cannot be, or the node is gone. */
export function rateOf(node: NodeView): number[] {
  const rate = node.samples_per_s;
  return !isGone(node) && rate !== null && rate >= 0 && rate < MOST ? [rate] : [];
}

/** Whether it runs code now: it keeps its last rate when its cell has ended. */
export function isBusy({ name, busy }: NodeView, { cell }: ClusterView): boolean {
  return busy || (cell?.status === 'running' && cell.nodes[name] === 'running');
}

/**
 * Load and temperature of its device, processors that it keeps busy, power of its machine, and the way to it; nothing of
 * a node that is gone.
 */
export function vitalsOf(node: NodeView, peers: readonly PeerView[]): string {
  const facts: string[] = [];
  if (isGone(node)) {
    return '';
  }
  if (node.load !== null) {
    facts.push(`${node.device === 'cpu' ? "machine's CPU" : 'GPU'} ${percent(node.load)}`);
  }
  if (node.temperature !== null && Math.abs(node.temperature) < 1000) {
    facts.push(`${node.temperature.toFixed(0)} °C`);
  }
  if (node.cpu !== null && node.cpu >= 0.05 && node.cpu < MOST) {
    facts.push(`this node ${node.cpu.toFixed(1)} CPU cores`);
  }
  if (node.threads > 0 && node.threads < MOST) {
    facts.push(
      `${node.threads} thread${node.threads === 1 ? '' : 's'}${node.threads_chosen ? ' (its own setting)' : ''}`
    );
  }
  const peer = peers.find(candidate => candidate.name === node.peer);
  if (peer && peer.battery !== null) {
    facts.push(`${peer.plugged ? 'mains' : 'battery'} ${percent(peer.battery / 100)}`);
  }
  if (peer && peer.round_trip_ms !== null && peer.found_by !== 'local') {
    facts.push(`link ${roundTrip(peer.round_trip_ms, peer.jitter_ms)}`);
  }
  return facts.join(' · ');
}

/** The header as a row of numbers. */
export function Facts({ state }: { state: ClusterView }): React.JSX.Element {
  return (
    <dl className="nbc-dash-facts">
      {factsOf(state).map(({ label, value, note }) => (
        <div key={label}>
          <dt>{label}</dt>
          <dd>{value}</dd>
          <dd className="nbc-side-hint">{note}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Nodes that were waited for, as the panel has it. */
const LANES_SHOWN = 8;

interface ILane {
  readonly name: string;
  readonly said: string;
  readonly colour?: string;
  readonly bars: readonly { readonly left: number; readonly width: number; readonly said: string }[];
}

/**
 * The last rounds of a job on one line of time, as the panel has them (`widgets/timeline.py`): a lane with a bar for each,
 * then one for each of the nodes that were waited for longest. Places are in percent.
 */
export function lanesOf(job: JobView, nodes: readonly NodeView[]): ILane[] {
  // Where the job began anew, the rounds before have the same numbers.
  const anew = job.waits.reduce((last, wait, place) => (wait.round <= job.waits[place - 1]?.round ? place : last), 0);
  const waits = job.waits
    .slice(anew)
    .flatMap(({ seconds, time, ...wait }) =>
      seconds !== null && seconds >= 0 && seconds < MOST && time !== null ? [{ ...wait, seconds, time }] : []
    );
  if (!waits.length) {
    return [];
  }
  const begin = Math.min(...waits.map(wait => wait.time - wait.seconds));
  const end = Math.max(...waits.map(wait => wait.time));
  const across = Math.max(end - begin, 1e-3);
  const bar = (wait: (typeof waits)[number], seconds: number): ILane['bars'][number] => ({
    left: (100 * (wait.time - seconds - begin)) / across,
    width: (100 * seconds) / across,
    said: `round ${integer(wait.round)}: ${duration(wait.seconds)}`
  });
  const total = (its: typeof waits): number => its.reduce((sum, wait) => sum + wait.seconds, 0);
  const saidOf = (its: typeof waits): string => `${duration(total(its))} in ${plural(its.length, 'round')}`;
  const longest = [...new Set(waits.map(wait => wait.node))]
    .map(name => ({ name, its: waits.filter(wait => wait.node === name) }))
    .sort((one, other) => total(other.its) - total(one.its));
  const lanes: ILane[] = longest.slice(0, LANES_SHOWN).map(({ name, its }) => {
    const node = nodes.find(candidate => candidate.name === name);
    const bars = its.map(wait => bar(wait, wait.seconds));
    return { name, said: saidOf(its), colour: node && nodeColour(node), bars };
  });
  const rest = longest.slice(LANES_SHOWN);
  if (rest.length) {
    const name = `${plural(rest.length, 'node')} more`;
    lanes.push({ name, said: saidOf(rest.flatMap(({ its }) => its)), bars: [] });
  }
  const all = waits.map(wait => bar(wait, 0));
  return [{ name: plural(waits.length, 'round'), said: `in ${duration(end - begin)}`, bars: all }, ...lanes];
}

/** When the last rounds of the first job were, and for whom they waited. */
export function Waits({ state }: { state: ClusterView }): React.JSX.Element | null {
  const lanes = state.jobs.length ? lanesOf(state.jobs[0], state.nodes) : [];
  return lanes.length ? (
    <section aria-label="Rounds, and who was waited for">
      <h3>Rounds, and who was waited for</h3>
      <ol className="nbc-dash-waits">
        {lanes.map(({ name, said, colour, bars }, place) => (
          <li key={place}>
            <span className="nbc-side-name">{name}</span>
            <span className="nbc-dash-lane" aria-hidden="true" style={{ color: colour }}>
              {bars.map((bar, number) => (
                <span key={number} title={bar.said} style={{ left: `${bar.left}%`, width: `${bar.width}%` }} />
              ))}
            </span>
            <span>{said}</span>
          </li>
        ))}
      </ol>
    </section>
  ) : null;
}
