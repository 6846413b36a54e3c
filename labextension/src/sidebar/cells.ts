/** The cells that stand for a cluster in a notebook. */

const ON_ALL = '%%on_all\n';

/** Sources of the cells that work with `cluster` in any notebook; without a name, with the one that the notebook has. */
export function cellsOf(cluster?: string): string[] {
  return cluster ? [`%load_ext notebook_cluster\n%cluster attach ${cluster}`, ON_ALL] : [ON_ALL];
}
