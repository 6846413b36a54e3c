/** One colour per rank, the same as `notebook_cluster/widgets/formatting.py` gives. */

const PALETTE = [
  '#2f81f7',
  '#e8853d',
  '#2da876',
  '#c75bb0',
  '#c9a227',
  '#35a7c2',
  '#d9534f',
  '#8f7ae5',
  '#7f9a3b',
  '#a9746e'
];
const NO_RANK = '#8b949e';

/** The colour of `rank`; grey for a node that has none. */
export function rankColour(rank: number | null): string {
  return rank === null ? NO_RANK : PALETTE[rank % PALETTE.length];
}
