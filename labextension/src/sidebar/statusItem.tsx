/** One line in the status bar about the cluster that works. */

import * as React from 'react';

import type { ClusterView } from '../generated';
import { progress } from './clusters';
import { IState, Store } from './store';

/** The cluster that runs a cell, else the first that runs; null where none does. */
export function currentCluster(state: IState): ClusterView | null {
  const running = (state.overview?.clusters ?? []).flatMap(row =>
    row.condition === 'running' && row.state ? [row.state] : []
  );
  return running.find(cluster => cluster.cell?.status === 'running') ?? running[0] ?? null;
}

/** `lesson: 2 nodes · round 12 · loss 0.3120`, as a button that opens the sidebar. */
export function StatusItem({ store, onPress }: { store: Store; onPress: () => void }): React.JSX.Element | null {
  const state = React.useSyncExternalStore(store.subscribe, store.state);
  const cluster = currentCluster(state);
  if (!cluster) {
    return null;
  }
  const text = state.link === 'live' ? progress(cluster) : 'no connection';
  return (
    <button type="button" className="nbc-side-status" title="Show the clusters" onClick={onPress}>
      {`${cluster.name}: ${text}`}
    </button>
  );
}
