/** States as the server sends them, a server that the test plays, and a place to draw into. */

import * as React from 'react';
import { act } from 'react';
import { createRoot, Root } from 'react-dom/client';

import type { ClusterRow, ClusterView, Curve, JobView, NodeView, Overview, PeerView } from '../generated';
import type { IHandling } from '../sidebar/clusters';
import type { IAnswer, ISocket, Request } from '../sidebar/connection';
import { QUIET_MILLISECONDS } from '../sidebar/question';

(globalThis as any).IS_REACT_ACT_ENVIRONMENT = true;

export function node(name: string, rank: number, changes: Partial<NodeView> = {}): NodeView {
  return {
    ...{ name, rank, peer: name, device: 'cpu', device_name: 'Ryzen 7', incarnation: 1, condition: 'ok', reason: '' },
    ...{ log_tail: [], busy: false, memory_kind: 'RAM', memory_used: 2e9, memory_peak: 3e9, memory_total: 8e9 },
    ...{
      cpu: 0.5,
      load: null,
      temperature: null,
      step: 10,
      loss: null,
      scalars: {},
      samples_per_s: null,
      last_round: null,
      round_wait: null
    },
    ...{ checkpoint: '', checkpoint_time: null, waiting: '', threads: 0, threads_chosen: false },
    ...{ replaying: '', left_out: '', failed: '' },
    ...changes
  } as NodeView;
}

export function peer(name: string, changes: Partial<PeerView> = {}): PeerView {
  return {
    ...{ name, key: `key of ${name}`, address: '192.0.2.7:4000', condition: 'found', found_by: 'mdns', trusted: true },
    ...{ device: 'cpu', reason: '', round_trip_ms: null, jitter_ms: null, pairing: false, slept: null, battery: null },
    plugged: true,
    ...changes
  } as PeerView;
}

export function cluster(name: string, changes: Partial<ClusterView> = {}): ClusterRow {
  const state = {
    ...{
      name,
      epoch: 1,
      generation: 1,
      started: 1000,
      now: 1060,
      nodes: [node('desk', 0), node('mini', 1)],
      peers: []
    },
    ...{
      jobs: [],
      cell: null,
      queued: 0,
      events: [],
      directory: '',
      run_log: '',
      invitation: '',
      kernels: {},
      launches: []
    },
    ...changes
  } as ClusterView;
  return { name, condition: 'running', reason: '', state };
}

export function job(name: string, changes: Partial<JobView> = {}): JobView {
  return {
    ...{ name, strategy: 'DiLoCo', round: 12, attempt: 0, phase: 'training', members: ['desk', 'mini'] },
    ...{ waiting_for: [], parameters: 4160, bytes_sent: 2e6, bytes_data_parallel: 1e7, hash_mismatches: 0 },
    ...{ state_hash: '', waits: [], loss: null, loss_round: null, cell: 3, settings: {} },
    ...changes
  };
}

export const RUNNING = {
  cell: { id: 3, source: 'train()', status: 'running', nodes: {}, started: 1000, ended: null, more: 0, errors: {} }
} as const;

export function overview(changes: Partial<Overview> = {}): Overview {
  const sharing = { on: false, name: '', code: '', command: '', qr_svg_data_url: '', keys: [] };
  const server = { version: '0.1.0', protocol: 1 };
  return { type: 'Overview', peers: [], clusters: [], sharing, server, engines: [], ...changes };
}

export function curve(nodeName: string, name: string, value: (number | null)[], job = '', run = 0): Curve {
  return {
    node: nodeName,
    job,
    run,
    name,
    step: value.map((_, index) => index),
    time: value.map((_, index) => index),
    value
  };
}

/** What is asked of it, and the answer that it gives. */
export class Answers {
  readonly asked: Request[] = [];
  answer: IAnswer = { error: '', value: null };
  /** What it waits for first. */
  gate: Promise<void> = Promise.resolve();
  readonly act = async (request: Request): Promise<IAnswer> => {
    this.asked.push(request);
    await this.gate;
    return this.answer;
  };
}

/** What the sidebar may do, with a note of all of it. */
export class Handling extends Answers implements IHandling {
  readonly opened: string[] = [];
  readonly inserted: string[] = [];
  readonly pulled: [string, number, number][] = [];
  /** Why nothing is inserted. */
  obstacle = '';
  readonly reported: string[] = [];
  readonly onReport = async (cluster: string): Promise<string> => {
    this.reported.push(cluster);
    return this.obstacle;
  };
  readonly onOpen = (cluster: string): void => void this.opened.push(cluster);
  readonly onInsert = (cluster: string): string => {
    this.inserted.push(cluster);
    return this.obstacle;
  };
  readonly classes: string[] = [];
  readonly onClass = (cluster: string): void => void this.classes.push(cluster);
  readonly onDrag = (cluster: string, x: number, y: number): void => void this.pulled.push([cluster, x, y]);
}

/** A WebSocket whose other end is the test. */
export class Socket implements ISocket {
  onopen: ((event: never) => unknown) | null = null;
  onclose: ((event: never) => unknown) | null = null;
  onmessage: ((event: never) => unknown) | null = null;
  readonly sent: any[] = [];
  send(data: string): void {
    this.sent.push(JSON.parse(data));
  }
  close(): void {
    this.onclose?.({} as never);
  }
  receive(message: unknown): void {
    this.onmessage?.({ data: JSON.stringify(message) } as never);
  }
}

let root: Root | undefined;

/** Draw `what` into an empty page. */
export function draw(what: React.ReactElement): HTMLElement {
  const kept = { ...localStorage };
  erase();
  Object.assign(localStorage, kept);
  const host = document.body.appendChild(document.createElement('div'));
  root = createRoot(host);
  act(() => root?.render(what));
  return host;
}

export function erase(): void {
  act(() => root?.unmount());
  root = undefined;
  document.body.replaceChildren();
  localStorage.clear();
}

/** The button that people know as `name`. */
export function button(host: HTMLElement, name: string): HTMLButtonElement {
  const buttons = [...host.querySelectorAll('button')];
  const found = buttons.find(one => (one.getAttribute('aria-label') ?? one.textContent) === name);
  if (!found) {
    throw new Error(`no button ${name}, but ${buttons.map(one => one.textContent).join(', ')}`);
  }
  return found;
}

/** What all buttons in `host` are called. */
export function buttons(host: HTMLElement): string[] {
  return [...host.querySelectorAll('button')].map(one => one.getAttribute('aria-label') ?? one.textContent ?? '');
}

export async function press(host: HTMLElement, name: string): Promise<void> {
  await act(async () => button(host, name).click());
}

/** Press a button that asks once more, and its question when that takes a press for an answer. */
export async function pressTwice(host: HTMLElement, name: string, question: string): Promise<void> {
  jest.useFakeTimers();
  await press(host, name);
  await act(() => jest.advanceTimersByTimeAsync(QUIET_MILLISECONDS));
  await press(host, question);
  jest.useRealTimers();
}

/** Type `text` into the field that is labelled `name`. */
export function type(host: HTMLElement, name: string, text: string): void {
  const field = host.querySelector<HTMLInputElement>(`input[aria-label="${name}"]`)!;
  act(() => {
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value')!.set!.call(field, text);
    field.dispatchEvent(new Event('input', { bubbles: true }));
  });
}

export { act };
