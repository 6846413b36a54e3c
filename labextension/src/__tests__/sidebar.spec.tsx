import * as React from 'react';

import type { LaunchView, NodeView, Overview } from '../generated';
import type { IAnswer } from '../sidebar/connection';
import type { Act } from '../sidebar/controls';
import { Dashboard } from '../sidebar/dashboard';
import { QUIET_MILLISECONDS } from '../sidebar/question';
import { Store } from '../sidebar/store';
import { Sidebar } from '../sidebar/view';
import {
  act,
  Handling,
  button,
  buttons,
  cluster,
  curve,
  draw,
  erase,
  job,
  node,
  overview,
  peer,
  press,
  pressTwice,
  RUNNING,
  type
} from './overviews';

let store: Store;
let answers: Handling;

beforeEach(() => {
  [store, answers] = [new Store(), new Handling()];
  store.connected();
});

afterEach(erase);

function sidebar(state: Overview): HTMLElement {
  store.show(state);
  return draw(<Sidebar store={store} tryNow={() => {}} {...answers} />);
}

it('shows peers, clusters, nodes and how far they are', () => {
  const jobs = [job('model', { round: 12 })];
  const nodes = [node('desk', 0, { loss: 0.25 }), node('mini', 1, { loss: 0.75, checkpoint: 'digits at round 12' })];
  const host = sidebar(
    overview({ peers: [peer('attic')], clusters: [cluster('lesson', { nodes, jobs, ...RUNNING })] })
  );
  expect(host.querySelector('[aria-label="peer attic"]')).not.toBeNull();
  expect(host.textContent).toContain('cell 3 running · 2 nodes · round 12 · loss 0.5000');
  expect(host.querySelector('[aria-label="node mini, ok"]')!.textContent).toContain('✓ checkpoint digits at round 12');
  const meter = host.querySelector('[role=meter]')!;
  expect([meter.getAttribute('aria-valuenow'), meter.textContent]).toEqual(['25', '2.0 GB of 8.0 GB']);
});

it('says which node has failed in the newest cell, and of what', () => {
  const nodes = [node('desk', 0), node('mini', 1, { failed: 'cell 3: ValueError: no data' })];
  const lost = node('attic', 2, { condition: 'lost', reason: 'its lid is closed', failed: 'cell 3: KeyError' });
  const host = sidebar(overview({ clusters: [cluster('lesson', { nodes: [...nodes, lost] })] }));
  const said = (name: string): string => host.querySelector(`[aria-label="${name}"]`)!.textContent!;
  expect(said('node mini, failed')).toContain('✖');
  expect(said('node mini, failed')).toContain('failed: cell 3: ValueError: no data');
  expect(said('node desk, ok')).not.toContain('failed');
  expect(said('node attic, lost')).toContain('lost: its lid is closed');
});

it('keeps the focus on a button whose action is under way, which does nothing meanwhile', async () => {
  let end: (answer: IAnswer) => void = () => {};
  const send: Act = request => {
    answers.asked.push(request);
    return new Promise(resolve => (end = resolve));
  };
  store.show(overview({ peers: [peer('attic')], clusters: [cluster('lesson')] }));
  const host = draw(<Sidebar store={store} tryNow={() => {}} {...answers} act={send} />);
  const add = button(host, 'Add attic to lesson');
  add.focus();
  await press(host, 'Add attic to lesson');
  await press(host, 'Add attic to lesson');
  expect(answers.asked).toHaveLength(1);
  expect([add.getAttribute('aria-disabled'), add.disabled, document.activeElement]).toEqual(['true', false, add]);
  await act(async () => end({ error: '', value: null }));
  expect(add.getAttribute('aria-disabled')).toBeNull();
});

it('adds a trusted peer with one click', async () => {
  const host = sidebar(overview({ peers: [peer('attic')], clusters: [cluster('lesson')] }));
  await press(host, 'Add attic to lesson');
  expect(answers.asked).toEqual([{ action: 'add', cluster: 'lesson', target: 'attic', code: '' }]);
});

