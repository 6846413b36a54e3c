import { MIME_TYPE } from '../page';
import type { OutputRenderer } from '../renderer';
import { all, attached, bundle, framed, newCell, seen, show, tab, two } from './bundles';

let renderer: OutputRenderer;
let cell: string;

beforeEach(() => {
  renderer = attached();
  cell = newCell();
});

afterEach(() => renderer.dispose());

/** Press a key where the focus is; true when it was taken, so that the page does not scroll too. */
function press(key: string, options: KeyboardEventInit = {}): boolean {
  const event = new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true, ...options });
  return !document.activeElement!.dispatchEvent(event);
}

function states(): (string | undefined)[] {
  return all(renderer, '.nbc-state').map(mark => mark.dataset.state);
}

describe('tabs', () => {
  it('has one for all nodes, which is open, and one for each node', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    expect(all(renderer, '[role=tab]').map(element => element.textContent)).toEqual([
      'All',
      '●mini · rank 0',
      '●desk · rank 1'
    ]);
    expect(tab(renderer, 'All').getAttribute('aria-selected')).toBe('true');
    expect(seen(renderer)).toEqual(['a', 'b']);
  });

  it('shows only the text of the node whose tab is clicked', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    tab(renderer, 'desk · rank 1').click();
    expect(seen(renderer)).toEqual(['b']);
    tab(renderer, 'All').click();
    expect(seen(renderer)).toEqual(['a', 'b']);
  });

  it('shows what several nodes wrote in the tab of each of them', async () => {
    const nodes = [0, 1, 0].map((block, place) => ({ name: `n${place}`, block }));
    await show(renderer, bundle(cell, nodes, ['same', 'other']));
    tab(renderer, 'n2 · rank 2').click();
    expect(seen(renderer)).toEqual(['same']);
    expect(all(renderer, '.nbc-block:not([hidden]) .nbc-title')[0].textContent).toBe('2 of 3 nodes: n0, n2');
  });

  it('has no tabs where all nodes wrote the same, but says how each of them is', async () => {
    const nodes = ['ok', 'error', 'running'].map((state, place) => ({ name: `n${place}`, state, block: 0 }));
    await show(renderer, bundle(cell, nodes, ['same']));
    expect(all(renderer, '[role=tab]')).toEqual([]);
    expect(states()).toEqual(['ok', 'error', 'running']);
  });

  it('says what a node does in words too', async () => {
    await show(renderer, two(cell, 'a', 'b', 'running'));
    expect(tab(renderer, 'mini · rank 0').getAttribute('aria-label')).toBe('mini · rank 0: running');
    await show(renderer, two(cell, 'a', 'b', 'lost'));
    expect(tab(renderer, 'mini · rank 0').getAttribute('aria-label')).toBe('mini · rank 0: lost');
    expect(states()).toEqual(['lost', 'lost']);
  });

  it('names its panel for screen readers', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    tab(renderer, 'mini · rank 0').click();
    const [panel] = all(renderer, '[role=tabpanel]');
    expect(tab(renderer, 'mini · rank 0').getAttribute('aria-controls')).toBe(panel.id);
    expect(panel.getAttribute('aria-labelledby')).toBe(tab(renderer, 'mini · rank 0').id);
  });
});

describe('keyboard', () => {
  it('moves through the tabs with arrows, Home and End, round at the ends', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    tab(renderer, 'All').focus();
    const visited = ['ArrowRight', 'ArrowRight', 'ArrowRight', 'ArrowLeft', 'Home', 'End'].map(key => {
      expect(press(key)).toBe(true);
      return document.activeElement!.textContent;
    });
    const [all, mini, desk] = ['All', '●mini · rank 0', '●desk · rank 1'];
    expect(visited).toEqual([mini, desk, all, desk, all, desk]);
    expect(seen(renderer)).toEqual(['b']);
  });

  it('has one tab in the order of the Tab key', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    tab(renderer, 'desk · rank 1').click();
    expect(all(renderer, '[role=tab]').map(element => element.tabIndex)).toEqual([-1, -1, 0]);
  });

  it('leaves keys with modifiers to JupyterLab, and keeps its own from it', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    tab(renderer, 'All').focus();
    expect(press('ArrowRight', { ctrlKey: true })).toBe(false);
    expect(document.activeElement).toBe(tab(renderer, 'All'));
    expect(document.activeElement!.closest('[data-lm-suppress-shortcuts]')).not.toBeNull();
  });
});

