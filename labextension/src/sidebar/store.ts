/** What this page knows: the newest overview, the curves, and whether the server is there. Views only read it. */

import type { CurvePoints, Overview } from '../generated';
import { Curves, extend } from './curves';
import { IFocus, NOWHERE } from './focus';

/** `missing`: the Jupyter server has no such address; `refused`: it does not accept this page's token. */
export type Link = 'connecting' | 'live' | 'lost' | 'missing' | 'refused';

export interface IState {
  readonly link: Link;
  /** Milliseconds since the epoch of the next try, while there is no connection. */
  readonly nextTry: number;
  readonly overview: Overview | null;
  readonly curves: ReadonlyMap<string, Curves>;
  readonly focus: IFocus;
}

const NOTHING: IState = { link: 'connecting', nextTry: 0, overview: null, curves: new Map(), focus: NOWHERE };
const NO_CURVES: Curves = new Map();

/** Holds an IState, and calls those who listen when it is another one. */
export class Store {
  private current = NOTHING;
  private readonly listeners = new Set<() => void>();

  /** The newest state; the same object until something changes. */
  readonly state = (): IState => this.current;

  /** Call `listener` after every change; returns what ends that. */
  readonly subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  };

  /** A connection was made: the server sends everything again. */
  connected(): void {
    this.change({ link: 'live', nextTry: 0 });
  }

  /** There is no connection, and the next try is at `nextTry`. What was known stays visible. */
  disconnected(link: Exclude<Link, 'live'>, nextTry: number): void {
    this.change({ link, nextTry });
  }

  /** The server's newest overview. Curves of clusters that are gone are dropped. */
  show(overview: Overview): void {
    const names = new Set(overview.clusters.map(row => row.name));
    const curves = new Map([...this.current.curves].filter(([name]) => names.has(name)));
    this.change({ overview, curves });
  }

  /** Something else is in front of the person. */
  focus(focus: IFocus): void {
    const { cluster, kernel, path } = this.current.focus;
    if (focus.cluster !== cluster || focus.kernel !== kernel || focus.path !== path) {
      this.change({ focus });
    }
  }

  /** New points, or the whole history. */
  extend(message: CurvePoints): void {
    const curves = new Map(this.current.curves);
    const known = message.reset ? NO_CURVES : (curves.get(message.cluster) ?? NO_CURVES);
    curves.set(message.cluster, extend(known, message.series));
    this.change({ curves });
  }

  private change(part: Partial<IState>): void {
    this.current = { ...this.current, ...part };
    for (const listener of [...this.listeners]) {
      listener();
    }
  }
}

/** The curves of `cluster`. */
export function curvesOf(state: IState, cluster: string): Curves {
  return state.curves.get(cluster) ?? NO_CURVES;
}