it('asks for the code of an unknown peer, and shows beside it that it was wrong', async () => {
  const attic = peer('attic', { trusted: false, pairing: true });
  const host = sidebar(overview({ peers: [attic], clusters: [cluster('lesson')] }));
  expect(button(host, 'Add attic to lesson').disabled).toBe(true);
  answers.answer = { error: "the code is wrong: peer 'attic' accepts 2 more", value: null };
  type(host, 'Code that attic shows', ' apple-river ');
  await press(host, 'Add attic to lesson');
  expect(answers.asked[0].code).toBe('apple-river');
  const problem = host.querySelector('[aria-label="peer attic"] [role=alert]')!;
  expect(problem.textContent).toBe("the code is wrong: peer 'attic' accepts 2 more");
  expect(host.querySelector<HTMLInputElement>('input[aria-label="Code that attic shows"]')!.value).toBe(
    ' apple-river '
  );
});

it('sends a code once, however often Enter is pressed meanwhile or held', async () => {
  let settle = (): void => undefined;
  answers.gate = new Promise(resolve => (settle = resolve));
  answers.answer = { error: 'the code is wrong: 2 tries left', value: null };
  const attic = peer('attic', { trusted: false, pairing: true });
  const host = sidebar(overview({ peers: [attic], clusters: [cluster('lesson')] }));
  type(host, 'Code that attic shows', 'apple-river-7');
  const enter = async (): Promise<void> =>
    act(async () => host.querySelector<HTMLFormElement>('[aria-label="peer attic"] form')!.requestSubmit());
  await enter();
  await enter();
  await press(host, 'Add attic to lesson');
  expect(answers.asked).toHaveLength(1);
  await act(async () => settle());
  const held = new KeyboardEvent('keydown', { key: 'Enter', repeat: true, bubbles: true, cancelable: true });
  host.querySelector('input[aria-label="Code that attic shows"]')!.dispatchEvent(held);
  expect(held.defaultPrevented).toBe(true);
  await enter();
  expect(answers.asked).toHaveLength(2);
});

it('does not offer to add a peer that is in the cluster', () => {
  const host = sidebar(overview({ peers: [peer('mini')], clusters: [cluster('lesson')] }));
  expect(host.querySelector('[aria-label="peer mini"]')!.textContent).toContain('in lesson');
});

it('says why a peer cannot be added instead of asking for its code', () => {
  const reason = "peer 'attic' speaks protocol 1, this machine 2: upgrade notebook-cluster on 'attic'";
  const attic = peer('attic', { trusted: false, condition: 'refused', reason });
  const host = sidebar(overview({ peers: [attic], clusters: [cluster('lesson')] }));
  expect(host.querySelector('[aria-label="peer attic"]')!.textContent).toContain(reason);
  expect(host.querySelector('[aria-label="peer attic"] input')).toBeNull();
  expect(button(host, 'Add attic to lesson').disabled).toBe(true);
});

it('adds to the cluster that is chosen', async () => {
  const host = sidebar(overview({ peers: [peer('attic')], clusters: [cluster('first'), cluster('second')] }));
  const menu = host.querySelector('select')!;
  act(() => {
    menu.value = 'second';
    menu.dispatchEvent(new Event('change', { bubbles: true }));
  });
  await press(host, 'Add attic to second');
  expect(answers.asked[0].cluster).toBe('second');
});

it('says how far a replay is, and what a node does without', () => {
  const left_out = 'without cell 1, which was skipped: %cluster restart mini --all-cells runs it again';
  const nodes = [node('mini', 0, { condition: 'replaying', replaying: 'replaying cell 2 of 3, 40 s', left_out })];
  const host = sidebar(overview({ clusters: [cluster('lesson', { nodes })] }));
  const hints = [...host.querySelectorAll('.nbc-side-node .nbc-side-hint')].map(hint => hint.textContent);
  expect(hints).toEqual(['replaying cell 2 of 3, 40 s', left_out]);
});

it('shows names with HTML as they are', () => {
  const evil = '<img src=x onerror="window.hacked = 1">';
  const nodes = [node(evil, 0, { condition: 'lost', reason: evil, device_name: evil, checkpoint: evil })];
  const clusters = [cluster(evil, { nodes, invitation: evil })];
  const sharing = {
    on: true,
    name: evil,
    code: evil,
    command: evil,
    qr_svg_data_url: `javascript:${evil}`,
    keys: [evil]
  };
  const host = sidebar(overview({ peers: [peer(evil, { device: evil, reason: evil })], clusters, sharing }));
  expect(host.querySelectorAll('img, script')).toHaveLength(0);
  expect(host.textContent!.split(evil).length).toBeGreaterThan(8);
  expect((window as any).hacked).toBeUndefined();
});

