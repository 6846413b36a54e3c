/** The tab of a cluster: all that the notebook panel shows, from the same state. */

import * as React from 'react';

import type { ClusterView, Curve, NodeView, PeerView } from '../generated';
import { newestLoss } from '../sidebar/curves';
import { progress } from '../sidebar/clusters';
import { Dashboard } from '../sidebar/dashboard';
import { factsOf, vitalsOf } from '../sidebar/facts';
import { duration } from '../sidebar/format';
import { Store } from '../sidebar/store';
import { act, Answers, cluster, curve, draw, erase, job, node, overview, peer, press, RUNNING } from './overviews';

const JOB = job('model', {
  loss: 0.25,
  loss_round: 11,
  waits: [
    { round: 11, node: 'mini', seconds: 1, time: 101 },
    { round: 12, node: '<b>desk</b>', seconds: 2, time: 105 }
  ]
});

let store: Store;
let answers: Answers;
beforeEach(() => {
  answers = new Answers();
  store = new Store();
  store.connected();
});
afterEach(erase);

function dashboard(changes: Partial<ClusterView>): HTMLElement {
  act(() => store.show(overview({ clusters: [cluster('lesson', changes)] })));
  return draw(<Dashboard store={store} name="lesson" act={answers.act} tryNow={() => {}} />);
}

it('has round, bytes, what they are less than, global loss, samples a second and time in its header', () => {
  const nodes = [node('desk', 0, { samples_per_s: 900 }), node('mini', 1, { samples_per_s: 600.4 })];
  const tab = dashboard({ ...RUNNING, jobs: [JOB], nodes });
  const shown = [...tab.querySelectorAll('.nbc-dash-facts > div')].map(fact =>
    [...fact.children].map(part => part.textContent)
  );
  expect(shown).toEqual([
    ['Nodes', '2', 'generation 1'],
    ['Round', '12', 'DiLoCo · 4,160 parameters'],
    ['Sent', '2.0 MB', 'by all nodes'],
    ['Saved', '8.0 MB', '5× less than data parallel'],
    ['Global loss', '0.2500', 'measured at round 11'],
    ['Samples/s', '1,500', 'of 2 nodes'],
    ['Up', '1 min 00 s', '']
  ]);
});

it('counts the samples of a running cell only, and leaves out rates that cannot be', () => {
  const labels = (state: Partial<ClusterView>): string[] =>
    factsOf(cluster('lesson', state).state!).map(({ label, value }) => `${label} ${value}`);
  const rate = (samples_per_s: number, condition: NodeView['condition'] = 'ok'): NodeView =>
    node('desk', 0, { samples_per_s, condition });
  expect(labels({ nodes: [rate(9)] })).not.toContain('Samples/s 9');
  expect(labels({ ...RUNNING, nodes: [rate(9), rate(-1), rate(1e300), rate(70, 'lost')] })).toContain('Samples/s 9');
});

it('counts neither loss nor samples of a node that has failed, but where all have', () => {
  const nodes = ['desk', 'mini'].map((name, place) =>
    node(name, place, { samples_per_s: 10 + place, loss: 1 + place })
  );
  const shown = (desk: string, mini: string): string[] => {
    const running = cluster('lesson', { ...RUNNING, jobs: [job('model', { cell: 3 })], nodes }).state!;
    const state = { ...running, cell: { ...running.cell!, nodes: { desk, mini } } };
    return [progress(state), factsOf(state).find(({ label }) => label === 'Samples/s')!.value];
  };
  expect(shown('running', 'error')).toEqual(['cell 3 running · 2 nodes · round 12 · loss 1.0000', '10']);
  expect(shown('error', 'error')).toEqual(['cell 3 running · 2 nodes · round 12 · loss 1.5000', '21']);
  expect(shown('running', 'lost')).toEqual(['cell 3 running · 2 nodes · round 12 · loss 1.0000', '10']);
});

it('says of a cell that trains nothing no round, and counts no samples of a training before it', () => {
  const nodes = [node('desk', 0, { samples_per_s: 900, loss: 0.25 })];
  const state = cluster('lesson', { ...RUNNING, jobs: [job('model', { cell: 2 })], nodes }).state!;
  expect(progress(state)).toBe('cell 3 running · 1 node');
  expect(factsOf(state).map(fact => fact.label)).not.toContain('Samples/s');
  expect(progress({ ...state, cell: { ...state.cell!, status: 'ok' } })).toBe('1 node · round 12 · loss 0.2500');
});

it.each(['lost', 'dead', 'asleep'] as const)('shows no current numbers of a node that is %s', condition => {
  const gone = node('mini', 0, { condition, load: 0.5, cpu: 1.2, threads: 2, samples_per_s: 70, step: 10, loss: 0.5 });
  const cells = [...dashboard({ nodes: [gone] }).querySelectorAll('tbody tr > *')].map(cell => cell.textContent);
  expect(cells[1]).toBe('Ryzen 7');
  expect(cells[3]).toBe('– of 8.0 GBpeak 3.0 GB');
  expect(cells.slice(4, 7)).toEqual(['10', '–', '–']);
});

