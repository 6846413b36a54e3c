import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { Panel, Widget } from '@lumino/widgets';

import { IPicture, panelFactory, PANEL_TYPE, PanelPlace, PICTURE_EVENT, WIDGET_TYPE } from '../panelPlace';

/** A renderer that shows what it was asked for; the test draws the live panel itself. */
class Renderer extends Panel implements IRenderMime.IRenderer {
  constructor(readonly type: string) {
    super();
    this.node.dataset.type = type;
  }
  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    this.node.textContent = this.type === WIDGET_TYPE ? 'Loading widget...' : String(model.data[this.type]);
  }
}

const factory = {} as IRenderMime.IRendererFactory;
let known: IRenderMime.IRendererFactory | undefined;
let made: Renderer[];
let place: PanelPlace;
let data: any;

const renderers = {
  createRenderer: (type: string) => {
    made.push(new Renderer(type));
    return made[made.length - 1];
  },
  getFactory: (type: string) => (type === WIDGET_TYPE ? known : factory)
};

function model(trusted = true): IRenderMime.IMimeModel {
  return { data, metadata: {}, trusted, setData: ({ data: changed }) => void (data = changed) };
}

async function settle(): Promise<void> {
  for (let turn = 0; turn < 5; turn++) {
    await Promise.resolve();
  }
}

const shown = (): string[] =>
  place.widgets.filter(widget => !widget.hasClass('nbc-mod-waits')).map(widget => widget.node.dataset.type!);

async function draw(html: string): Promise<void> {
  made.find(one => one.type === WIDGET_TYPE && !one.isDisposed)!.node.innerHTML = html;
  await settle();
}

function say(picture: IPicture): void {
  place.widgets.at(-1)!.node.dispatchEvent(new CustomEvent(PICTURE_EVENT, { detail: picture, bubbles: true }));
}

beforeEach(() => {
  jest.useFakeTimers({ doNotFake: ['queueMicrotask'] });
  [known, made] = [factory, []];
  data = { [WIDGET_TYPE]: { model_id: 'w' }, [PANEL_TYPE]: { version: 1 }, 'text/html': 'then', 'text/plain': 't' };
  place = panelFactory(renderers).createRenderer({} as IRenderMime.IRendererOptions) as PanelPlace;
  Widget.attach(place, document.body);
});

afterEach(() => {
  place.dispose();
  jest.useRealTimers();
});

it('shows the picture until the live panel has drawn itself, and when it has lost its kernel', async () => {
  await place.renderModel(model());
  expect(shown()).toEqual(['text/html']);
  await draw('<div class="nbc-panel"></div>');
  expect(shown()).toEqual([WIDGET_TYPE]);
  expect(place.widgets).toHaveLength(1);
  await draw('<div class="jupyter-widgets-disconnected"><div class="nbc-panel"></div></div>');
  expect(shown()).toEqual(['text/html']);
});

it('shows the picture where the widget is not found', async () => {
  await place.renderModel(model());
  await draw('Error displaying widget: model not found');
  expect(shown()).toEqual(['text/html']);
});

it('draws the widget anew with the renderer that is registered later', async () => {
  await place.renderModel(model());
  known = { ...factory };
  jest.advanceTimersByTime(600);
  expect(made.filter(one => one.type === WIDGET_TYPE).map(one => one.isDisposed)).toEqual([true, false]);
  await draw('<div class="nbc-panel"></div>');
  known = { ...factory };
  jest.advanceTimersByTime(6000);
  expect(made.filter(one => one.type === WIDGET_TYPE)).toHaveLength(2);
});

it('asks no widget and keeps no picture in a notebook that is not trusted', async () => {
  await place.renderModel(model(false));
  say({ html: 'evil', text: 'evil', last: false });
  expect(made.map(one => one.type)).toEqual(['text/html']);
  expect(data['text/html']).toBe('then');
});

it('writes how the panel looks into the output, and does not touch the live one', async () => {
  await place.renderModel(model());
  await draw('<div class="nbc-panel"></div>');
  for (const html of ['now', 'later']) {
    say({ html, text: html, last: false });
    await place.renderModel(model());
    expect(data).toEqual({
      ...{ [WIDGET_TYPE]: { model_id: 'w' }, [PANEL_TYPE]: { version: 1 } },
      ...{ 'text/html': html, 'text/plain': html }
    });
  }
  expect(made.filter(one => one.type === WIDGET_TYPE)).toHaveLength(1);
  expect(shown()).toEqual([WIDGET_TYPE]);
  say({ html: 'end', text: 'end', last: true });
  expect(data).toEqual({ 'text/html': 'end', 'text/plain': 'end' });
});

it('does not let the renderer of widgets change the output', async () => {
  const asked = jest.spyOn(Renderer.prototype, 'renderModel');
  await place.renderModel(model());
  const given = asked.mock.calls.map(([one]) => one).find(one => one.data !== data)!;
  (given.data[WIDGET_TYPE] as any).model_id = '';
  expect(data[WIDGET_TYPE]).toEqual({ model_id: 'w' });
});
