/**
 * The place of a panel in a notebook: the live panel where its kernel is there, else the picture that is saved with it.
 *
 * JupyterLab itself prefers the view of a widget to any picture, also where the widget is gone for good, and says "model
 * not found" then. So the panel's output has a type of its own (`widgets/panel.py`), which comes first and holds both:
 * the widget and the picture, each drawn by JupyterLab's own renderer, so that a notebook that is not trusted is shown as
 * safely as any other. While the panel lives, it says every few seconds how it looks; that is written into the output, and
 * so a notebook that is saved has a picture of how things were a moment ago, also after the page was loaded again, when
 * what the kernel sends to an output does not arrive any more.
 */

import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { Panel } from '@lumino/widgets';

export const PANEL_TYPE = 'application/vnd.notebook-cluster.panel+json';
export const WIDGET_TYPE = 'application/vnd.jupyter.widget-view+json';
const HTML_TYPE = 'text/html';
const TEXT_TYPE = 'text/plain';

/** Before the view of a widget (-10). */
export const RANK = -20;
/** The event that `widgets/panel.js` sends up through the page, with an IPicture. */
export const PICTURE_EVENT = 'notebook-cluster-picture';
/** What is live: a panel that has drawn itself and has not lost its kernel. */
const LIVE = '.nbc-panel';
const DISCONNECTED = '.jupyter-widgets-disconnected';
/**
 * The renderer of widgets that knows the notebook's kernel is registered when that is connected, after the outputs of a
 * notebook that is opened were drawn, and nothing tells of it.
 */
const LOOK_MILLISECONDS = 500;

/** How a panel looks now. */
export interface IPicture {
  readonly html: string;
  readonly text: string;
  /** The panel ends: nothing but this is left of it. */
  readonly last: boolean;
}

/** As much of a registry of renderers as is used. */
export interface IRenderers {
  createRenderer(mimeType: string): IRenderMime.IRenderer;
  getFactory(mimeType: string): IRenderMime.IRendererFactory | undefined;
}

/** Makes the place of a panel with the renderers of its own notebook. */
export function panelFactory(renderers: IRenderers): IRenderMime.IRendererFactory {
  return {
    // What is not trusted gets the picture only, cleaned by JupyterLab's renderer of HTML.
    safe: true,
    mimeTypes: [PANEL_TYPE],
    defaultRank: RANK,
    createRenderer: () => new PanelPlace(renderers)
  };
}

/** One output. */
export class PanelPlace extends Panel implements IRenderMime.IRenderer {
  private model: IRenderMime.IMimeModel | null = null;
  private picture: IRenderMime.IRenderer | null = null;
  /** The picture that is drawn. */
  private drawn = '';
  private live: IRenderMime.IRenderer | null = null;
  private widget = '';
  private factory: IRenderMime.IRendererFactory | undefined;
  private looking: ReturnType<typeof setInterval> | undefined;
  private readonly changes = new MutationObserver(() => void this.choose());

  constructor(private readonly renderers: IRenderers) {
    super();
    this.addClass('nbc-place');
    this.node.addEventListener(PICTURE_EVENT, event => {
      event.stopPropagation();
      this.keep((event as CustomEvent<IPicture>).detail);
    });
  }

  /** Draw `model`; one that only has another picture leaves the live panel alone. */
  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    this.model = model;
    this.meet(model);
    await this.choose();
  }

  dispose(): void {
    clearInterval(this.looking);
    this.changes.disconnect();
    super.dispose();
  }

  /** Ask for the live panel of `model`, unless it is asked for already. */
  private meet(model: IRenderMime.IMimeModel): void {
    const widget = model.trusted ? idOf(model) : '';
    if (widget === this.widget) {
      return;
    }
    this.widget = widget;
    this.factory = undefined;
    clearInterval(this.looking);
    this.leave();
    if (widget) {
      this.look();
      this.looking = setInterval(() => this.look(), LOOK_MILLISECONDS);
    }
  }

  /** Have the widget drawn by the renderer that is registered now, unless it was the one before. */
  private look(): void {
    const { model, isLive } = this;
    const factory = this.renderers.getFactory(WIDGET_TYPE);
    if (!model || !factory || isLive || factory === this.factory) {
      return;
    }
    this.factory = factory;
    this.leave();
    const live = (this.live = this.renderers.createRenderer(WIDGET_TYPE));
    live.addClass('nbc-mod-waits');
    this.addWidget(live);
    const what = { childList: true, subtree: true, attributes: true, attributeFilter: ['class'] };
    this.changes.observe(live.node, what);
    // A copy: the renderer of widgets writes into it when a view ends, and the output must keep its widget.
    const data = { ...model.data, [WIDGET_TYPE]: { ...(model.data[WIDGET_TYPE] as object) } };
    void live.renderModel({ ...{ data, metadata: model.metadata, trusted: true }, setData: () => undefined });
  }

  private leave(): void {
    this.changes.disconnect();
    this.live?.dispose();
    this.live = null;
  }

  private get isLive(): boolean {
    return Boolean(this.live?.node.querySelector(LIVE) && !this.live.node.querySelector(DISCONNECTED));
  }

  /** Show the live panel where there is one, else the picture; never both. */
  private async choose(): Promise<void> {
    const { isLive, model } = this;
    if (this.live && this.live.hasClass('nbc-mod-waits') === isLive) {
      this.live.toggleClass('nbc-mod-waits', !isLive);
    }
    if (isLive) {
      this.picture?.dispose();
      this.picture = null;
      return;
    }
    const html = String(model?.data[HTML_TYPE] ?? '');
    if (!model || this.isDisposed || (this.picture && this.drawn === html)) {
      return;
    }
    this.drawn = html;
    if (!this.picture) {
      this.picture = this.renderers.createRenderer(HTML_TYPE in model.data ? HTML_TYPE : TEXT_TYPE);
      this.insertWidget(0, this.picture);
    }
    await this.picture.renderModel(model);
  }

  /** Write `picture` into the output, and so into the file. */
  private keep({ html, text, last }: IPicture): void {
    const { model } = this;
    if (!model?.trusted || !this.live || typeof html !== 'string' || typeof text !== 'string') {
      return;
    }
    const picture = { [HTML_TYPE]: html, [TEXT_TYPE]: text };
    model.setData({ data: last ? picture : { ...model.data, ...picture } });
  }
}

/** Id of the widget that is the live panel; empty where there is none. */
function idOf(model: IRenderMime.IMimeModel): string {
  const view = model.data[WIDGET_TYPE] as { model_id?: unknown } | undefined;
  return typeof view?.model_id === 'string' ? view.model_id : '';
}
