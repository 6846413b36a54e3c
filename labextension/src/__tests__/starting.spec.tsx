import * as React from 'react';

import type { Overview } from '../generated';
import { Store } from '../sidebar/store';
import { Sidebar } from '../sidebar/view';
import { act, button, cluster, draw, erase, Handling, overview, peer, press, type } from './overviews';

const NAME = 'Name of a new cluster';
const CODE = 'Code that the chosen peers show';
const START = 'Start a cluster';
const NO_SHARING = overview().sharing;

let store: Store;
let handling: Handling;

beforeEach(() => {
  [store, handling] = [new Store(), new Handling()];
  store.connected();
});

afterEach(erase);

function sidebar(state: Overview): HTMLElement {
  store.show(state);
  return draw(<Sidebar store={store} tryNow={() => {}} {...handling} />);
}

function box(host: HTMLElement, text: string): HTMLInputElement {
  const label = [...host.querySelectorAll('.nbc-side-choices label')].find(one => one.textContent!.trim() === text)!;
  return label.querySelector('input')!;
}

function tick(host: HTMLElement, text: string): void {
  act(() => box(host, text).click());
}

function count(host: HTMLElement, text: string): void {
  host.querySelector('input[type=number]')!.setAttribute('aria-label', 'nodes');
  type(host, 'nodes', text);
}

it('starts a cluster with one node here by its name', async () => {
  const host = sidebar(overview());
  expect(button(host, START).disabled).toBe(true);
  type(host, NAME, ' lesson ');
  await press(host, START);
  expect(handling.asked).toEqual([{ action: 'start', cluster: 'lesson', value: 1, target: '', code: '' }]);
});

it('starts it with so many nodes here, and with those peers and the code that they show', async () => {
  const peers = [peer('attic'), peer('mini', { trusted: false, pairing: true }), peer('studio')];
  const host = sidebar(overview({ peers }));
  type(host, NAME, 'lesson');
  count(host, '3');
  tick(host, 'attic');
  expect(host.querySelector(`[aria-label="${CODE}"]`)).toBeNull();
  tick(host, 'mini');
  expect(button(host, START).disabled).toBe(true);
  expect(host.textContent).toContain('It needs the code that mini shows.');
  type(host, CODE, 'apple-river-7 ');
  handling.answer = { error: '', value: ['local: local, local-2, local-3', 'mini: mini'] };
  await press(host, START);
  expect(handling.asked).toEqual([
    { action: 'start', cluster: 'lesson', value: 3, target: 'attic,mini', code: 'apple-river-7' }
  ]);
  expect(host.querySelector('section[aria-label="Start a cluster"]')!.textContent).toContain(
    'local: local, local-2, local-3 · mini: mini'
  );
});

it('starts it on all peers', async () => {
  const host = sidebar(overview({ peers: [peer('attic'), peer('mini')] }));
  type(host, NAME, 'lesson');
  tick(host, 'attic');
  tick(host, 'all that may be used');
  expect(box(host, 'mini').disabled).toBe(true);
  await press(host, START);
  expect(handling.asked[0].target).toBe('all');
});

it('asks by address for peers that have one name, and not for one that is gone meanwhile', async () => {
  const peers = [
    peer('mini', { key: '1', address: '192.0.2.1:40' }),
    peer('mini', { key: '2', address: '192.0.2.2:40' })
  ];
  const host = sidebar(overview({ peers: [...peers, peer('attic')], clusters: [cluster('first')] }));
  type(host, NAME, 'lesson');
  tick(host, '192.0.2.2:40');
  tick(host, 'attic');
  act(() => store.show(overview({ peers })));
  await press(host, START);
  expect(handling.asked[0].target).toBe('192.0.2.2:40');
});

it.each([
  ['1', 'first', 'first runs already: choose another name.'],
  ['65', 'lesson', 'Nodes here: a number from 0 to 64.'],
  ['1.5', 'lesson', 'Nodes here: a number from 0 to 64.'],
  ['', 'lesson', 'Nodes here: a number from 0 to 64.'],
  ['0', 'lesson', 'It needs a node here, or a peer.']
])('says why it is not started with %j nodes as %s', (nodes, name, said) => {
  const host = sidebar(overview({ clusters: [cluster('first')] }));
  type(host, NAME, name);
  count(host, nodes);
  expect(button(host, START).disabled).toBe(true);
  expect(host.querySelector('section[aria-label="Start a cluster"]')!.textContent).toContain(said);
});

