/** Shows one display of a cell's text as tabs and blocks. */

import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { Widget } from '@lumino/widgets';

import { BlockView } from './blockView';
import { stateOf, type CellState } from './cellState';
import { onlyDifferences } from './differences';
import { MIME_TYPE, readPage, type IPage } from './page';
import { readBlocks, type IBlock } from './rebuild';
import { newId, TabBar } from './tabBar';

interface IShown {
  readonly page: IPage;
  readonly blocks: readonly IBlock[];
  /** Names the block of a row by its nodes: what the reader folded stays folded while the text changes. */
  readonly keys: readonly string[];
}

export class OutputRenderer extends Widget implements IRenderMime.IRenderer {
  private readonly panel = document.createElement('div');
  private readonly views = new Map<string, BlockView>();
  private shown: IShown | null = null;
  private state: CellState | null = null;
  private bar: TabBar | null = null;
  private readonly onChoice = (): void => this.refresh();

  constructor() {
    super();
    this.addClass('nbc-output');
    this.panel.className = 'nbc-panel-of-blocks';
    this.panel.id = newId();
  }

  /** Show `model`; called again for each change of the display. Nothing in the model is trusted. */
  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const page = readPage(model.data[MIME_TYPE]);
    const html = model.data['text/html'];
    const blocks = page === null || typeof html !== 'string' ? null : readBlocks(html);
    if (page === null || blocks === null || blocks.length !== page.count) {
      this.showPlain(model.data['text/plain']);
      return;
    }
    this.follow(page.cell);
    this.shown = { page, blocks, keys: keysOf(page) };
    this.refresh();
  }

  dispose(): void {
    this.state?.ignore(this.onChoice);
    super.dispose();
  }

  protected onAfterAttach(): void {
    this.views.forEach(view => view.settle());
  }

  protected onAfterShow(): void {
    this.views.forEach(view => view.settle());
  }

  private follow(cell: string): void {
    const state = stateOf(cell);
    if (state !== this.state) {
      this.state?.ignore(this.onChoice);
      this.state = state;
      this.bar = new TabBar(state, this.panel);
      this.views.clear();
      this.panel.replaceChildren();
      this.node.replaceChildren(this.panel);
      state.listen(this.onChoice);
    }
  }

  private showPlain(text: unknown): void {
    this.state?.ignore(this.onChoice);
    this.state = this.shown = this.bar = null;
    const plain = document.createElement('pre');
    plain.textContent = Array.isArray(text) ? text.join('') : typeof text === 'string' ? text : '';
    this.node.replaceChildren(plain);
  }

  private refresh(): void {
    if (this.shown === null || this.state === null) {
      return;
    }
    const { page } = this.shown;
    const selected = page.nodes.find(node => node.name === this.state?.selected) ?? null;
    const leftOut = this.state.selected !== null && selected === null;
    this.showBar(page);
    this.showBlocks(this.shown, this.state, selected === null ? null : selected.block);
    this.panel.dataset.silent = leftOut && page.page === 0 ? `${this.state.selected} printed nothing here` : '';
  }

  /** The first page of a row has its tabs, where there is something to choose. */
  private showBar(page: IPage): void {
    const bar = this.bar!.element;
    const wanted = page.page === 0 && (page.blocks > 1 || this.state!.selected !== null);
    if (wanted && bar.parentNode === null) {
      this.node.prepend(bar);
    } else if (!wanted) {
      bar.remove();
    }
    if (wanted) {
      this.panel.setAttribute('role', 'tabpanel');
      this.bar!.show(page, allKeysOf(page), page.count === page.blocks);
    } else {
      this.panel.removeAttribute('role');
      this.panel.removeAttribute('aria-labelledby');
    }
  }

  private showBlocks(shown: IShown, state: CellState, selected: number | null): void {
    const { page, blocks, keys } = shown;
    const alone = state.selected !== null;
    const comparing = !alone && state.differencesOnly && page.blocks > 1 && page.count === page.blocks;
    const contents = comparing ? compared(page, blocks) : blocks.map(block => block.content);
    keys.forEach((key, place) => {
      const view = this.views.get(key) ?? new BlockView(() => state.fold([key], !state.isFolded(key)));
      this.views.set(key, view);
      if (this.panel.children[place] !== view.element) {
        this.panel.insertBefore(view.element, this.panel.children[place] ?? null);
      }
      view.element.hidden = alone && selected !== page.first + place;
      view.show(blocks[place], {
        folded: !alone && state.isFolded(key),
        alone,
        marks: page.blocks === 1 ? page.nodes : [],
        content: contents[place].cloneNode(true) as DocumentFragment
      });
    });
    for (const [key, view] of this.views) {
      if (!keys.includes(key)) {
        view.element.remove();
        this.views.delete(key);
      }
    }
  }
}

/** The text of each block without what all have in common; the block of most nodes is what others differ from. */
function compared(page: IPage, blocks: readonly IBlock[]): DocumentFragment[] {
  const sizes = blocks.map((_, place) => page.nodes.filter(node => node.block === page.first + place).length);
  const reference = sizes.indexOf(Math.max(...sizes));
  const order = [reference, ...blocks.keys()].filter((place, at, all) => all.indexOf(place) === at);
  const shown = onlyDifferences(order.map(place => blocks[place].content));
  return blocks.map((_, place) => shown[order.indexOf(place)]);
}

function keysOf(page: IPage): string[] {
  return allKeysOf(page).slice(page.first, page.first + page.count);
}

function allKeysOf(page: IPage): string[] {
  const names: string[][] = Array.from({ length: page.blocks }, () => []);
  page.nodes.forEach(node => names[node.block].push(node.name));
  return names.map(list => JSON.stringify([page.row, ...list]));
}
