import { extend, lossesIn } from '../sidebar/curves';
import { Connection, IServer } from '../sidebar/connection';
import { Store } from '../sidebar/store';
import { cluster, curve, overview, Socket } from './overviews';

let store: Store;
let sockets: Socket[];
let status: number;
let server: IServer;
let connection: Connection;

beforeEach(() => {
  jest.useFakeTimers();
  [store, sockets, status] = [new Store(), [], 200];
  server = {
    open: () => {
      sockets.push(new Socket());
      return sockets[sockets.length - 1];
    },
    probe: async () => status
  };
  connection = new Connection(server, store);
});

afterEach(() => {
  connection.dispose();
  jest.useRealTimers();
});

function last(): Socket {
  return sockets[sockets.length - 1];
}

async function refuse(): Promise<void> {
  last().close();
  await jest.advanceTimersByTimeAsync(0);
}

it('puts what it receives into the store', () => {
  last().onopen!({} as never);
  last().receive(overview({ clusters: [cluster('lesson')] }));
  last().receive({ type: 'CurvePoints', cluster: 'lesson', reset: true, series: [curve('desk', 'loss', [2, 1])] });
  const { link, overview: shown, curves } = store.state();
  expect([link, shown!.clusters[0].name, curves.get('lesson')!.size]).toEqual(['live', 'lesson', 1]);
});

it('tries again after each break, waiting longer each time', async () => {
  last().onopen!({} as never);
  for (const wait of [500, 1000, 2000, 4000]) {
    const before = sockets.length;
    await refuse();
    expect(store.state().link).toBe('lost');
    await jest.advanceTimersByTimeAsync(wait - 1);
    expect(sockets.length).toBe(before);
    await jest.advanceTimersByTimeAsync(1);
    expect(sockets.length).toBe(before + 1);
  }
  last().onopen!({} as never);
  expect([store.state().link, store.state().nextTry]).toEqual(['live', 0]);
});

it('gives a try up that nobody answers, and tries anew', async () => {
  await jest.advanceTimersByTimeAsync(30_000);
  expect(store.state().link).toBe('lost');
  await jest.advanceTimersByTimeAsync(500);
  expect(sockets.length).toBe(2);
  last().onopen!({} as never);
  await jest.advanceTimersByTimeAsync(60_000);
  expect([store.state().link, sockets.length]).toEqual(['live', 2]);
});

it('tries at once when asked, and only once', async () => {
  await refuse();
  connection.tryNow();
  connection.tryNow();
  await jest.advanceTimersByTimeAsync(400);
  expect(sockets.length).toBe(2);
});

it.each([
  [404, 'missing'],
  [403, 'refused'],
  [200, 'lost']
])('a server that answers %i is %s', async (answer, link) => {
  status = answer;
  await refuse();
  expect(store.state().link).toBe(link);
});

it('gives the answer to the action that it belongs to', async () => {
  last().onopen!({} as never);
  const first = connection.act({ action: 'detach', cluster: 'lesson' });
  const second = connection.act({ action: 'remove', cluster: 'lesson', target: 'mini' });
  expect(last().sent).toEqual([
    { id: 1, action: 'detach', cluster: 'lesson' },
    { id: 2, action: 'remove', cluster: 'lesson', target: 'mini' }
  ]);
  last().receive({ type: 'Done', id: 2, error: 'no such node', value: null });
  last().receive({ type: 'Done', id: 1, error: '', value: null });
  expect([(await first).error, (await second).error]).toEqual(['', 'no such node']);
});

it('says that an action is unsettled when the connection breaks, and refuses one without a connection', async () => {
  last().onopen!({} as never);
  const answer = connection.act({ action: 'stop', cluster: 'lesson' });
  last().close();
  expect((await answer).error).toContain('connection to the Jupyter server was lost');
  expect((await connection.act({ action: 'share_on' })).error).toContain('there is no connection');
});

it('thins a long curve and keeps its ends', () => {
  let curves = new Map() as ReturnType<typeof extend>;
  for (let start = 0; start < 2000; start += 100) {
    const time = Array.from({ length: 100 }, (_, index) => start + index);
    curves = extend(curves, [{ node: 'desk', job: '', run: 0, name: 'loss', step: time, time, value: time }]);
  }
  const points = [...curves.values()][0];
  expect(points.length).toBeLessThanOrEqual(400);
  expect(points.length).toBeGreaterThan(100);
  expect([points[0].time, points[points.length - 1].time]).toEqual([0, 1999]);
});

it('leaves out points that it has', () => {
  const curves = extend(extend(new Map(), [curve('desk', 'loss', [3, 2])]), [curve('desk', 'loss', [3, 2, 1])]);
  expect([...curves.values()][0].map(point => point.value)).toEqual([3, 2, 1]);
});

it('keeps the newest runs of each job, as the server does', () => {
  let curves = extend(new Map(), [curve('desk', 'memory', [1]), curve('desk', 'loss', [1], 'critic', 1001)]);
  for (let run = 1; run <= 20; run++) {
    curves = extend(curves, [curve('desk', 'loss', [3, 2], 'sweep', run), curve('', 'loss', [3], 'sweep', run)]);
  }
  const runs = lossesIn(curves, true).filter(({ job }) => job === 'sweep');
  expect(runs.map(({ run }) => run)).toEqual([13, 14, 15, 16, 17, 18, 19, 20]);
  expect(lossesIn(curves, false)).toHaveLength(8);
  expect(curves.size).toBe(2 + 16);
});
