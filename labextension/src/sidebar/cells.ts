/** The cells that stand for a cluster in a notebook. */

const LOAD = '%load_ext notebook_cluster\n';
export const ON_ALL = '%%on_all\n';

/** Sources of the cells that work with `cluster` in any notebook; without a name, with the one that the notebook has. */
export function cellsOf(cluster?: string): string[] {
  return cluster ? [`${LOAD}%cluster attach ${cluster}`, ON_ALL] : [ON_ALL];
}

/** Opens the class page of `cluster`, or of the cluster that the notebook has or then starts; `loaded`: it has our magics. */
export function classCell(cluster = '', loaded = false): string {
  return `${loaded ? '' : LOAD}%cluster class start ${cluster}`.trimEnd();
}

/** Of a new notebook: the first starts its cluster, in the second one writes what all machines are to run. */
export const STARTING_CELLS: readonly string[] = [`${LOAD}%cluster start`, ON_ALL];
