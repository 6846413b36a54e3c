/** What has happened between two overviews that somebody who looks elsewhere wants to be told. Pure. */

import type { CellView, ClusterRow, ClusterView, NodeView, Overview } from '../generated';
import { isGone, trains } from './facts';
import { duration, number } from './format';

/** One thing to tell. */
export interface INews {
  readonly kind: 'success' | 'info' | 'error';
  readonly text: string;
  /** The cluster that it is about. */
  readonly cluster: string;
}

const LONGEST_REASON = 160;
const MOST_NAMED = 3;

/**
 * The news of every cluster that runs now and ran in `before`. What is so when a page is loaded is no news, nor is
 * anything of a cluster that has ended.
 */
export function newsBetween(before: Overview | null, after: Overview): INews[] {
  const known = new Map((before?.clusters ?? []).map(row => [row.name, row]));
  return after.clusters.flatMap(row => {
    const old = stateOf(known.get(row.name));
    const now = row.condition === 'running' ? stateOf(row) : null;
    // Another epoch of the same cluster goes on with the same nodes; another run of its name began later.
    return old && now && old.started === now.started ? [...lostNodes(old, now), ...trainingEnded(old, now)] : [];
  });
}

function stateOf(row: ClusterRow | undefined): ClusterView | null {
  return row && row.condition !== 'ended' ? row.state : null;
}

function lostNodes(old: ClusterView, now: ClusterView): INews[] {
  const before = new Map(old.nodes.map(node => [node.name, node]));
  return now.nodes.flatMap(node => {
    const was = before.get(node.name);
    if (!was || isAway(was) || !isAway(node)) {
      return [];
    }
    const reason = node.reason && node.reason !== node.condition ? `: ${short(node.reason)}` : '';
    const text = `Node ${node.name} of cluster ${now.name} is ${node.condition}${reason}`;
    return [{ kind: 'error' as const, text, cluster: now.name }];
  });
}

/** Lost for its cluster, and nobody wanted that; one that sleeps says so itself and comes back. */
function isAway(node: NodeView): boolean {
  return isGone(node) && node.condition !== 'asleep' && !ASKED.includes(node.reason);
}

const ASKED = ['removed', 'restarted', 'stopped'];

function trainingEnded(old: ClusterView, now: ClusterView): INews[] {
  const cell = old.cell;
  if (!cell || !trains(old) || (now.cell?.id === cell.id && now.cell.status === 'running')) {
    return [];
  }
  const jobs = now.jobs.filter(job => job.cell === cell.id);
  const what = `Training of ${(jobs.length ? jobs : old.jobs.slice(0, 1)).map(job => job.name).join(', ')} in cluster ${now.name}`;
  // A cell that ran after it has taken its place: how it ended is not told any more.
  const end = now.cell?.id === cell.id ? now.cell : null;
  const began = cell.started;
  const took = end && end.ended !== null && began ? ` after ${duration(end.ended - began)}` : '';
  const told = jobs.length === 1 ? `, round ${jobs[0].round}${lossOf(jobs[0].loss)}` : '';
  switch (end?.status) {
    case 'error': {
      // A node that was lost has its own news; the others may have trained to the end.
      const failed = nodesWith(end, 'error');
      const without = nodesWith(end, 'lost');
      return failed.length || !without.length
        ? [{ kind: 'error', text: `${what} failed${on(' on', failed)}${took}${told}`, cluster: now.name }]
        : [{ kind: 'info', text: `${what} has ended${on(' without', without)}${took}${told}`, cluster: now.name }];
    }
    case 'interrupted':
      return [{ kind: 'info', text: `${what} was stopped${took}${told}`, cluster: now.name }];
    default:
      return [{ kind: 'success', text: `${what} has ended${took}${told}`, cluster: now.name }];
  }
}

function nodesWith({ nodes }: CellView, status: string): string[] {
  return Object.keys(nodes).filter(name => nodes[name] === status);
}

function on(word: string, names: readonly string[]): string {
  const rest = names.length > MOST_NAMED ? ` and ${names.length - MOST_NAMED} more` : '';
  return names.length ? `${word} ${names.slice(0, MOST_NAMED).join(', ')}${rest}` : '';
}

function lossOf(loss: number | null): string {
  return loss === null ? '' : `, loss of the global model ${number(loss)}`;
}

function short(text: string): string {
  return text.length > LONGEST_REASON ? `${text.slice(0, LONGEST_REASON - 1)}…` : text;
}
