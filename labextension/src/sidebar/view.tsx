/** The whole sidebar, drawn from the store. */

import * as React from 'react';

import { Cluster, IHandling } from './clusters';
import { Button } from './controls';
import { meantCluster } from './focus';
import { Peers, SharePart } from './peers';
import { StartPart } from './start';
import { curvesOf, IState, Link, Store } from './store';

interface ISidebar extends IHandling {
  readonly store: Store;
  readonly tryNow: () => void;
}

/** Draws itself anew when the store changes. */
export function Sidebar({ store, tryNow, ...handling }: ISidebar): React.JSX.Element {
  const state = React.useSyncExternalStore(store.subscribe, store.state);
  const { overview } = state;
  const { act } = handling;
  return (
    <div className="nbc-side">
      <Banner state={state} tryNow={tryNow} />
      {overview && (
        // Disabled as a whole while there is no connection: what is shown may be old, and no button would do anything.
        <fieldset className="nbc-side-all" disabled={state.link !== 'live'}>
          <Peers overview={overview} preferred={meantCluster(state)?.name ?? ''} act={act} />
          <SharePart sharing={overview.sharing} act={act} />
          {overview.clusters.map(row => (
            <Cluster key={row.name} row={row} curves={curvesOf(state, row.name)} {...handling} />
          ))}
          <StartPart overview={overview} act={act} />
        </fieldset>
      )}
    </div>
  );
}

const TEXTS: Record<Exclude<Link, 'live'>, string> = {
  connecting: 'Connecting to the Jupyter server …',
  lost: 'No connection to the Jupyter server. What is shown is as it was; the clusters go on.',
  missing:
    'The Jupyter server has no notebook-cluster extension: install notebook-cluster where the server runs ' +
    '("jupyter server extension enable notebook_cluster.server" switches it on), then restart the server.',
  refused: 'The Jupyter server refuses this page: log in again, then reload the page.'
};

/** Says why there is nothing new, and when the next try is; nothing while there is a connection. */
export function Banner({ state, tryNow }: { state: IState; tryNow: () => void }): React.JSX.Element | null {
  const { link, nextTry } = state;
  const seconds = useSecondsUntil(nextTry);
  if (link === 'live') {
    return null;
  }
  return (
    <div className="nbc-side-banner" data-link={link}>
      <span role="status">{TEXTS[link]}</span>
      {nextTry > 0 && (
        <span className="nbc-side-line">
          <span>{seconds > 0 ? `Next try in ${seconds} s.` : 'Trying …'}</span>
          <Button label="Try now" onPress={tryNow} />
        </span>
      )}
    </div>
  );
}

function useSecondsUntil(moment: number): number {
  const [now, setNow] = React.useState(Date.now);
  React.useEffect(() => {
    if (moment <= 0) {
      return undefined;
    }
    setNow(Date.now());
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [moment]);
  return Math.max(Math.ceil((moment - now) / 1000), 0);
}