it('draws gaps where a curve is not a number, and nothing for one that never is', () => {
  const host = sidebar(overview({ clusters: [cluster('lesson')] }));
  act(() => {
    const series = [curve('desk', 'loss', [3, 2, null, 1, 0.5]), curve('mini', 'loss', [null, null])];
    store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series });
  });
  const [desk, mini] = host.querySelectorAll('.nbc-side-spark');
  expect(desk.querySelector('path')!.getAttribute('d')).toMatch(/^M[^M]+L[^M]+M[^M]+L[^M]+$/);
  expect(desk.getAttribute('aria-label')).toBe('loss 0.5000');
  expect(mini.querySelector('path')).toBeNull();
  expect(host.innerHTML).not.toContain('NaN');
});

it('stops and detaches a cell only while one runs', async () => {
  const host = sidebar(overview({ clusters: [cluster('lesson')] }));
  await press(host, 'More …');
  expect([buttons(host).includes('Stop cell'), button(host, 'Detach').disabled]).toEqual([false, true]);
  act(() => store.show(overview({ clusters: [cluster('lesson', RUNNING)] })));
  await press(host, 'Detach');
  await press(host, 'Stop cell');
  expect(answers.asked.map(request => request.action)).toEqual(['detach', 'interrupt']);
});

it('offers after three seconds to kill the nodes that a stopped cell leaves busy, not those of the next cell', async () => {
  jest.useFakeTimers();
  const host = sidebar(overview({ clusters: [cluster('lesson', RUNNING)] }));
  answers.answer = { error: '', value: ['mini'] };
  await press(host, 'Stop cell');
  await act(() => jest.advanceTimersByTimeAsync(2999));
  expect(button(host, 'Stop cell').getAttribute('aria-disabled')).toBe('true');
  await act(() => jest.advanceTimersByTimeAsync(1));
  answers.answer = { error: '', value: [] };
  await press(host, 'Kill mini');
  expect(answers.asked.map(request => request.value)).toEqual([false, true]);
  answers.answer = { error: '', value: ['desk'] };
  await press(host, 'Stop cell');
  act(() => store.show(overview({ clusters: [cluster('lesson', { cell: { ...RUNNING.cell, id: 4 } })] })));
  await act(() => jest.advanceTimersByTimeAsync(3000));
  expect(button(host, 'Stop cell').getAttribute('aria-disabled')).toBeNull();
  jest.useRealTimers();
});

it('opens and ends an invitation', async () => {
  const host = sidebar(overview({ clusters: [cluster('lesson')] }));
  await press(host, 'More …');
  await press(host, 'Invite');
  act(() => store.show(overview({ clusters: [cluster('lesson', { invitation: '192.0.2.1:4000 a-b-1' })] })));
  expect(host.textContent).toContain('notebook-cluster share --dial 192.0.2.1:4000 --code a-b-1');
  await press(host, 'End invitation');
  expect(answers.asked.map(({ action, value }) => [action, value])).toEqual([
    ['invite', undefined],
    ['invite', false]
  ]);
});

it('shows how machines of engines stand until they are given back', () => {
  const launch = (name: string, condition: 'pending' | 'ended', text: string): LaunchView => ({
    ...{ launch: name, name, condition, hosts: 2, running: 1, joined: 1 },
    text: `${name}: ${text}`
  });
  const launches = [
    launch('slurm 7', 'ended', 'given back'),
    launch('slurm 8', 'pending', '1 of 2 running, pending: Priority')
  ];
  const host = sidebar(overview({ clusters: [cluster('lesson', { launches })] }));
  expect(host.textContent).toContain('slurm 8: 1 of 2 running, pending: Priority');
  expect(host.textContent).not.toContain('slurm 7');
});

it('shows what an action failed with until it is dismissed', async () => {
  answers.answer = { error: "node 'mini' is the last one: stop the cluster instead", value: null };
  const host = sidebar(overview({ clusters: [cluster('lesson')] }));
  await pressTwice(host, 'Remove mini', 'Really remove mini?');
  expect(host.querySelector('[role=alert]')!.textContent).toContain('is the last one');
  await press(host, 'Dismiss');
  expect(host.querySelector('[role=alert]')).toBeNull();
});

