import type { INode, State } from './page';

const GLYPHS: Record<State, string> = {
  queued: '○',
  replaying: '◔',
  running: '◐',
  ok: '●',
  error: '✖',
  interrupted: '■',
  lost: '✖',
  cancelled: '○',
  '': '·'
};

/** A coloured sign for what `node` does: a shape for each meaning, so that colour is not all there is. */
export function stateMark(node: INode): HTMLSpanElement {
  const mark = document.createElement('span');
  showState(mark, node);
  mark.setAttribute('aria-hidden', 'true');
  return mark;
}

/** Bring `mark` up to date. */
export function showState(mark: HTMLElement, node: INode): void {
  mark.className = 'nbc-state';
  mark.dataset.state = node.state;
  mark.textContent = GLYPHS[node.state];
}
