/** Parts of sidebar and dashboard: folding, rarer buttons, copying, logs. */

import * as React from 'react';

import type { ClusterRow } from '../generated';
import { Dashboard } from '../sidebar/dashboard';
import { Store } from '../sidebar/store';
import { Sidebar } from '../sidebar/view';
import { act, button, buttons, cluster, draw, erase, Handling, node, overview, press, RUNNING } from './overviews';

let store: Store;
let answers: Handling;

beforeEach(() => {
  [store, answers] = [new Store(), new Handling()];
  store.connected();
});

afterEach(() => {
  jest.useRealTimers();
  erase();
});

function sidebar(...clusters: ClusterRow[]): HTMLElement {
  act(() => store.show(overview({ clusters })));
  return draw(<Sidebar store={store} tryNow={() => {}} {...answers} />);
}

describe('folding', () => {
  it('hides the nodes of a cluster and shows them again, and says so to a screen reader', async () => {
    const host = sidebar(cluster('lesson'));
    const fold = button(host, 'lesson');
    expect([fold.getAttribute('aria-expanded'), host.querySelectorAll('.nbc-side-node')]).toMatchObject([
      'true',
      { length: 2 }
    ]);
    await press(host, 'lesson');
    expect([fold.getAttribute('aria-expanded'), host.querySelectorAll('.nbc-side-node')]).toMatchObject([
      'false',
      { length: 0 }
    ]);
    const body = document.getElementById(fold.getAttribute('aria-controls')!)!;
    expect(body.hidden).toBe(true);
    expect(host.textContent).toContain('2 nodes');
    await press(host, 'lesson');
    expect(body.hidden).toBe(false);
  });

  it('stays as it was left when the page is loaded again, each cluster for itself', async () => {
    await press(sidebar(cluster('lesson'), cluster('other')), 'lesson');
    const host = sidebar(cluster('lesson'), cluster('other'));
    expect(['lesson', 'other'].map(name => button(host, name).getAttribute('aria-expanded'))).toEqual([
      'false',
      'true'
    ]);
  });

  it('folds also where nothing can be kept, or something else lies there', async () => {
    localStorage.setItem('notebook-cluster:opened', '[1');
    const write = jest.spyOn(Storage.prototype, 'setItem').mockImplementation(() => {
      throw new Error('full');
    });
    const host = sidebar(cluster('lesson'));
    await press(host, 'lesson');
    expect(button(host, 'lesson').getAttribute('aria-expanded')).toBe('false');
    write.mockRestore();
  });
});

describe('buttons', () => {
  it('has one in the open, one more while a cell runs, and what ends the cluster last behind "More"', async () => {
    const host = sidebar(cluster('lesson'));
    const group = (name: string): string[] => buttons(host.querySelector<HTMLElement>(`[aria-label="${name}"]`)!);
    expect(group('actions of lesson')).toEqual(['Dashboard', 'More …']);
    expect(group('more actions of lesson')).toEqual([]);
    await press(host, 'More …');
    expect(group('more actions of lesson')).toEqual([
      'Insert cell',
      'Checkpoint',
      'Invite',
      'Class page',
      'Detach',
      'Stop cluster'
    ]);
    act(() => store.show(overview({ clusters: [cluster('lesson', RUNNING)] })));
    expect(group('actions of lesson')).toEqual(['Dashboard', 'Less', 'Stop cell']);
  });
});