it.each(['another condition of that node', 'its end', 'a minute'])(
  'takes back what an action on a node failed with after %s',
  async after => {
    answers.answer = { error: "node 'mini' did not come back", value: null };
    const other = node('desk', 0);
    const show = (condition: NodeView['condition'], desk = other): void =>
      act(() =>
        store.show(overview({ clusters: [cluster('lesson', { nodes: [desk, node('mini', 1, { condition })] })] }))
      );
    const host = sidebar(overview({ clusters: [cluster('lesson')] }));
    jest.useFakeTimers();
    await press(host, 'Restart mini');
    await act(() => jest.advanceTimersByTimeAsync(QUIET_MILLISECONDS));
    await press(host, 'Really restart mini?');
    const problem = (): Element | null => host.querySelector('[role=alert]');
    show('dead');
    show('dead', node('desk', 0, { condition: 'suspect' }));
    await act(() => jest.advanceTimersByTimeAsync(59_999));
    expect(problem()!.textContent).toContain("node 'mini' did not come back");
    if (after === 'a minute') {
      await act(() => jest.advanceTimersByTimeAsync(1));
    } else if (after === 'its end') {
      act(() => store.show(overview({ clusters: [cluster('lesson', { nodes: [other] })] })));
    } else {
      show('starting');
    }
    jest.useRealTimers();
    expect(problem()).toBeNull();
  }
);

it('keeps what another action failed with, whatever time goes by', async () => {
  answers.answer = { error: 'no cell runs', value: null };
  const host = sidebar(overview({ clusters: [cluster('lesson', RUNNING)] }));
  jest.useFakeTimers();
  await press(host, 'Stop cell');
  await act(() => jest.advanceTimersByTimeAsync(600_000));
  jest.useRealTimers();
  expect(host.querySelector('[role=alert]')!.textContent).toContain('no cell runs');
});

it.each(['lost', 'dead', 'asleep'] as const)('shows no loss of a node that is %s', condition => {
  const gone = node('mini', 1, { condition, loss: 0.75 });
  const nodes = [node('desk', 0, { loss: 0.25 }), gone];
  const host = sidebar(overview({ clusters: [cluster('lesson', { nodes, ...RUNNING, jobs: [job('model')] })] }));
  act(() => {
    const series = [curve('mini', 'loss', [3, 0.75])];
    store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series });
  });
  const row = host.querySelector(`[aria-label="node mini, ${condition}"]`)!;
  expect(row.querySelector('.nbc-side-loss')!.textContent).toBe('–');
  expect(row.querySelector('.nbc-side-spark')!.getAttribute('aria-label')).toBe('loss –');
  expect(host.textContent).toContain('1 of 2 nodes · round 12 · loss 0.2500');
});

it('names both versions of a cluster that it cannot read, and offers no buttons for it', () => {
  const reason = "the coordinator of 'old' speaks protocol 2, this server 3: restart the cluster";
  const host = sidebar(overview({ clusters: [{ name: 'old', condition: 'unreachable', reason, state: null }] }));
  const section = host.querySelector<HTMLElement>('[aria-label="cluster old"]')!;
  expect(section.textContent).toBe(`oldunreachable${reason}`);
  expect(buttons(section)).toEqual(['old']);
});

it('switches sharing on and shows the code and its picture', async () => {
  const host = sidebar(overview());
  await act(async () => host.querySelector<HTMLInputElement>('[role=switch]')!.click());
  expect(answers.asked).toEqual([{ action: 'share_on' }]);
  const sharing = {
    on: true,
    name: 'desk',
    code: 'a-b',
    command: '%cluster add desk',
    qr_svg_data_url: 'data:image/svg+xml,x',
    keys: ['key of desk']
  };
  act(() => store.show(overview({ sharing })));
  expect(host.querySelector('.nbc-side-shared')!.textContent).toContain('Shared as deskCode a-b');
  expect(host.querySelector('img')!.getAttribute('src')).toBe('data:image/svg+xml,x');
});

it('keeps what it knows under a banner while there is no connection, with all buttons off', () => {
  const host = sidebar(overview({ clusters: [cluster('lesson')] }));
  act(() => store.disconnected('lost', Date.now() + 4000));
  expect(host.querySelector('.nbc-side-banner')!.textContent).toMatch(
    /No connection to the Jupyter server.*Next try in [34] s/
  );
  expect(host.querySelector('[aria-label="cluster lesson"]')).not.toBeNull();
  expect(host.querySelector('fieldset')!.disabled).toBe(true);
});

