/** One colour per node, the same as `notebook_cluster/widgets/formatting.py` gives. */
import type { NodeView } from '../generated';

const PALETTE = [
  '#2f81f7',
  '#e8853d',
  '#2da876',
  '#8f7ae5',
  '#c9a227',
  '#35a7c2',
  '#d9534f',
  '#7f9a3b',
  '#a9746e',
  '#5a7d9a',
  '#28b428',
  '#9852ec',
  '#7c7c52',
  '#ec28ec',
  '#448a7c',
  '#b48ac2',
  '#ec2828',
  '#52a6ec',
  '#ec6ede',
  '#ec286e'
];

/** The colour of a node: it goes by its place, so that it stays the same when others go. */
export function nodeColour({ place, rank }: Pick<NodeView, 'place' | 'rank'>): string {
  const number = place ?? rank;
  return number === null ? '#8b949e' : PALETTE[number % PALETTE.length];
}
