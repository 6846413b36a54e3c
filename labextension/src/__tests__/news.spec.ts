/** What is told in a notification: each thing once, and nothing that was so when the page was loaded. */

import type { ClusterRow, ClusterView, NodeView } from '../generated';
import { newsBetween } from '../sidebar/news';
import { cluster, job, node, overview, RUNNING } from './overviews';

const texts = (before: ClusterRow[] | null, after: ClusterRow[]): string[] =>
  newsBetween(before && overview({ clusters: before }), overview({ clusters: after })).map(
    news => `${news.kind}: ${news.text}`
  );
const lesson = (changes: Partial<ClusterView> = {}): ClusterRow[] => [cluster('lesson', changes)];
const mini = (condition: NodeView['condition'], reason = ''): ClusterRow[] =>
  lesson({ nodes: [node('desk', 0), node('mini', 1, { condition, reason })] });
const TRAINS = { ...RUNNING, jobs: [job('digits')] };
const ended = (status: 'ok' | 'error' | 'interrupted', changes: Partial<ClusterView> = {}): ClusterRow[] =>
  lesson({ ...TRAINS, cell: { ...RUNNING.cell, status, ended: 1125 }, ...changes });

it.each(['lost', 'dead'] as const)('tells once that a node is %s, with its reason', condition => {
  const reason = 'its kernel was killed by SIGKILL';
  expect(texts(mini('ok'), mini(condition, reason))).toEqual([
    `error: Node mini of cluster lesson is ${condition}: ${reason}`
  ]);
  expect(texts(mini(condition, reason), mini(condition, reason))).toEqual([]);
});

it('tells it once where a node is lost first and then dead, and anew when it was back between', () => {
  expect(texts(mini('suspect'), mini('lost', 'Wi-Fi?'))).toHaveLength(1);
  expect(texts(mini('lost', 'Wi-Fi?'), mini('dead', 'its agent was restarted'))).toEqual([]);
  expect(texts(mini('starting'), mini('dead', 'killed'))).toHaveLength(1);
});

it.each(['removed', 'restarted', 'stopped'])('tells nothing of a node that was %s, as somebody wanted it', reason => {
  expect(texts(mini('ok'), mini('dead', reason))).toEqual([]);
});

it('tells nothing of what was so when the page was loaded, of a new node, or of one that sleeps', () => {
  expect(texts(null, mini('dead', 'killed'))).toEqual([]);
  expect(texts([], mini('dead', 'killed'))).toEqual([]);
  expect(texts(lesson({ nodes: [node('desk', 0)] }), mini('starting'))).toEqual([]);
  expect(texts(mini('ok'), mini('asleep'))).toEqual([]);
});

it('tells nothing of a cluster that has ended, or of another run of its name', () => {
  const gone = { ...mini('lost', 'Wi-Fi?')[0], condition: 'ended' as const };
  expect(texts(mini('ok'), [gone])).toEqual([]);
  const later = mini('lost', 'Wi-Fi?')[0];
  expect(texts(mini('ok'), [{ ...later, state: { ...later.state!, started: 2000 } }])).toEqual([]);
});

it('still tells of a node that was lost while the coordinator did not answer', () => {
  const silent = { ...mini('ok')[0], condition: 'unreachable' as const };
  expect(texts([silent], mini('lost', 'Wi-Fi?'))).toHaveLength(1);
});

it.each([
  ['ok', 'success', 'has ended'],
  ['error', 'error', 'failed'],
  ['interrupted', 'info', 'was stopped']
] as const)('tells that training ended with %s', (status, kind, words) => {
  const told = `${kind}: Training of digits in cluster lesson ${words} after 2 min 05 s, round 12`;
  expect(texts(lesson(TRAINS), ended(status))).toEqual([told]);
  expect(texts(ended(status), ended(status))).toEqual([]);
  const measured = { jobs: [job('digits', { loss: 0.25 })] };
  expect(texts(lesson(TRAINS), ended(status, measured))).toEqual([`${told}, loss of the global model 0.2500`]);
});

it('names the nodes on which training failed, and calls it no failure where some were only lost', () => {
  const with_ = (nodes: Record<string, string>): string[] =>
    texts(lesson(TRAINS), lesson({ ...TRAINS, cell: { ...RUNNING.cell, status: 'error', ended: 1125, nodes } }));
  expect(with_({ desk: 'error', mini: 'lost' })).toEqual([
    'error: Training of digits in cluster lesson failed on desk after 2 min 05 s, round 12'
  ]);
  expect(with_({ desk: 'ok', mini: 'lost' })).toEqual([
    'info: Training of digits in cluster lesson has ended without mini after 2 min 05 s, round 12'
  ]);
});

it('tells that training ended where the next cell runs already', () => {
  const next = lesson({ ...TRAINS, cell: { ...RUNNING.cell, id: 4 } });
  expect(texts(lesson(TRAINS), next)).toEqual(['success: Training of digits in cluster lesson has ended, round 12']);
});

it('tells nothing of the end of a cell that trained nothing, nor of one that goes on', () => {
  const other = { ...RUNNING, jobs: [job('digits', { cell: 2 })] };
  expect(texts(lesson(other), lesson({ ...other, cell: { ...RUNNING.cell, status: 'ok' } }))).toEqual([]);
  expect(texts(lesson(TRAINS), lesson(TRAINS))).toEqual([]);
});

it('is one line of bounded length, whatever a node says', () => {
  const [said] = texts(mini('ok'), mini('lost', 'x'.repeat(5000)));
  expect(said.length).toBeLessThan(300);
});