it('shows samples a second only of nodes that work', () => {
  const nodes = ['desk', 'mini'].map((name, place) => node(name, place, { samples_per_s: 70 }));
  const rates = (status: 'running' | 'ok', changes: Partial<NodeView> = {}): (string | null)[] => {
    const cell = { ...RUNNING.cell, status, nodes: { desk: 'running', mini: 'ok' } };
    const tab = dashboard({ cell, nodes: nodes.map(one => ({ ...one, ...changes })) });
    return [...tab.querySelectorAll('tbody tr > :nth-child(7)')].map(rate => rate.textContent);
  };
  expect(rates('running')).toEqual(['70', '–']);
  expect(rates('ok')).toEqual(['–', '–']);
  expect(rates('ok', { busy: true })).toEqual(['70', '70']);
});

it('says who is waited for now, and shows when the last rounds were and for whom they waited', () => {
  const tab = dashboard({ ...RUNNING, jobs: [{ ...JOB, waiting_for: ['mini'] }] });
  expect(tab.querySelector('.nbc-dash-facts')!.textContent).toContain('waiting for mini');
  const rows = [...tab.querySelectorAll('.nbc-dash-waits li')];
  expect(rows.map(row => row.textContent)).toEqual([
    ...['2 roundsin 5.0 s', '<b>desk</b>2.0 s in 1 round', 'mini1.0 s in 1 round']
  ]);
  const bars = rows.map(row =>
    [...row.querySelectorAll<HTMLElement>('.nbc-dash-lane > span')].map(bar => [bar.style.left, bar.style.width])
  );
  expect(bars).toEqual([
    [
      ['20%', '0%'],
      ['100%', '0%']
    ],
    [['60%', '40%']],
    [['0%', '20%']]
  ]);
  expect(rows[1].querySelector('.nbc-dash-lane > span')!.getAttribute('title')).toBe('round 12: 2.0 s');
});

it('has lanes for the eight nodes that were waited for longest, and says how long all others were', () => {
  const waits = Array.from({ length: 11 }, (_, place) => ({
    ...{ round: place + 1, node: `node-${place}`, seconds: 1 + place, time: 100 + place }
  }));
  const rows = [...dashboard({ ...RUNNING, jobs: [{ ...JOB, waits }] }).querySelectorAll('.nbc-dash-waits li')];
  expect(rows).toHaveLength(10);
  expect(rows[1].textContent).toBe('node-1011.0 s in 1 round');
  expect(rows[9].textContent).toBe('3 nodes more6.0 s in 3 rounds');
});

it('says of a node its load, its temperature, its battery and the way to it, where they are known', () => {
  const known = node('mini', 0, { device: 'cuda', load: 0.914, temperature: 61.2, cpu: 1.24, threads: 2 });
  const there = peer('mini', {
    battery: 80,
    plugged: false,
    round_trip_ms: 1.84,
    jitter_ms: 0.41
  } as Partial<PeerView>);
  expect(vitalsOf(known, [there])).toBe(
    'GPU 91 % · 61 °C · this node 1.2 CPU cores · 2 threads · battery 80 % · link 1.8 ms ± 0.4 ms'
  );
  const unknown = node('mini', 0, { load: null, temperature: null, cpu: null });
  expect(vitalsOf(unknown, [peer('mini', { battery: null, found_by: 'local', round_trip_ms: 1 })])).toBe('');
});

it('has memory now and at its peak, what a node waits for, and how old its checkpoint is', () => {
  const mini = node('mini', 0, {
    ...{ busy: true, waiting: 'round 13', round_wait: 0.04, step: 12345, peer: 'tower' },
    ...{ checkpoint: 'model-round-12 at round 12', checkpoint_time: 1020 }
  });
  const cells = [...dashboard({ nodes: [mini] }).querySelectorAll('tbody tr > *')].map(cell => cell.textContent);
  expect(cells[0]).toBe('minion tower');
  expect(cells[2]).toBe('okwaiting: round 13');
  expect(cells[3]).toBe('2.0 GB of 8.0 GBpeak 3.0 GB');
  expect([cells[4], cells[8]]).toEqual(['12,345', '40 ms']);
  expect(cells[9]).toBe('model-round-12 at round 1240 s ago');
});