describe('folding', () => {
  it('folds one block and says how long it is', async () => {
    await show(renderer, two(cell, 'a\nb\nc', 'd'));
    const [fold] = all(renderer, '.nbc-fold');
    fold.click();
    expect(seen(renderer)).toEqual(['d']);
    expect(fold.getAttribute('aria-expanded')).toBe('false');
    expect(fold.textContent).toBe('mini3 lines');
  });

  it('folds all and unfolds all', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    const button = all(renderer, '.nbc-tool').find(element => element.textContent === 'Fold all')!;
    button.click();
    expect(seen(renderer)).toEqual([]);
    expect(button.textContent).toBe('Unfold all');
    button.click();
    expect(seen(renderer)).toEqual(['a', 'b']);
  });

  it("shows a folded block in its node's tab", async () => {
    await show(renderer, two(cell, 'a', 'b'));
    all(renderer, '.nbc-fold')[0].click();
    tab(renderer, 'mini · rank 0').click();
    expect(seen(renderer)).toEqual(['a']);
  });
});

describe('changes while a cell runs', () => {
  it('keeps the tab, the folds, the focus and the elements', async () => {
    await show(renderer, two(cell, 'one\n', 'eins\n', 'running'));
    all(renderer, '.nbc-fold')[1].click();
    tab(renderer, 'mini · rank 0').click();
    tab(renderer, 'mini · rank 0').focus();
    const text = all(renderer, 'pre')[0].firstChild;
    const focused = document.activeElement;
    await show(renderer, two(cell, 'one\ntwo\n', 'eins\nzwei\n'));
    expect(seen(renderer)).toEqual(['one\ntwo\n']);
    expect(all(renderer, 'pre')[0].firstChild).toBe(text);
    expect(document.activeElement).toBe(focused);
    tab(renderer, 'All').click();
    expect(seen(renderer)).toEqual(['one\ntwo\n']);
  });

  it('keeps what is selected in text that only grows', async () => {
    await show(renderer, two(cell, 'one <span style="color:#e75c58">red</span> two', 'b'));
    const text = all(renderer, 'pre')[0];
    document.getSelection()!.setBaseAndExtent(text.firstChild!, 0, text.lastChild!, 4);
    await show(renderer, two(cell, 'one <span style="color:#e75c58">red</span> two three', 'b'));
    expect(document.getSelection()!.toString()).toBe('one red two');
  });

  it('shows text that became shorter, or other', async () => {
    await show(renderer, two(cell, '<span style="color:#e75c58">50%</span> of it', 'b'));
    await show(renderer, two(cell, 'done', 'b'));
    expect(seen(renderer)).toEqual(['done', 'b']);
    expect(all(renderer, 'pre span')).toEqual([]);
  });

  it('gets tabs when nodes begin to differ and loses them when they agree again', async () => {
    const nodes = [0, 0].map((block, place) => ({ name: `n${place}`, block }));
    await show(renderer, bundle(cell, nodes, ['same']));
    await show(renderer, bundle(cell, [nodes[0], { ...nodes[1], block: 1 }], ['same 0', 'same 1']));
    expect(seen(renderer)).toEqual(['same 0', 'same 1']);
    expect(all(renderer, '[role=tab]').length).toBe(3);
    await show(renderer, bundle(cell, nodes, ['same']));
    expect(seen(renderer)).toEqual(['same']);
    expect(all(renderer, '[role=tab]').length).toBe(0);
  });

  it('keeps the open tab when nodes agree again', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    tab(renderer, 'desk · rank 1').click();
    const nodes = ['mini', 'desk'].map(name => ({ name, block: 0 }));
    await show(renderer, bundle(cell, nodes, ['same']));
    expect(tab(renderer, 'desk · rank 1').getAttribute('aria-selected')).toBe('true');
    expect(seen(renderer)).toEqual(['same']);
  });

  it('has a tab for a node that comes later, in rank order', async () => {
    const nodes = ['a', 'b', 'c'].map((name, block) => ({ name, block }));
    await show(renderer, bundle(cell, [nodes[0], { ...nodes[2], block: 1 }], ['1', '3']));
    await show(renderer, bundle(cell, nodes, ['1', '2', '3']));
    expect(all(renderer, '[role=tab]').map(element => element.dataset.node)).toEqual([undefined, 'a', 'b', 'c']);
    expect(seen(renderer)).toEqual(['1', '2', '3']);
  });
});

