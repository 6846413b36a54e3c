/** The tabs of a row: all nodes together, then each node with its state. Follows the ARIA pattern for tabs. */

import type { CellState } from './cellState';
import type { INode, IPage } from './page';
import { showState, stateMark } from './stateMark';

const ALL = 'All';

export class TabBar {
  readonly element = document.createElement('div');
  private readonly list = document.createElement('div');
  private readonly foldAll = document.createElement('button');
  private readonly differences = document.createElement('button');
  private readonly tabs = new Map<string | null, HTMLButtonElement>();
  private blocks: readonly string[] = [];

  /** `panel`: the element with the blocks, which needs an id. */
  constructor(
    private readonly state: CellState,
    private readonly panel: HTMLElement
  ) {
    this.element.className = 'nbc-bar';
    this.list.className = 'nbc-tabs';
    this.list.setAttribute('role', 'tablist');
    this.list.setAttribute('aria-label', 'Nodes');
    this.list.addEventListener('keydown', event => this.onKey(event));
    this.foldAll.addEventListener('click', () => this.state.fold(this.blocks, !this.allFolded));
    this.differences.addEventListener('click', () => this.state.showDifferences(!this.state.differencesOnly));
    this.differences.textContent = 'Differences';
    for (const button of [this.foldAll, this.differences]) {
      button.type = 'button';
      button.className = 'nbc-tool';
    }
    this.element.append(this.list, this.differences, this.foldAll);
    // JupyterLab's own shortcuts (arrows move between cells, Enter edits) do not apply to what has the focus here.
    this.element.dataset.lmSuppressShortcuts = 'true';
  }

  /** Bring the bar up to date. `blocks`: the keys of the row's blocks; `comparable`: they can be compared here. */
  show(page: IPage, blocks: readonly string[], comparable: boolean): void {
    this.blocks = blocks;
    const wanted = [null, ...page.nodes];
    const selected = page.nodes.some(node => node.name === this.state.selected) ? this.state.selected : null;
    wanted.forEach((node, place) => {
      const tab = this.tabOf(node);
      if (this.list.children[place] !== tab) {
        this.list.insertBefore(tab, this.list.children[place] ?? null);
      }
      const isOpen = (node?.name ?? null) === selected;
      tab.setAttribute('aria-selected', String(isOpen));
      tab.tabIndex = isOpen ? 0 : -1;
      if (isOpen) {
        this.panel.setAttribute('aria-labelledby', tab.id);
      }
    });
    while (this.list.children.length > wanted.length) {
      this.list.lastElementChild?.remove();
    }
    this.foldAll.textContent = this.allFolded ? 'Unfold all' : 'Fold all';
    this.foldAll.hidden = selected !== null;
    this.differences.hidden = selected !== null || page.blocks < 2;
    this.differences.disabled = !comparable;
    this.differences.title = comparable ? 'Show only the lines that differ between nodes' : 'Too long to compare here';
    this.differences.setAttribute('aria-pressed', String(comparable && this.state.differencesOnly));
  }

  private get allFolded(): boolean {
    return this.blocks.length > 0 && this.blocks.every(block => this.state.isFolded(block));
  }

  private tabOf(node: INode | null): HTMLButtonElement {
    const name = node?.name ?? null;
    const known = this.tabs.get(name);
    if (known === undefined) {
      const made = this.makeTab(node);
      this.tabs.set(name, made);
      return made;
    }
    if (node !== null) {
      showState(known.firstElementChild as HTMLElement, node);
      known.title = spoken(node);
      known.setAttribute('aria-label', spoken(node));
    }
    return known;
  }

  private makeTab(node: INode | null): HTMLButtonElement {
    const tab = document.createElement('button');
    tab.type = 'button';
    tab.className = 'nbc-tab';
    tab.id = newId();
    tab.setAttribute('role', 'tab');
    tab.setAttribute('aria-controls', this.panel.id);
    tab.addEventListener('click', () => this.state.select(node?.name ?? null));
    if (node === null) {
      tab.textContent = ALL;
      return tab;
    }
    tab.dataset.node = node.name;
    tab.title = spoken(node);
    tab.setAttribute('aria-label', spoken(node));
    tab.append(stateMark(node), node.label);
    return tab;
  }

  private onKey(event: KeyboardEvent): void {
    const tabs = [...this.list.children] as HTMLElement[];
    const at = tabs.indexOf(document.activeElement as HTMLElement);
    const steps: Record<string, number> = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 };
    const wanted = steps[event.key];
    if (at < 0 || wanted === undefined || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    const tab = tabs[(wanted + tabs.length) % tabs.length];
    tab.click();
    tab.focus();
  }
}

function spoken(node: INode): string {
  return node.state ? `${node.label}: ${node.state}` : node.label;
}

let ids = 0;

/** An id that nothing else on the page has. */
export function newId(): string {
  ids++;
  return `nbc-element-${ids}`;
}
