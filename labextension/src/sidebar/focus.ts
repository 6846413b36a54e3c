/** Which cluster is meant: that of the tab or the notebook that is in front, before any other. Pure. */

import type { ClusterView } from '../generated';
import type { IState } from './store';

/** What is in front of the person. */
export interface IFocus {
  /** The cluster whose tab it is, or empty. */
  readonly cluster: string;
  /** Id of the kernel of the notebook that is, or was last, in front; or empty. */
  readonly kernel: string;
  /** Path of that notebook, or empty. */
  readonly path: string;
}

export const NOWHERE: IFocus = { cluster: '', kernel: '', path: '' };

/** The clusters that run, as the server orders them. */
export function runningClusters(state: IState): ClusterView[] {
  return (state.overview?.clusters ?? []).flatMap(row => (row.condition === 'running' && row.state ? [row.state] : []));
}

/** The cluster that a notebook uses: its kernel attached to it last, or it has the notebook's name; else null. */
export function clusterOfNotebook(
  clusters: readonly ClusterView[],
  { kernel, path }: Pick<IFocus, 'kernel' | 'path'>
): ClusterView | null {
  const times = clusters.map(
    cluster => (kernel && Object.hasOwn(cluster.kernels, kernel) ? cluster.kernels[kernel] : null) ?? -1
  );
  const newest = Math.max(-1, ...times);
  if (newest >= 0) {
    return clusters[times.indexOf(newest)];
  }
  return (path && clusters.find(cluster => cluster.name === nameOf(path))) || null;
}

/** The cluster that is meant without a doubt: what is in front belongs to it, or it is the only one; else null. */
export function meantCluster(state: IState): ClusterView | null {
  const clusters = runningClusters(state);
  const { cluster, ...notebook } = state.focus;
  if (clusters.length < 2) {
    return clusters[0] ?? null;
  }
  return clusters.find(candidate => candidate.name === cluster) ?? clusterOfNotebook(clusters, notebook);
}

/** The clusters that an action may be for, among those that `fits`: the one that is meant, or all where none is. */
export function candidates(state: IState, fits: (cluster: ClusterView) => boolean = () => true): ClusterView[] {
  const meant = meantCluster(state);
  return (meant ? [meant] : runningClusters(state)).filter(fits);
}

/** The name that `%cluster start` gives to a cluster of this notebook, as `protocol/names.py` makes it. */
export function nameOf(path: string): string {
  const stem = path
    .slice(path.lastIndexOf('/') + 1)
    .replace(/^[A-Za-z]+:/, '')
    .replace(/\.ipynb$/i, '');
  const name = stem
    .replace(/[^A-Za-z0-9_-]+/g, '-')
    .replace(/^[-_]+|[-_]+$/g, '')
    .slice(0, 63);
  return name || 'cluster';
}