describe('several displays of one cell', () => {
  /** Two blocks, each on a page of its own. */
  function pages(): Record<string, any>[] {
    const whole = two(cell, 'a', 'b');
    return [0, 1].map(page => ({
      ...whole,
      [MIME_TYPE]: { ...whole[MIME_TYPE], page, first: page, count: 1 },
      'text/html': framed(['mini', 'desk'][page], ['a', 'b'][page])
    }));
  }

  it('has its tabs on the first page of a row, which choose for all pages', async () => {
    const second = attached();
    await show(renderer, pages()[0]);
    await show(second, pages()[1]);
    expect(all(second, '[role=tab]')).toEqual([]);
    tab(renderer, 'desk · rank 1').click();
    expect([seen(renderer), seen(second)]).toEqual([[], ['b']]);
    second.dispose();
  });

  it('is as it was when JupyterLab replaces a display', async () => {
    await show(renderer, two(cell, 'a', 'b'));
    tab(renderer, 'desk · rank 1').click();
    renderer.dispose();
    renderer = attached();
    await show(renderer, two(cell, 'a', 'b'));
    expect(seen(renderer)).toEqual(['b']);
  });

  it('says so where the chosen node printed nothing', async () => {
    const other = attached();
    await show(renderer, two(cell, 'a', 'b'));
    const nodes = ['mini', 'air'].map((name, block) => ({ name, block }));
    await show(other, bundle(cell, nodes, ['c', 'd']));
    tab(renderer, 'desk · rank 1').click();
    expect(seen(other)).toEqual([]);
    expect(all(other, '[role=tabpanel]')[0].dataset.silent).toBe('desk printed nothing here');
    tab(other, 'All').click();
    expect([seen(renderer), seen(other)]).toEqual([
      ['a', 'b'],
      ['c', 'd']
    ]);
    other.dispose();
  });

  it('does not mix cells', async () => {
    const other = attached();
    await show(renderer, two(cell, 'a', 'b'));
    await show(other, two(newCell(), 'c', 'd'));
    tab(renderer, 'desk · rank 1').click();
    expect(seen(other)).toEqual(['c', 'd']);
    other.dispose();
  });
});

describe('differences', () => {
  function toggle(): void {
    all(renderer, '.nbc-tool')
      .find(element => element.textContent === 'Differences')!
      .click();
  }

  it('shows only the lines that differ, with their words marked, and everything again', async () => {
    await show(renderer, two(cell, 'a\nb\nloss 0.5\nc', 'a\nb\nloss nan\nc'));
    toggle();
    const alike = (lines: string): string => `··· ${lines} alike ···`;
    expect(seen(renderer)).toEqual([
      `${alike('2 lines')}\nloss 0.5\n${alike('1 line')}`,
      `${alike('2 lines')}\nloss nan\n${alike('1 line')}`
    ]);
    expect(all(renderer, 'mark').map(mark => mark.textContent)).toEqual(['nan']);
    toggle();
    expect(seen(renderer)).toEqual(['a\nb\nloss 0.5\nc', 'a\nb\nloss nan\nc']);
    expect(all(renderer, 'mark')).toEqual([]);
  });

  it('goes on while text comes', async () => {
    await show(renderer, two(cell, 'a\nx', 'a\ny', 'running'));
    toggle();
    await show(renderer, two(cell, 'a\nx\nb', 'a\ny\nb'));
    expect(seen(renderer)[0]).toBe('··· 1 line alike ···\nx\n··· 1 line alike ···');
  });
});

describe('long text', () => {
  const long = Array.from({ length: 60 }, (_, row) => `row ${row}`).join('\n');

  it('has a scroll bar of its own that the keyboard reaches', async () => {
    await show(renderer, two(cell, long, 'b'));
    const [body, short] = all(renderer, '.nbc-body');
    expect(body.classList.contains('nbc-mod-long')).toBe(true);
    expect(body.tabIndex).toBe(0);
    expect(short.classList.contains('nbc-mod-long')).toBe(false);
  });

  it.each([
    ['', true],
    [', also when text comes before the page has said so', false]
  ])('stays where the reader scrolled to%s, and follows the end otherwise', async (_, said) => {
    await show(renderer, two(cell, long, long + '!', 'running'));
    const [read, followed] = all(renderer, '.nbc-body');
    for (const body of [read, followed]) {
      Object.defineProperty(body, 'scrollHeight', { value: 1000 });
      Object.defineProperty(body, 'clientHeight', { value: 400 });
    }
    read.scrollTop = 120;
    if (said) {
      read.dispatchEvent(new Event('scroll'));
    }
    await show(renderer, two(cell, long + '\nmore', long + '!\nmore'));
    expect([read.scrollTop, followed.scrollTop]).toEqual([120, 1000]);
  });
});
