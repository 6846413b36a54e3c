/** The WebSocket to the Jupyter server: messages into the store, actions out, and a new try after each break. */

import type { Action, ServerMessage } from '../generated';
import type { Link, Store } from './store';

/** As much of a WebSocket as is used. */
export interface ISocket {
  onopen: ((event: never) => unknown) | null;
  onclose: ((event: never) => unknown) | null;
  onmessage: ((event: never) => unknown) | null;
  send(data: string): void;
  close(): void;
}

/** How to reach the server. */
export interface IServer {
  open(): ISocket;
  /** Status of the HTTP address beside the WebSocket; rejects when nobody answers. */
  probe(): Promise<number>;
}

/** An action without the number that its answer carries. */
export type Request = Omit<Action, 'id'>;

/** The answer to an action: `error` is one line, or empty. */
export interface IAnswer {
  readonly error: string;
  readonly value: unknown;
}

const FIRST_WAIT = 500;
const LONGEST_WAIT = 30_000;
const LONGEST_TRY = 30_000;
const LOST = 'the connection to the Jupyter server was lost: look whether it happened, then try again';
const NOT_THERE = 'there is no connection to the Jupyter server: wait for it, or press "Try now"';

/** Connects when made; `dispose` ends it. */
export class Connection {
  private socket: ISocket | null = null;
  private isOpen = false;
  private failures = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private disposed = false;
  private count = 0;
  private readonly waiting = new Map<number, (answer: IAnswer) => void>();

  constructor(
    private readonly server: IServer,
    private readonly store: Store
  ) {
    this.connect();
  }

  /** Connect at once instead of at the next try. */
  readonly tryNow = (): void => {
    if (!this.socket && !this.disposed) {
      clearTimeout(this.timer);
      this.connect();
    }
  };

  /** Ask for something; never rejects. */
  readonly act = (request: Request): Promise<IAnswer> => {
    const socket = this.socket;
    if (!socket || !this.isOpen) {
      return Promise.resolve({ error: NOT_THERE, value: null });
    }
    const id = ++this.count;
    return new Promise(resolve => {
      this.waiting.set(id, resolve);
      socket.send(JSON.stringify({ ...request, id }));
    });
  };

  dispose(): void {
    this.disposed = true;
    clearTimeout(this.timer);
    this.socket?.close();
  }

  private connect(): void {
    const socket = this.server.open();
    this.socket = socket;
    // Nobody tells a browser that a server which took the connection will never answer: then it is tried anew.
    const late = setTimeout(() => socket.close(), LONGEST_TRY);
    socket.onopen = () => {
      clearTimeout(late);
      this.isOpen = true;
      this.failures = 0;
      this.store.connected();
    };
    socket.onmessage = (event: never) => this.receive((event as MessageEvent).data);
    socket.onclose = () => {
      clearTimeout(late);
      void this.closed();
    };
  }

  private async closed(): Promise<void> {
    const wasOpen = this.isOpen;
    this.socket = null;
    this.isOpen = false;
    for (const resolve of this.waiting.values()) {
      resolve({ error: LOST, value: null });
    }
    this.waiting.clear();
    if (this.disposed) {
      return;
    }
    const wait = Math.min(FIRST_WAIT * 2 ** this.failures++, LONGEST_WAIT);
    this.timer = setTimeout(() => this.connect(), wait);
    const nextTry = Date.now() + wait;
    const before = this.store.state().link;
    this.store.disconnected(before === 'live' ? 'lost' : before, nextTry);
    if (!wasOpen) {
      const link = await this.reason();
      if (!this.isOpen && !this.disposed) {
        this.store.disconnected(link, this.store.state().nextTry);
      }
    }
  }

  // A browser does not tell why a WebSocket was refused; the HTTP address beside it does.
  private async reason(): Promise<Exclude<Link, 'live'>> {
    try {
      const status = await this.server.probe();
      return status === 404 ? 'missing' : status === 401 || status === 403 ? 'refused' : 'lost';
    } catch {
      return 'lost';
    }
  }

  private receive(data: string): void {
    const message = JSON.parse(data) as ServerMessage;
    switch (message.type) {
      case 'Overview':
        this.store.show(message);
        break;
      case 'CurvePoints':
        this.store.extend(message);
        break;
      case 'Done':
        this.waiting.get(message.id)?.({ error: message.error, value: message.value });
        this.waiting.delete(message.id);
        break;
    }
  }
}
