/** One block on the page: its title, which folds it, and its text. */

import type { INode } from './page';
import { patch, type IBlock } from './rebuild';
import { stateMark } from './stateMark';
import { newId } from './tabBar';

const LONG_ROWS = 40;
/** Text of more rows gets a scroll bar of its own, as in the HTML that other frontends show. */
const END_PIXELS = 4;

/** How a block is shown. */
export interface IAppearance {
  readonly folded: boolean;
  /** The only one of its row that is shown, because its node's tab is open: it cannot be folded. */
  readonly alone: boolean;
  /** Nodes whose states stand before the title. */
  readonly marks: readonly INode[];
  /** The text to show. */
  readonly content: DocumentFragment;
}

export class BlockView {
  readonly element = document.createElement('section');
  private readonly button = document.createElement('button');
  private readonly title = document.createElement('span');
  private readonly marks = document.createElement('span');
  private readonly count = document.createElement('span');
  private readonly body = document.createElement('div');
  private readonly text = document.createElement('pre');
  private atEnd = true;
  private top = 0;

  /** `onFold` is called when the title is clicked. */
  constructor(onFold: () => void) {
    this.element.className = 'nbc-block';
    this.button.className = 'nbc-fold';
    this.button.type = 'button';
    this.button.dataset.lmSuppressShortcuts = 'true';
    this.button.addEventListener('click', onFold);
    this.title.className = 'nbc-title';
    this.marks.className = 'nbc-marks';
    this.count.className = 'nbc-count';
    this.body.className = 'nbc-body';
    this.body.id = newId();
    this.button.setAttribute('aria-controls', this.body.id);
    this.body.addEventListener('scroll', () => this.onScroll());
    this.button.append(this.marks, this.title, this.count);
    this.body.append(this.text);
    this.element.append(this.button, this.body);
  }

  /** Bring the block up to date. */
  show(block: IBlock, appearance: IAppearance): void {
    const rows = (block.content.textContent ?? '').split('\n').length;
    this.element.style.setProperty('--nbc-colour', block.colour || 'var(--jp-border-color1)');
    this.title.textContent = block.title;
    this.button.title = block.names;
    this.count.textContent = appearance.folded ? `${rows} ${rows === 1 ? 'line' : 'lines'}` : '';
    this.button.disabled = appearance.alone;
    this.button.hidden = appearance.alone && block.names === '';
    this.button.setAttribute('aria-expanded', String(!appearance.folded));
    this.element.classList.toggle('nbc-mod-folded', appearance.folded);
    this.marks.replaceChildren(...appearance.marks.map(stateMark));
    this.body.hidden = appearance.folded;
    const long = (appearance.content.textContent ?? '').split('\n').length > LONG_ROWS;
    this.body.classList.toggle('nbc-mod-long', long);
    this.body.tabIndex = long ? 0 : -1;
    this.lookAtScroll();
    patch(this.text, appearance.content);
    this.settle();
  }

  /** Scroll to where the reader was: at the end, unless they scrolled up. */
  settle(): void {
    if (this.body.classList.contains('nbc-mod-long')) {
      this.body.scrollTop = this.atEnd ? this.body.scrollHeight : this.top;
      this.onScroll();
    }
  }

  /** What the reader scrolled since, if its event is still to come. A body that was hidden begins at 0. */
  private lookAtScroll(): void {
    const { scrollTop } = this.body;
    if (scrollTop !== 0 && scrollTop !== this.top) {
      this.onScroll();
    }
  }

  private onScroll(): void {
    const { scrollTop, clientHeight, scrollHeight } = this.body;
    if (clientHeight > 0) {
      this.top = scrollTop;
      this.atEnd = scrollTop + clientHeight >= scrollHeight - END_PIXELS;
    }
  }
}
