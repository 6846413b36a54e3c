import * as React from 'react';

import { Question, QUIET_MILLISECONDS, SURE_MILLISECONDS } from '../sidebar/question';
import { Store } from '../sidebar/store';
import { Sidebar } from '../sidebar/view';
import { act, button, cluster, draw, erase, Handling, overview, press, pressTwice } from './overviews';

const STOP = 'Really stop cluster lesson and end all its kernels?';
let answers: Handling;
let host: HTMLElement;

beforeEach(() => {
  const store = new Store();
  answers = new Handling();
  store.connected();
  store.show(overview({ clusters: [cluster('lesson')] }));
  localStorage.setItem('notebook-cluster:opened', JSON.stringify({ 'more of lesson': true }));
  host = draw(<Sidebar store={store} tryNow={() => {}} {...answers} />);
});

afterEach(() => {
  jest.useRealTimers();
  erase();
});

it('takes for an answer only a press that comes alone', () => {
  const question = new Question();
  expect([0, 100, 499, 900].map(now => question.press(now, 1))).toEqual(['ask', 'nothing', 'nothing', 'nothing']);
  expect(question.press(1400, 1)).toBe('act');
});

it('asks nothing in the quiet time after an answer', () => {
  const question = new Question();
  expect([0, 500, 600, 1100].map(now => question.press(now, 0))).toEqual(['ask', 'act', 'nothing', 'ask']);
});

it('does not take the second click of a slow double click for an answer', () => {
  const question = new Question();
  expect([question.press(0, 1), question.press(700, 2), question.press(1400, 1)]).toEqual(['ask', 'nothing', 'act']);
});

it('begins anew after it was taken back', () => {
  const question = new Question();
  question.press(0, 1);
  question.takeBack();
  expect([question.press(600, 1), question.press(1200, 1)]).toEqual(['ask', 'act']);
});

it('does nothing at the second of two quick presses', async () => {
  await press(host, 'Stop cluster');
  await press(host, STOP);
  expect(answers.asked).toEqual([]);
});

it('ends a cluster after a second press that comes alone', async () => {
  await pressTwice(host, 'Stop cluster', STOP);
  expect(answers.asked).toEqual([{ action: 'stop', cluster: 'lesson' }]);
});

it.each([
  ['Restart mini', 'Really restart mini?', 'Restart?'],
  ['Remove mini', 'Really remove mini?', 'Remove?'],
  ['Stop cluster', STOP, 'End all its kernels?']
])('names what %s acts on in its question, which Escape takes back', async (name, question, label) => {
  await press(host, name);
  expect(button(host, question).textContent).toBe(label);
  const reached = jest.fn();
  host.addEventListener('keydown', reached);
  const escape = new KeyboardEvent('keydown', { key: 'Escape', bubbles: true, cancelable: true });
  act(() => void button(host, question).dispatchEvent(escape));
  expect(button(host, name).classList).not.toContain('nbc-mod-sure');
  expect(reached).not.toHaveBeenCalled();
});

it('takes the question back when nobody answers, and when the focus goes elsewhere', async () => {
  jest.useFakeTimers();
  await press(host, 'Remove mini');
  await act(() => jest.advanceTimersByTimeAsync(SURE_MILLISECONDS));
  expect(button(host, 'Remove mini').textContent).toBe('✕');
  await press(host, 'Remove mini');
  act(() => button(host, 'Really remove mini?').focus());
  act(() => button(host, 'Stop cluster').focus());
  expect(button(host, 'Remove mini').textContent).toBe('✕');
});

it('shows when its question takes a press for an answer', async () => {
  jest.useFakeTimers();
  await press(host, 'Remove mini');
  expect(button(host, 'Really remove mini?').classList).toContain('nbc-mod-early');
  await act(() => jest.advanceTimersByTimeAsync(QUIET_MILLISECONDS - 100));
  await press(host, 'Really remove mini?');
  await act(() => jest.advanceTimersByTimeAsync(QUIET_MILLISECONDS - 100));
  expect(button(host, 'Really remove mini?').classList).toContain('nbc-mod-early');
  await act(() => jest.advanceTimersByTimeAsync(100));
  expect(button(host, 'Really remove mini?').classList).not.toContain('nbc-mod-early');
  expect(answers.asked).toEqual([]);
});

it('does not repeat a press while its key is held down', () => {
  const held = new KeyboardEvent('keydown', { key: 'Enter', repeat: true, bubbles: true, cancelable: true });
  expect(button(host, 'Stop cluster').dispatchEvent(held)).toBe(false);
});
