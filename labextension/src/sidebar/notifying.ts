/** JupyterLab's notifications about clusters: they are seen whatever is in front, and stay in its list. */

import { Notification } from '@jupyterlab/apputils';

import type { Overview } from '../generated';
import { newsBetween } from './news';
import type { Store } from './store';

const SECONDS_SHOWN = 15;

/** Tell what happens from now on, while `isWanted` says so; `open` opens the tab of a cluster. */
export function notifyOf(store: Store, isWanted: () => boolean, open: (cluster: string) => void): void {
  let before: Overview | null = null;
  store.subscribe(() => {
    const { overview } = store.state();
    if (!overview || overview === before) {
      return;
    }
    const news = newsBetween(before, overview);
    before = overview;
    for (const { kind, text, cluster } of isWanted() ? news : []) {
      Notification.emit(text, kind, {
        // What is lost waits for somebody who can bring it back.
        autoClose: kind === 'error' ? false : 1000 * SECONDS_SHOWN,
        actions: [{ label: 'Dashboard', callback: () => open(cluster) }]
      });
    }
  });
}
