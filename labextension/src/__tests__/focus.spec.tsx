import * as React from 'react';

import { candidates, clusterOfNotebook, meantCluster, nameOf, NOWHERE, runningClusters } from '../sidebar/focus';
import { StatusItem } from '../sidebar/statusItem';
import { Store } from '../sidebar/store';
import { Sidebar } from '../sidebar/view';
import { act, cluster, draw, erase, Handling, node, overview, peer, RUNNING } from './overviews';

let store: Store;

beforeEach(() => {
  store = new Store();
  store.connected();
});

afterEach(erase);

const meant = (): string | undefined => meantCluster(store.state())?.name;

it('means the only cluster, whatever is in front', () => {
  store.show(overview({ clusters: [cluster('lesson')] }));
  store.focus({ cluster: '', kernel: 'k', path: 'other.ipynb' });
  expect(meant()).toBe('lesson');
});

it('means the cluster that the kernel of the notebook in front attached to last', () => {
  const clusters = [cluster('a', { kernels: { k: 5 } }), cluster('b', { kernels: { k: 9, other: 10 } }), cluster('c')];
  store.show(overview({ clusters }));
  store.focus({ ...NOWHERE, kernel: 'k', path: 'c.ipynb' });
  expect(meant()).toBe('b');
  store.focus({ ...NOWHERE, kernel: 'k', path: '' });
  store.show(overview({ clusters: [clusters[0], clusters[2], { ...clusters[1], condition: 'ended' }] }));
  expect(meant()).toBe('a');
});

it('means the cluster of the name of the notebook whose kernel is new', () => {
  store.show(overview({ clusters: [cluster('a'), cluster('my-lesson-1')] }));
  store.focus({ ...NOWHERE, kernel: 'new', path: 'course/My lesson 1.ipynb' });
  expect(meant()).toBeUndefined();
  store.focus({ ...NOWHERE, kernel: 'new', path: 'course/my lesson (1).ipynb' });
  expect(meant()).toBe('my-lesson-1');
});

it('means the cluster of the tab in front before that of the notebook behind it', () => {
  store.show(overview({ clusters: [cluster('a', { kernels: { k: 5 } }), cluster('b')] }));
  store.focus({ cluster: 'b', kernel: 'k', path: 'a.ipynb' });
  expect(meant()).toBe('b');
});

it('means none of several clusters for a notebook that has none, and offers those that fit', () => {
  store.show(overview({ clusters: [cluster('a'), cluster('b', RUNNING), cluster('c', RUNNING)] }));
  expect(meant()).toBeUndefined();
  expect(candidates(store.state()).map(one => one.name)).toEqual(['a', 'b', 'c']);
  expect(candidates(store.state(), one => one.cell !== null).map(one => one.name)).toEqual(['b', 'c']);
});

it('does not offer the running cell of another cluster to a notebook that has one', () => {
  store.show(overview({ clusters: [cluster('a', { kernels: { k: 5 } }), cluster('b', RUNNING)] }));
  store.focus({ ...NOWHERE, kernel: 'k' });
  expect(candidates(store.state(), one => one.cell !== null)).toEqual([]);
});

it('is not confused by names of objects that every object has', () => {
  const clusters = runningClusters(store.state());
  expect(clusterOfNotebook([...clusters, cluster('a').state!], { kernel: 'constructor', path: '' })).toBeNull();
});

it.each([
  ['lesson.ipynb', 'lesson'],
  ['a/b/My lesson.v2.ipynb', 'My-lesson-v2'],
  ['RTC:__draft__.IPYNB', 'draft'],
  ['übung.ipynb', 'bung'],
  ['---.ipynb', 'cluster'],
  [`${'x'.repeat(80)}.ipynb`, 'x'.repeat(63)]
])('names a cluster after %s as the magics do', (path, name) => {
  expect(nameOf(path)).toBe(name);
});

it('puts the cluster of the notebook in front into the status bar, else says how many there are', () => {
  const clusters = [cluster('idle', { kernels: { k: 1 } }), cluster('busy', RUNNING)];
  store.show(overview({ clusters }));
  const line = draw(<StatusItem store={store} onPress={() => {}} />);
  expect(line.textContent).toBe('2 clusters · busy: cell 3 running · 2 nodes');
  act(() => store.focus({ ...NOWHERE, kernel: 'k' }));
  expect(line.textContent).toBe('idle: 2 nodes');
  act(() => store.show(overview()));
  expect(line.textContent).toBe('');
});

it('counts the nodes that are up', () => {
  const nodes = [node('desk', 0), node('mini', 1, { condition: 'dead' }), node('lab', 2, { condition: 'suspect' })];
  store.show(overview({ clusters: [cluster('lesson', { nodes })] }));
  expect(draw(<StatusItem store={store} onPress={() => {}} />).textContent).toBe('lesson: 2 of 3 nodes');
});

it('adds peers to the cluster of the notebook in front, until another is chosen', () => {
  const clusters = [cluster('a', { kernels: { k: 5 } }), cluster('b', { kernels: { l: 5 } }), cluster('c')];
  store.show(overview({ peers: [peer('attic')], clusters }));
  store.focus({ ...NOWHERE, kernel: 'l' });
  const host = draw(<Sidebar store={store} tryNow={() => {}} {...new Handling()} />);
  const menu = host.querySelector('select')!;
  expect(menu.value).toBe('b');
  act(() => {
    menu.value = 'c';
    menu.dispatchEvent(new Event('change', { bubbles: true }));
  });
  act(() => store.show(overview({ peers: [peer('attic')], clusters })));
  expect(menu.value).toBe('c');
  act(() => store.focus({ ...NOWHERE, kernel: 'k' }));
  expect(menu.value).toBe('a');
});
