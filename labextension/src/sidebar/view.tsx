/** The whole sidebar, drawn from the store. */

import * as React from 'react';

import { Cluster } from './clusters';
import { Act, Button, Problem, useAction } from './controls';
import { Peers, SharePart } from './peers';
import { curvesOf, IState, Link, Store } from './store';

interface ISidebar {
  readonly store: Store;
  readonly act: Act;
  readonly tryNow: () => void;
  readonly onOpen: (cluster: string) => void;
}

/** Draws itself anew when the store changes. */
export function Sidebar({ store, act, tryNow, onOpen }: ISidebar): React.JSX.Element {
  const state = React.useSyncExternalStore(store.subscribe, store.state);
  const { overview } = state;
  return (
    <div className="nbc-side">
      <Banner state={state} tryNow={tryNow} />
      {overview && (
        // Disabled as a whole while there is no connection: what is shown may be old, and no button would do anything.
        <fieldset className="nbc-side-all" disabled={state.link !== 'live'}>
          <Peers peers={overview.peers} clusters={overview.clusters} act={act} />
          <SharePart sharing={overview.sharing} act={act} />
          {overview.clusters.map(row => (
            <Cluster key={row.name} row={row} curves={curvesOf(state, row.name)} act={act} onOpen={onOpen} />
          ))}
          <StartPart act={act} none={overview.clusters.length === 0} />
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

function StartPart({ act, none }: { act: Act; none: boolean }): React.JSX.Element {
  const [name, setName] = React.useState('');
  const [send, problem] = useAction(act);
  const start = async (): Promise<void> => {
    const { error } = await send({ action: 'start', cluster: name.trim() });
    if (!error) {
      setName('');
    }
  };
  return (
    <section aria-label="Start a cluster">
      {none && (
        <p className="nbc-side-hint">
          No cluster runs. Type <code>%cluster start</code> in a notebook, or start one here.
        </p>
      )}
      <form
        className="nbc-side-line"
        onSubmit={event => {
          event.preventDefault();
          void start();
        }}
      >
        <input
          value={name}
          onChange={event => setName(event.target.value)}
          placeholder="name of a new cluster"
          aria-label="Name of a new cluster"
          autoComplete="off"
          spellCheck={false}
        />
        <Button label="Start" name="Start a cluster" disabled={!name.trim()} onPress={start} />
      </form>
      <Problem text={problem} />
    </section>
  );
}
