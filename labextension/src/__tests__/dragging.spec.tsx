import * as React from 'react';
import type { Drag } from '@lumino/dragdrop';

import { CELLS_TYPE, dragCluster } from '../sidebar/dragging';
import { Store } from '../sidebar/store';
import { Sidebar } from '../sidebar/view';
import { button, cluster, draw, erase, Handling, overview, press } from './overviews';

afterEach(erase);

function pointer(type: string, x: number, y: number, target: EventTarget = document): void {
  target.dispatchEvent(new PointerEvent(type, { clientX: x, clientY: y, button: 0, bubbles: true, cancelable: true }));
}

/** A place in the page that takes cells, as a notebook does. */
function notebook(): { dropped: any[] } {
  const taken: { dropped: any[] } = { dropped: [] };
  const place = document.body.appendChild(document.createElement('div'));
  document.elementFromPoint = () => place;
  for (const type of ['lm-dragenter', 'lm-dragover', 'lm-drop']) {
    place.addEventListener(type, event => {
      const { mimeData, proposedAction } = event as Drag.Event;
      if (mimeData.hasData(CELLS_TYPE)) {
        event.preventDefault();
        event.stopPropagation();
        (event as Drag.Event).dropAction = proposedAction;
        if (type === 'lm-drop') {
          taken.dropped = mimeData.getData(CELLS_TYPE) as any[];
        }
      }
    });
  }
  return taken;
}

it('drops the cells of a cluster on a notebook', async () => {
  const taken = notebook();
  const done = dragCluster('lesson', 10, 10);
  expect(document.querySelector('.nbc-side-drag')!.textContent).toBe('cells for lesson');
  pointer('pointermove', 50, 60);
  pointer('pointerup', 50, 60);
  expect(await done).toBe('copy');
  expect(taken.dropped.map(cell => [cell.cell_type, cell.source])).toEqual([
    ['code', '%load_ext notebook_cluster\n%cluster attach lesson'],
    ['code', '%%on_all\n']
  ]);
  expect(document.querySelector('.nbc-side-drag')).toBeNull();
});

it('drops nothing after Escape', async () => {
  const taken = notebook();
  const done = dragCluster('lesson', 10, 10);
  pointer('pointermove', 50, 60);
  document.dispatchEvent(new KeyboardEvent('keydown', { keyCode: 27, bubbles: true }));
  expect(await done).toBe('none');
  expect(taken.dropped).toEqual([]);
});

describe('in the sidebar', () => {
  let handling: Handling;
  let host: HTMLElement;

  beforeEach(() => {
    const store = new Store();
    handling = new Handling();
    store.connected();
    store.show(overview({ clusters: [cluster('lesson')] }));
    host = draw(<Sidebar store={store} tryNow={() => {}} {...handling} />);
  });

  it('pulls a cluster by its name once the pointer has moved a little', () => {
    pointer('pointerdown', 10, 10, host.querySelector('.nbc-mod-pulled')!);
    pointer('pointermove', 12, 12);
    expect(handling.pulled).toEqual([]);
    pointer('pointermove', 20, 12);
    pointer('pointermove', 40, 12);
    expect(handling.pulled).toEqual([['lesson', 20, 12]]);
  });

  it('does not pull it after the button was let go', () => {
    pointer('pointerdown', 10, 10, host.querySelector('.nbc-mod-pulled')!);
    pointer('pointerup', 10, 10);
    pointer('pointermove', 90, 90);
    expect(handling.pulled).toEqual([]);
  });

  it('inserts the cells with a button too, and says when there is no notebook', async () => {
    await press(host, 'More …');
    await press(host, 'Insert cell');
    expect(handling.inserted).toEqual(['lesson']);
    expect(host.querySelector('[role=alert]')).toBeNull();
    handling.obstacle = 'there is no open notebook';
    await press(host, 'Insert cell');
    expect(host.querySelector('[role=alert]')!.textContent).toContain('there is no open notebook');
    expect(button(host, 'Dismiss')).not.toBeNull();
  });
});
