import * as React from 'react';

import { Offer } from '../sidebar/offer';
import { button, cluster, draw, erase, node, press, RUNNING } from './overviews';

afterEach(erase);

const called: string[] = [];
const calls = {
  onShow: () => void called.push('show'),
  onOpen: () => void called.push('open'),
  onClose: () => void called.push('close')
};

it('offers to show a running cell in the notebook whose kernel is free, or in a tab, and can be dismissed', async () => {
  const host = draw(<Offer cluster={cluster('lesson', RUNNING).state!} isBusy={false} {...calls} />);
  expect(host.querySelector('[role=status]')!.textContent).toBe('Cluster lesson is running cell 3.');
  await press(host, 'Show it here');
  await press(host, 'Dashboard of lesson');
  await press(host, 'Dismiss');
  expect(called).toEqual(['show', 'open', 'close']);
});

it('does not offer a cell to a kernel that is busy', () => {
  const host = draw(<Offer cluster={cluster('lesson', RUNNING).state!} isBusy {...calls} />);
  expect(host.textContent).toContain('is running cell 3; its output is not shown here.');
  expect(() => button(host, 'Show it here')).toThrow();
});

it('says of a cluster without a running cell how many nodes are up', () => {
  const nodes = [node('desk', 0), node('<b>', 1, { condition: 'dead' })];
  const host = draw(<Offer cluster={cluster('<i>', { nodes }).state!} isBusy={false} {...calls} />);
  expect(host.querySelector('[role=status]')!.textContent).toBe('Cluster <i> is running (1 of 2 nodes).');
});