it('says what is missing when the server has no such address', () => {
  store.disconnected('missing', Date.now() + 4000);
  const host = draw(<Sidebar store={store} tryNow={() => {}} {...answers} />);
  expect(host.textContent).toContain('The Jupyter server has no notebook-cluster extension: install notebook-cluster');
});

it('opens the tab of a cluster, which shows curves, nodes and events, and says when it has ended', async () => {
  const events = [{ time: 1000, level: 'warning', text: "node 'mini' is <b>suspect</b>" } as const];
  const host = sidebar(overview({ clusters: [cluster('lesson', { events })] }));
  await press(host, 'Dashboard');
  expect(answers.opened).toEqual(['lesson']);
  const series = [curve('desk', 'loss', [2, 1])];
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series }));
  const tab = draw(<Dashboard store={store} name="lesson" act={answers.act} tryNow={() => {}} />);
  expect(tab.querySelector('svg')!.getAttribute('aria-label')).toBe('Loss over 1 s, from 1.0000 to 2.0000');
  expect(tab.querySelectorAll('tbody tr')).toHaveLength(2);
  expect(tab.querySelector('.nbc-dash-events')!.textContent).toContain("warning: node 'mini' is <b>suspect</b>");
  act(() => store.show(overview()));
  expect(tab.textContent).toContain('This cluster does not run.');
});

it('draws the loss of the global model over those of the nodes, each job as its own', () => {
  const jobs = [job('model'), job('other')];
  store.show(overview({ clusters: [cluster('lesson', { jobs })] }));
  const tab = draw(<Dashboard store={store} name="lesson" act={answers.act} tryNow={() => {}} />);
  act(() => {
    const series = [
      curve('desk', 'loss', [2, 1]),
      curve('', 'loss', [4, 3], 'model'),
      curve('', 'loss', [6, 5], 'other')
    ];
    store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series });
  });
  const legend = [...tab.querySelector('.nbc-dash-legend')!.children].map(item => item.textContent!.trim());
  expect(legend).toEqual(['desk', 'mini', 'global model of model', 'global model of other']);
  expect(tab.querySelector('svg')!.getAttribute('aria-label')).toContain('from 1.0000 to 6.0000');
  expect(tab.innerHTML).not.toContain('NaN');
});

it('folds a cluster that has ended, which has a report and why it ended, and goes from the list', async () => {
  const host = sidebar(overview({ clusters: [cluster('lesson', RUNNING)] }));
  expect(button(host, 'Stop cell').disabled).toBe(false);
  const reason = "cluster 'lesson' has ended: stopped";
  act(() => store.show(overview({ clusters: [{ ...cluster('lesson'), condition: 'ended', reason }] })));
  const section = host.querySelector<HTMLElement>('[aria-label="cluster lesson"]')!;
  expect(section.textContent).toBe('lessonendedReportDismiss');
  expect(section.querySelector('.nbc-mod-pulled')).toBeNull();
  await press(host, 'lesson');
  expect(section.textContent).toContain(reason);
  expect(section.textContent).toContain('At its end: 2 nodes');
  await press(host, 'Report of lesson');
  await press(host, 'Dismiss lesson');
  expect([answers.reported, answers.asked]).toEqual([['lesson'], [{ action: 'dismiss', cluster: 'lesson' }]]);
});

it('says each time that a code was wrong, and lets another be typed', async () => {
  const attic = peer('attic', { trusted: false, pairing: true });
  const host = sidebar(overview({ peers: [attic], clusters: [cluster('lesson')] }));
  for (const [code, left] of [
    ['one', 19],
    ['two', 18],
    ['three', 17]
  ] as const) {
    answers.answer = { error: `the code '${code}' is wrong at attic: ${left} tries left`, value: null };
    type(host, 'Code that attic shows', code);
    await press(host, 'Add attic to lesson');
    const problem = host.querySelector('[aria-label="peer attic"] [role=alert]')!;
    expect(problem.textContent).toBe(`the code '${code}' is wrong at attic: ${left} tries left`);
  }
  answers.answer = { error: '', value: ['attic'] };
  type(host, 'Code that attic shows', 'four');
  await press(host, 'Add attic to lesson');
  expect(host.querySelector('[aria-label="peer attic"] [role=alert]')).toBeNull();
  expect(answers.asked.map(request => request.code)).toEqual(['one', 'two', 'three', 'four']);
});