it('draws the loss over steps too, a second run as a new line', () => {
  const tab = dashboard({});
  const again = { ...curve('desk', 'loss', [4, 3, 2, 1]), step: [0, 10, 0, 10] };
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series: [again] }));
  const chart = tab.querySelector('[aria-label^="Loss by step"]')!;
  expect(chart.getAttribute('aria-label')).toBe('Loss by step 0 to 10, from 1.0000 to 4.0000');
  expect(chart.querySelectorAll('path')[1].getAttribute('d')).toMatch(/^M[^L]*L[^ML]*M[^L]*L[^ML]*$/);
  const overTime = tab.querySelector('[aria-label^="Loss over"]')!.querySelectorAll('path')[1];
  expect(overTime.getAttribute('d')!.match(/M/g)).toHaveLength(1);
});

/** What is in the list, what it shows, and whether the two switches are on. */
function chosen(tab: HTMLElement): [string[], string, boolean[]] {
  const list = tab.querySelector('select')!;
  const boxes = [...tab.querySelectorAll<HTMLInputElement>('.nbc-dash-choice input')];
  return [[...list.options].map(option => option.label), list.value, boxes.map(box => box.checked)];
}

function choose(tab: HTMLElement, metric: string): void {
  const list = tab.querySelector('select')!;
  act(() => {
    list.value = metric;
    list.dispatchEvent(new Event('change', { bubbles: true }));
  });
}

/** The labels of the charts: what is drawn, over what, from where to where. */
function drawn(tab: HTMLElement): (string | null)[] {
  return [...tab.querySelectorAll('.nbc-dash-chart svg')].map(chart => chart.getAttribute('aria-label'));
}

it('draws any number that was reported, smoothed or not, on a linear or a logarithmic axis', () => {
  const tab = dashboard({ ...RUNNING, nodes: [node('desk', 0)] });
  const noisy = Array.from({ length: 60 }, (_, index) => (index % 2 ? 1 : 3));
  const series = [
    { ...curve('desk', 'accuracy', [0.001, 0, 10]), step: [1, 2, 3] },
    { ...curve('desk', 'loss', noisy), step: noisy.map((_, index) => index) },
    curve('desk', 'memory', [5])
  ];
  expect(tab.querySelector('select')).toBeNull();
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series }));
  expect(chosen(tab)).toEqual([['Loss', 'accuracy'], 'loss', [true, false]]);
  // The running mean begins with the first number, and ends between the two.
  expect(drawn(tab)[1]).toMatch(/^Loss by step 0 to 59, from 1\.\d+ to 3\.0000$/);
  const [smooth, log] = tab.querySelectorAll<HTMLInputElement>('.nbc-dash-choice input');
  act(() => smooth.click());
  expect(drawn(tab)[1]).toBe('Loss by step 0 to 59, from 1.0000 to 3.0000');
  choose(tab, 'accuracy');
  expect(drawn(tab)[1]).toBe('accuracy by step 1 to 3, from 0 to 10.000');
  const across = (): string => tab.querySelectorAll('svg')[1].querySelector('path[stroke]')!.getAttribute('d')!;
  expect(across().match(/M/g)).toHaveLength(1);
  act(() => log.click());
  // Zero has no logarithm: a gap.
  expect(drawn(tab)[1]).toBe('accuracy by step 1 to 3, from 0.0010 to 10.000');
  expect(across().match(/M/g)).toHaveLength(2);
  expect(chosen(tab)[1]).toBe('accuracy');
});

it('draws all nodes of a chart as running means, or none', () => {
  const jumping = (name: string, count: number): Curve =>
    curve(
      name,
      'loss',
      Array.from({ length: count }, (_, index) => index % 2)
    );
  const tab = dashboard({ ...RUNNING, nodes: [node('desk', 0), node('mini', 1)] });
  const show = (count: number): number => {
    const series = [jumping('desk', count), jumping('mini', 30)];
    act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series }));
    return Number(/to ([\d.]+)$/.exec(drawn(tab)[1]!)![1]);
  };
  expect(show(40)).toBe(1);
  expect(show(400)).toBeLessThan(0.7);
});

it('shows the name of a number that another machine made up as text that can be read', () => {
  const tab = dashboard({ ...RUNNING, nodes: [node('desk', 0)] });
  const names = ['<b>x\u202egnp</b>', 'y'.repeat(80)];
  const series = names.map(name => curve('desk', name, [1, 2]));
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series }));
  expect(chosen(tab)[0]).toEqual(['<b>x gnp</b>', `${'y'.repeat(39)}…`]);
  choose(tab, names[1]);
  expect(drawn(tab)[0]).toMatch(/^y{39}… over /);
  expect(tab.querySelector('b b, select b')).toBeNull();
});

