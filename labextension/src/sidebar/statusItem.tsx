/** One line in the status bar about the cluster that is meant. */

import * as React from 'react';

import { progress } from './clusters';
import { meantCluster, runningClusters } from './focus';
import { Store } from './store';

/**
 * `lesson: 2 nodes · round 12 · loss 0.3120`, as a button that opens the sidebar. Where none of several clusters is
 * meant it says how many there are, and how the one is doing that runs a cell, or the first.
 */
export function StatusItem({ store, onPress }: { store: Store; onPress: () => void }): React.JSX.Element | null {
  const state = React.useSyncExternalStore(store.subscribe, store.state);
  const clusters = runningClusters(state);
  const meant = meantCluster(state);
  const shown = meant ?? clusters.find(cluster => cluster.cell?.status === 'running') ?? clusters[0];
  if (!shown) {
    return null;
  }
  const text = state.link === 'live' ? progress(shown) : 'no connection';
  const line = `${meant ? '' : `${clusters.length} clusters · `}${shown.name}: ${text}`;
  return (
    <button type="button" className="nbc-side-status" title={`${line}\nShow the clusters`} onClick={onPress}>
      {line}
    </button>
  );
}
