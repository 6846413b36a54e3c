import { alikeRows, onlyDifferences, splitRows } from '../differences';

function content(html: string): DocumentFragment {
  const template = document.createElement('template');
  template.innerHTML = html;
  return document.importNode(template.content, true);
}

function html(fragment: DocumentFragment): string {
  const holder = document.createElement('div');
  holder.append(fragment);
  return holder.innerHTML;
}

describe('alikeRows', () => {
  it.each([
    ['', '', []],
    ['abc', 'abc', [0, 1, 2]],
    ['axc', 'abc', [0, -1, 2]],
    ['abc', 'xbcy', [-1, 1, 2]],
    ['abcabba', 'cbabac', [-1, 1, 2, -1, 3, -1, 4]],
    ['abc', '', [-1, -1, -1]]
  ])('of %s and %s', (one, other, expected) => {
    const found = alikeRows([...one], [...other]);
    expect(found.filter(row => row >= 0).length).toBe(expected.filter(row => row >= 0).length);
    found.forEach((row, place) => row >= 0 && expect(other[row]).toBe(one[place]));
    const alike = found.filter(row => row >= 0);
    expect(alike).toEqual([...alike].sort((a, b) => a - b));
  });

  it('compares only the beginning and the end of very long texts', () => {
    const rows = (word: string): string[] => Array.from({ length: 3000 }, (_, row) => `${word} ${row}`);
    const found = alikeRows(['first', ...rows('a'), 'last'], ['first', ...rows('b'), 'last']);
    expect(found.filter(row => row >= 0)).toEqual([0, 3001]);
  });
});

it('cuts coloured text at its newlines', () => {
  const rows = splitRows(content('a<span style="color: red;">b\nc<mark>d\n</mark></span>e'));
  expect(rows.map(html)).toEqual([
    'a<span style="color: red;">b</span>',
    '<span style="color: red;">c<mark>d</mark></span>',
    '<span style="color: red;"><mark></mark></span>e'
  ]);
});

describe('onlyDifferences', () => {
  it('leaves out of each block what it has in common with the first', () => {
    const shown = onlyDifferences(['a\nb\nc', 'a\nx\nc', 'a\nb\ny'].map(content)).map(html);
    const alike = (lines: string): string => `<span class="nbc-alike">··· ${lines} alike ···</span>`;
    expect(shown).toEqual([
      `${alike('1 line')}\nb\nc`,
      `${alike('1 line')}\n<mark class="nbc-mark">x</mark>\n${alike('1 line')}`,
      `${alike('2 lines')}\n<mark class="nbc-mark">y</mark>`
    ]);
  });

  it('keeps colours and marks of rows that differ', () => {
    const row = '<span style="color: red;">one</span> <mark class="nbc-mark">two</mark>';
    expect(html(onlyDifferences([content('a'), content(row)])[1])).toBe(row);
  });

  it('marks no words in rows that were put in', () => {
    expect(html(onlyDifferences([content('a\nc'), content('a\nb1\nb2\nc')])[1])).toContain('\nb1\nb2\n');
  });
});