it('saves a chart as a picture of its own and its points as they came', async () => {
  const saved: [string, Blob][] = [];
  const blobs: Blob[] = [];
  URL.createObjectURL = (blob: Blob) => `blob:${blobs.push(blob)}`;
  URL.revokeObjectURL = () => {};
  const click = jest.spyOn(HTMLAnchorElement.prototype, 'click').mockImplementation(function (
    this: HTMLAnchorElement
  ): void {
    saved.push([this.download, blobs[blobs.length - 1]]);
  });
  const tab = dashboard({ ...RUNNING, nodes: [node('=<b>"x",1', 0), node('desk', 1)] });
  const noisy = Array.from({ length: 60 }, (_, index) => (index === 3 ? null : index % 2 ? 1 : 3));
  const series = [curve('=<b>"x",1', 'loss', noisy), curve('', 'loss', [2, 1], 'model', 1001)];
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series }));
  await press(tab, 'Save Loss by step as SVG');
  await press(tab, 'Save Loss as CSV');
  const [[picture, svg], [table, csv]] = saved;
  expect([picture, svg.type, table, csv.type]).toEqual(['Loss by step.svg', 'image/svg+xml', 'Loss.csv', 'text/csv']);
  const text = (blob: Blob): Promise<string> =>
    new Promise(done => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result as string);
      reader.readAsText(blob);
    });
  const page = new DOMParser().parseFromString(await text(svg), 'image/svg+xml');
  expect(page.querySelector('parsererror, b')).toBeNull();
  const texts = [...page.querySelectorAll('text')].map(one => one.textContent);
  expect(texts).toEqual(['Loss by step 0 to 59', '3.0000', '1.0000', '=<b>"x",1', 'desk', 'global model']);
  const rows = (await text(csv)).split('\n');
  expect(rows.slice(0, 2)).toEqual(['line,step,time,value', `"'=<b>""x"",1",0,0.000,3`]);
  expect(rows[4]).toBe(`"'=<b>""x"",1",3,3.000,`);
  expect(rows.slice(-2)).toEqual(['global model,1,1.000,1', '']);
  click.mockRestore();
});

it('keeps what was chosen over a look at the logs, and shows the loss where the number is gone', async () => {
  const tab = dashboard({ ...RUNNING, nodes: [node('desk', 0)] });
  const reported = [curve('desk', 'accuracy', [0.5, 0.75]), curve('desk', 'loss', [3, 2])];
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series: reported }));
  choose(tab, 'accuracy');
  await press(tab, 'Logs');
  expect(tab.querySelector('.nbc-dash-chart')).toBeNull();
  await press(tab, 'Overview');
  expect(drawn(tab)[0]).toMatch(/^accuracy over /);
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series: reported.slice(1) }));
  expect(drawn(tab)[0]).toMatch(/^Loss over /);
});

it('draws the job that is trained now plainly, and those of cells before it faint', () => {
  const tab = dashboard({ nodes: [node('desk', 0)] });
  const series = [curve('desk', 'loss', [4, 3], 'alone', 1001), curve('desk', 'loss', [4, 3], 'all', 2001)];
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series }));
  const items = [...tab.querySelector('.nbc-dash-legend')!.children];
  expect(items.map(item => [item.textContent!.trim(), item.className])).toEqual([
    ['desk, alone', 'nbc-dash-faint'],
    ['desk, all', '']
  ]);
});

it.each([
  [0.0042, '4 ms'],
  [3.44, '3.4 s'],
  [59.96, '1 min 00 s'],
  [4325, '1 h 12 min'],
  [273_600, '3 d 4 h'],
  [null, '–']
])('writes %p seconds as %p', (seconds, text) => {
  expect(duration(seconds)).toBe(text);
});

it('draws earlier runs faint, tells jobs apart, and shows the newest run of a node in the sidebar', () => {
  const at = (time: number, given: Curve): Curve => ({ ...given, time: given.time.map(one => time + (one ?? 0)) });
  const series = [
    at(0, curve('desk', 'loss', [9, 8], 'gan', 1001)),
    at(10, curve('desk', 'loss', [4, 3], 'gan', 2001)),
    at(9, curve('desk', 'loss', [7, 6], 'critic', 2001))
  ];
  const tab = dashboard({ nodes: [node('desk', 0)] });
  act(() => store.extend({ type: 'CurvePoints', cluster: 'lesson', reset: true, series }));
  const chart = tab.querySelector('.nbc-dash-chart')!;
  const names = [...chart.querySelectorAll('.nbc-dash-legend li')].map(item => item.textContent!.trim());
  expect(names).toEqual(['desk, gan run 1', 'desk, gan run 2', 'desk, critic']);
  const paths = [...chart.querySelectorAll('path[stroke]')];
  expect(paths.map(path => path.getAttribute('stroke-opacity'))).toEqual(['0.3', null, null]);
  expect(paths.map(path => path.getAttribute('stroke-dasharray'))).toEqual([null, null, '10 5']);
  const { curves } = store.state();
  expect(newestLoss(curves.get('lesson')!, 'desk').map(point => point.value)).toEqual([4, 3]);
});
