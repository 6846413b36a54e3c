/** Bundles as notebook_cluster/magics makes them, and a renderer that shows them. */

import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { Widget } from '@lumino/widgets';

import { MIME_TYPE } from '../page';
import { OutputRenderer } from '../renderer';

const PRE = '<pre style="margin:0;padding:0;white-space:pre-wrap">';
const COLOURS = ['#2f81f7', '#e8853d', '#2da876'];

export interface INodeText {
  name: string;
  state?: string;
  block: number;
}

let cells = 0;

/** A name for a cell that no other test uses. */
export function newCell(): string {
  cells++;
  return `nbc-${cells}`;
}

/** One framed block of HTML. */
export function framed(title: string, inner: string, names = '', colour = COLOURS[0]): string {
  return (
    `<div style="border-left:3px solid ${colour};padding-left:8px;margin-bottom:2px">` +
    `<div style="font-size:85%" title="${names}">${title}</div>${PRE}${inner}</pre></div>`
  );
}

/** The bundle for `nodes` and the HTML of each block, all on one page. */
export function bundle(cell: string, nodes: readonly INodeText[], inner: readonly string[]): Record<string, any> {
  const html = inner.map((text, block) => {
    const names = nodes.filter(node => node.block === block).map(node => node.name);
    return names.length > 1
      ? framed(`${names.length} of ${nodes.length} nodes: ${names.join(', ')}`, text, names.join(', '))
      : framed(names[0], text, '', COLOURS[block]);
  });
  return {
    [MIME_TYPE]: {
      version: 1,
      cell,
      row: 0,
      page: 0,
      first: 0,
      count: inner.length,
      names: nodes.map(node => node.name),
      ranks: nodes.map((_, rank) => rank),
      states: nodes.map(node => node.state ?? 'ok'),
      blocks: nodes.map(node => node.block)
    },
    'text/html': html.join(''),
    'text/plain': inner.join('\n')
  };
}

/** Two nodes that wrote different text. */
export function two(cell: string, mini: string, desk: string, state = 'ok'): Record<string, any> {
  const nodes = [
    { name: 'mini', state, block: 0 },
    { name: 'desk', state, block: 1 }
  ];
  return bundle(cell, nodes, [mini, desk]);
}

/** A renderer on the page. */
export function attached(): OutputRenderer {
  const renderer = new OutputRenderer();
  Widget.attach(renderer, document.body);
  return renderer;
}

/** Show `data`; `trusted` says whose notebook it is, which must make no difference. */
export function show(renderer: OutputRenderer, data: Record<string, any>, trusted = true): Promise<void> {
  const model: IRenderMime.IMimeModel = { data, metadata: {}, trusted, setData: () => undefined };
  return renderer.renderModel(model);
}

/** All elements below `renderer` that match. */
export function all(renderer: OutputRenderer, selector: string): HTMLElement[] {
  return [...renderer.node.querySelectorAll<HTMLElement>(selector)];
}

/** The text of the blocks that can be seen. */
export function seen(renderer: OutputRenderer): string[] {
  return all(renderer, '.nbc-block:not([hidden]) .nbc-body:not([hidden]) pre').map(text => text.textContent ?? '');
}

/** The tab with this label. */
export function tab(renderer: OutputRenderer, label: string): HTMLElement {
  const found = all(renderer, '[role=tab]').find(element => element.textContent?.endsWith(label));
  if (found === undefined) {
    throw new Error(`no tab ${label}`);
  }
  return found;
}