it('starts it once, however often Enter is pressed meanwhile', async () => {
  let settle = (): void => undefined;
  handling.gate = new Promise(resolve => (settle = resolve));
  const host = sidebar(overview());
  type(host, NAME, 'lesson');
  const enter = async (): Promise<void> => act(async () => host.querySelector('form')!.requestSubmit());
  await enter();
  await enter();
  expect(handling.asked).toHaveLength(1);
  expect(host.querySelector('section[aria-label="Start a cluster"]')!.textContent).toContain('Starting …');
  await act(async () => settle());
  expect(host.querySelector('section[aria-label="Start a cluster"]')!.textContent).not.toContain('Starting …');
});

it('keeps what was typed when it did not start, and says why', async () => {
  const host = sidebar(overview());
  handling.answer = { error: "cluster name '../up' is not usable: use letters", value: null };
  type(host, NAME, '../up');
  await press(host, START);
  expect(host.querySelector('[role=alert]')!.textContent).toContain("'../up' is not usable");
  expect(host.querySelector<HTMLInputElement>(`[aria-label="${NAME}"]`)!.value).toBe('../up');
});

it('marks the peer that is this computer', () => {
  const sharing = { ...NO_SHARING, on: true, name: 'desk', keys: ['key of desk'] };
  const host = sidebar(overview({ peers: [peer('desk'), peer('mini')], clusters: [cluster('first')], sharing }));
  expect(host.querySelector('[aria-label="peer desk"]')!.textContent).toContain('this computer, cpu');
  expect(host.querySelector('[aria-label="peer mini"]')!.textContent).not.toContain('this computer');
  expect(box(host, 'desk (this computer)').checked).toBe(false);
});

it('has it led from a paired peer that is there, and from this computer without one', async () => {
  const own = { ...NO_SHARING, keys: ['k-desk'] };
  const peers = [peer('mini'), peer('stranger', { trusted: false, pairing: true }), peer('desk', { key: 'k-desk' })];
  const host = sidebar(overview({ peers, sharing: own }));
  const led = [...host.querySelectorAll('label')].find(one => one.textContent!.startsWith('led from'))!;
  const select = led.querySelector('select')!;
  expect([...select.options].map(option => option.value)).toEqual(['', 'mini']);
  type(host, NAME, 'night');
  act(() => {
    Object.getOwnPropertyDescriptor(HTMLSelectElement.prototype, 'value')!.set!.call(select, 'mini');
    select.dispatchEvent(new Event('change', { bubbles: true }));
  });
  await press(host, START);
  expect(handling.asked.at(-1)).toMatchObject({ action: 'start', cluster: 'night', head: 'mini' });
  // It is gone: nobody is asked to lead from there.
  act(() => store.show(overview({ peers: peers.slice(1), sharing: own })));
  expect(host.textContent).not.toContain('led from');
});

it('says from where a cluster is led, and has it led from elsewhere or from here again', async () => {
  const peers = [peer('mini'), peer('desk', { key: 'k-desk' }), peer('stranger', { trusted: false })];
  const own = { ...NO_SHARING, keys: ['k-desk'] };
  const host = sidebar(overview({ clusters: [cluster('night')], peers, sharing: own }));
  expect(host.textContent).not.toContain('led from mini');
  const leads = [...host.querySelectorAll('button')].filter(one => one.textContent === 'Lead');
  expect(leads.map(one => one.getAttribute('aria-label'))).toEqual(['Lead night from mini']);
  await press(host, 'Lead night from mini');
  expect(handling.asked.at(-1)).toMatchObject({ action: 'hand_over', cluster: 'night', target: 'mini' });
  act(() => store.show(overview({ clusters: [cluster('night', { head: 'mini' })], peers, sharing: own })));
  expect(host.textContent).toContain('led from mini: it goes on without this computer');
  await press(host, 'Lead night from this computer');
  expect(handling.asked.at(-1)).toMatchObject({ action: 'hand_over', cluster: 'night', target: 'local' });
});
