import * as React from 'react';

import type { EngineChoice, Overview } from '../generated';
import { launchOf, NOTHING_TYPED, whyNoHosts } from '../sidebar/engines';
import { Store } from '../sidebar/store';
import { Sidebar } from '../sidebar/view';
import { act, button, cluster, draw, erase, Handling, overview, press, type } from './overviews';

const ALL = ['gpus', 'nodes_per_host', 'time', 'partition', 'setup', 'address', 'folder'];
const SLURM: EngineChoice = { name: 'slurm', title: 'Slurm', hosts: 'number', options: ALL };
const SSH: EngineChoice = { name: 'ssh', title: 'SSH', hosts: 'names', options: ['setup', 'address'] };
const OTHER: EngineChoice = { name: 'processes', title: 'processes', hosts: 'either', options: ALL };
const ENGINES = [SLURM, SSH, OTHER];
const NAME = 'Name of a new cluster';
const START = 'Start a cluster';

let store: Store;
let handling: Handling;

beforeEach(() => {
  [store, handling] = [new Store(), new Handling()];
  store.connected();
});

afterEach(erase);

describe('what the server is asked for', () => {
  const typed = { ...NOTHING_TYPED, count: '4', names: ' gpu1, ,gpu2 ', gpus: '2', time: ' 2:00:00 ', setup: 'run me' };

  it('is a number of hosts and what was typed of them', () => {
    expect(launchOf(SLURM, typed)).toEqual({ on: 'slurm', hosts: 4, gpus: 2, time: '2:00:00', setup: 'run me' });
  });

  it('is names, without what the engine is not asked for', () => {
    expect(launchOf(SSH, typed)).toEqual({ on: 'ssh:gpu1,gpu2', setup: 'run me' });
  });

  it('is both where only the engine knows which it wants', () => {
    expect(launchOf(OTHER, { ...NOTHING_TYPED, names: 'mpi' })).toEqual({ on: 'processes:mpi', hosts: 1 });
    expect(launchOf(OTHER, { ...NOTHING_TYPED, count: ' ' })).toEqual({ on: 'processes' });
  });
});

it.each([
  [SLURM, { count: '' }, 'Hosts: a number from 1 to 1000.'],
  [SLURM, { count: '1.5' }, 'Hosts: a number from 1 to 1000.'],
  [SLURM, { count: '1001' }, 'Hosts: a number from 1 to 1000.'],
  [SLURM, { gpus: '-1' }, 'GPUs of each host: a number from 1 to 64, or nothing.'],
  [SLURM, { gpus: '8' }, ''],
  [SSH, { names: ' , ' }, 'SSH needs the names of hosts.'],
  [SSH, { names: 'gpu1', count: 'x', gpus: 'x' }, ''],
  [OTHER, { count: '' }, ''],
  [OTHER, { count: '0' }, 'Hosts: a number from 1 to 1000.']
])('%j with %j: %j', (engine, typed, said) => {
  expect(whyNoHosts(engine, { ...NOTHING_TYPED, ...typed })).toBe(said);
});

function sidebar(changes: Partial<Overview> = {}): HTMLElement {
  store.show(overview({ engines: ENGINES, ...changes }));
  return draw(<Sidebar store={store} tryNow={() => {}} {...handling} />);
}

function section(host: HTMLElement): HTMLElement {
  return host.querySelector('section[aria-label="Start a cluster"]')!;
}

/** The field that people know by the text of its label. */
function field(host: HTMLElement, label: string): HTMLInputElement {
  const found = [...section(host).querySelectorAll('label')].find(one => one.textContent!.trim() === label);
  return found!.querySelector('input')!;
}

function fill(host: HTMLElement, label: string, text: string): void {
  field(host, label).setAttribute('aria-label', label);
  type(host, label, text);
}

function choose(host: HTMLElement, engine: string): void {
  const select = section(host).querySelector('select')!;
  act(() => {
    Object.getOwnPropertyDescriptor(HTMLSelectElement.prototype, 'value')!.set!.call(select, engine);
    select.dispatchEvent(new Event('change', { bubbles: true }));
  });
}

it('starts it on this machine unless an engine is chosen', async () => {
  const host = sidebar();
  expect([...section(host).querySelectorAll('option')].map(one => one.textContent)).toEqual([
    'this machine',
    'Slurm',
    'SSH',
    'processes'
  ]);
  type(host, NAME, 'lesson');
  await press(host, START);
  expect(handling.asked).toEqual([{ action: 'start', cluster: 'lesson', value: 1, target: '', code: '' }]);
});

it('starts it on hosts of an engine, with no node here, and keeps what was typed when that is refused', async () => {
  const host = sidebar();
  type(host, NAME, 'lesson');
  choose(host, 'slurm');
  fill(host, 'Hosts', '16');
  await press(host, 'More');
  fill(host, 'Partition', 'nope');
  handling.answer = { error: 'slurm does not take the job: invalid partition specified: nope', value: null };
  await press(host, START);
  expect(handling.asked).toEqual([
    {
      ...{ action: 'start', cluster: 'lesson', value: 0, target: '', code: '' },
      launch: { on: 'slurm', hosts: 16, partition: 'nope' }
    }
  ]);
  expect(section(host).querySelector('[role=alert]')!.textContent).toContain('invalid partition specified: nope');
  expect(host.querySelector<HTMLInputElement>(`[aria-label="${NAME}"]`)!.value).toBe('lesson');
  expect([field(host, 'Hosts').value, field(host, 'Partition').value]).toEqual(['16', 'nope']);
});

it('says what an engine needs, and keeps it while another one is chosen', async () => {
  const host = sidebar();
  type(host, NAME, 'lesson');
  choose(host, 'ssh');
  expect(button(host, START).disabled).toBe(true);
  expect(section(host).textContent).toContain('SSH needs the names of hosts.');
  fill(host, 'Hosts, commas between', 'gpu1,gpu2');
  choose(host, 'slurm');
  choose(host, 'ssh');
  await press(host, START);
  expect(handling.asked[0].launch).toEqual({ on: 'ssh:gpu1,gpu2' });
});

it('starts it once however often it is pressed meanwhile, and shows how the hosts stand', async () => {
  let settle = (): void => undefined;
  handling.gate = new Promise(resolve => (settle = resolve));
  const host = sidebar();
  type(host, NAME, 'lesson');
  choose(host, 'slurm');
  await act(async () => {
    button(host, START).click();
    button(host, START).click();
    host.querySelector('form')!.requestSubmit();
  });
  expect(handling.asked).toHaveLength(1);
  const launch = {
    ...{ launch: 'lesson-1', name: 'slurm 7', condition: 'pending' as const, hosts: 1, running: 0, joined: 0 },
    text: 'slurm 7: 0 of 1 running, pending: Priority'
  };
  act(() => store.show(overview({ engines: ENGINES, clusters: [cluster('lesson', { launches: [launch] })] })));
  expect(host.querySelector('[aria-label="cluster lesson"]')!.textContent).toContain(launch.text);
  expect(section(host).textContent).toContain('Starting …');
  await act(async () => settle());
  expect(handling.asked).toHaveLength(1);
});

it('is for this machine again when its engine is not known any more', async () => {
  const host = sidebar();
  type(host, NAME, 'lesson');
  choose(host, 'processes');
  act(() => store.show(overview({ engines: [SLURM] })));
  await press(host, START);
  expect(handling.asked[0]).toEqual({ action: 'start', cluster: 'lesson', value: 1, target: '', code: '' });
});