describe('copying', () => {
  const invited = (): ClusterRow => cluster('lesson', { invitation: '192.0.2.1:4000 a-b-1' });
  const line = 'notebook-cluster share --dial 192.0.2.1:4000 --code a-b-1';
  const name = 'Copy the line that joins lesson';
  const said = (host: HTMLElement): string => host.querySelector('.nbc-side-copy')!.textContent!;

  it('puts the line on the clipboard and says so for a while', async () => {
    const copied: string[] = [];
    Object.assign(navigator, { clipboard: { writeText: async (text: string) => void copied.push(text) } });
    jest.useFakeTimers();
    const host = sidebar(invited());
    await press(host, name);
    expect([copied, said(host)]).toEqual([[line], 'Copied']);
    expect(host.querySelector('.nbc-side-copied [role=status]')!.textContent).toContain('Copied');
    await act(() => jest.advanceTimersByTimeAsync(3000));
    expect(button(host, name).textContent).toBe('Copy');
  });

  it('copies without the clipboard of the page too, and says where it cannot', async () => {
    Object.assign(navigator, { clipboard: undefined });
    const host = sidebar(invited());
    const selected: string[] = [];
    document.execCommand = () => selected.push((document.activeElement as HTMLTextAreaElement).value) > 0;
    await press(host, name);
    expect([selected, said(host)]).toEqual([[line], 'Copied']);
    document.execCommand = () => false;
    await press(host, 'Copied: the line that joins lesson');
    expect(said(host)).toBe('Not copied: select it');
  });
});

describe('logs', () => {
  async function opened(): Promise<HTMLElement> {
    store.show(overview({ clusters: [cluster('lesson')] }));
    const host = draw(<Dashboard store={store} name="lesson" act={answers.act} tryNow={() => {}} />);
    await press(host, 'Logs');
    return host;
  }
  const choose = (host: HTMLElement, name: string): Promise<void> =>
    act(async () => {
      const menu = host.querySelector('select')!;
      menu.value = name;
      menu.dispatchEvent(new Event('change', { bubbles: true }));
    });

  it('shows the last lines of a node as text, reads them again, and those of another one', async () => {
    answers.answer = { error: '', value: ['<img src=x onerror="window.hacked = 1">', '  indented'] };
    const host = await opened();
    expect(host.querySelector('pre')!.textContent).toBe('<img src=x onerror="window.hacked = 1">\n  indented');
    expect(host.querySelector('pre img')).toBeNull();
    await press(host, 'Refresh the log of desk');
    await choose(host, 'mini');
    expect(answers.asked.map(({ action, target }) => [action, target])).toEqual([
      ['log', 'desk'],
      ['log', 'desk'],
      ['log', 'mini']
    ]);
  });

  it('says that there is nothing, or why it cannot be read, and shows no log of another node', async () => {
    answers.answer = { error: '', value: ['of desk'] };
    const host = await opened();
    answers.answer = { error: "peer 'mini' did not send the log of 'mini': is it lost?", value: null };
    await choose(host, 'mini');
    expect(host.querySelector('pre')).toBeNull();
    expect(host.querySelector('[role=alert]')!.textContent).toContain('is it lost?');
    answers.answer = { error: '', value: [] };
    await press(host, 'Refresh the log of mini');
    expect(host.textContent).toContain('mini has written nothing');
  });

  it('goes between the tabs with the arrow keys, and back to the overview when the cluster ends', async () => {
    const host = await opened();
    const tabs = (): string[] =>
      [...host.querySelectorAll('[role=tab]')].map(tab => `${tab.textContent} ${tab.getAttribute('aria-selected')}`);
    const key = new KeyboardEvent('keydown', { key: 'ArrowLeft', bubbles: true, cancelable: true });
    await act(async () => void button(host, 'Logs').dispatchEvent(key));
    expect(tabs()).toEqual(['Overview true', 'Logs false']);
    await press(host, 'Logs');
    act(() => store.show(overview({ clusters: [{ ...cluster('lesson'), condition: 'ended' }] })));
    expect(tabs()).toEqual(['Overview true']);
    expect(host.querySelector('.nbc-dash-table')).not.toBeNull();
  });

  it('has none without nodes', async () => {
    const host = await opened();
    act(() => store.show(overview({ clusters: [cluster('lesson', { nodes: [] })] })));
    expect(host.querySelector('[role=tabpanel]')!.textContent).toBe('No nodes.');
    act(() => store.show(overview({ clusters: [cluster('lesson', { nodes: [node('desk', 0)] })] })));
    expect(host.querySelector('select')).not.toBeNull();
  });
});
