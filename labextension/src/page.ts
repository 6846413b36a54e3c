/**
 * What `notebook_cluster/magics/display/folding.py` says about a display: which nodes wrote the blocks of text in it.
 *
 * The text itself is in the same bundle as text/html. A saved notebook may come from anybody, so nothing here is
 * taken for granted.
 */

export const MIME_TYPE = 'application/vnd.notebook-cluster.output+json';

const STATES = ['queued', 'replaying', 'running', 'ok', 'error', 'interrupted', 'lost', 'cancelled'] as const;
const MOST_NODES = 2000;
const MOST_NAME_CHARACTERS = 200;

/** What a node does in this cell; empty when that is not known. */
export type State = (typeof STATES)[number] | '';

/** A node that wrote text in this row. */
export interface INode {
  readonly name: string;
  /** `mini · rank 1` */
  readonly label: string;
  readonly state: State;
  /** Which block of the row holds its text. */
  readonly block: number;
}

/** The texts of all nodes at one place of a cell are a row; a row that is too long for one display has several pages. */
export interface IPage {
  /** The same for all displays of a cell. */
  readonly cell: string;
  readonly row: number;
  readonly page: number;
  /** The first block on this page, counted over the row. */
  readonly first: number;
  /** Blocks on this page. */
  readonly count: number;
  /** All nodes of the row, in rank order. */
  readonly nodes: readonly INode[];
  /** Blocks in the row. */
  readonly blocks: number;
}

/** `value` as a page, or null where it is not one. */
export function readPage(value: unknown): IPage | null {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    return null;
  }
  const data = value as Record<string, unknown>;
  const { version, cell, row, page, first, count } = data;
  if (version !== 1 || !isName(cell) || ![row, page, first, count].every(isCount)) {
    return null;
  }
  const nodes = readNodes(data);
  if (nodes === null) {
    return null;
  }
  const blocks = Math.max(...nodes.map(node => node.block)) + 1;
  const [start, size] = [first as number, count as number];
  if (start + size > blocks) {
    return null;
  }
  return { cell, row: row as number, page: page as number, first: start, count: size, nodes, blocks };
}

function readNodes(data: Record<string, unknown>): INode[] | null {
  const { names, ranks, states, blocks } = data;
  const lists = [names, ranks, states, blocks];
  if (!lists.every(Array.isArray)) {
    return null;
  }
  const [nameList, rankList, stateList, blockList] = lists as unknown[][];
  const size = nameList.length;
  if (size < 1 || size > MOST_NODES || [rankList, stateList, blockList].some(list => list.length !== size)) {
    return null;
  }
  const nodes: INode[] = [];
  for (let index = 0; index < size; index++) {
    const [name, rank, block] = [nameList[index], rankList[index], blockList[index]];
    if (!isName(name) || !(rank === null || isCount(rank)) || !isCount(block) || block >= size) {
      return null;
    }
    const state = STATES.find(known => known === stateList[index]) ?? '';
    nodes.push({ name, label: rank === null ? name : `${name} · rank ${rank}`, state, block });
  }
  return new Set(nameList).size === size ? nodes : null;
}

function isName(value: unknown): value is string {
  return typeof value === 'string' && value.length > 0 && value.length <= MOST_NAME_CHARACTERS;
}

function isCount(value: unknown): value is number {
  return typeof value === 'number' && Number.isInteger(value) && value >= 0 && value < 1_000_000;
}
