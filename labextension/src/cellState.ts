/**
 * What the reader chose for the output of one cell: the tab, the folded blocks, differences only. All displays of a
 * cell share it, and it stays when JupyterLab replaces a display.
 */

const MOST_CELLS = 500;

/** Called when something was chosen in any display of the cell. */
export type Listener = () => void;

export class CellState {
  /** The name of the node whose tab is open; null for all nodes. */
  selected: string | null = null;
  differencesOnly = false;
  private readonly folded = new Set<string>();
  private readonly listeners = new Set<Listener>();

  isFolded(block: string): boolean {
    return this.folded.has(block);
  }

  fold(blocks: readonly string[], folded: boolean): void {
    blocks.forEach(block => (folded ? this.folded.add(block) : this.folded.delete(block)));
    this.changed();
  }

  select(node: string | null): void {
    this.selected = node;
    this.changed();
  }

  showDifferences(only: boolean): void {
    this.differencesOnly = only;
    this.changed();
  }

  listen(listener: Listener): void {
    this.listeners.add(listener);
  }

  ignore(listener: Listener): void {
    this.listeners.delete(listener);
  }

  private changed(): void {
    [...this.listeners].forEach(listener => listener());
  }

  get isShown(): boolean {
    return this.listeners.size > 0;
  }
}

const cells = new Map<string, CellState>();

/** The state of `cell`; made when it is asked for first. Of cells that are not shown only the newest are remembered. */
export function stateOf(cell: string): CellState {
  const found = cells.get(cell) ?? new CellState();
  cells.delete(cell);
  cells.set(cell, found);
  if (cells.size > MOST_CELLS) {
    const forgotten = [...cells].find(([name, state]) => name !== cell && !state.isShown);
    if (forgotten !== undefined) {
      cells.delete(forgotten[0]);
    }
  }
  return found;
}
