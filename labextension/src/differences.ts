/** Which rows of two texts are alike, and a text that shows only the others. */

const MOST_COMPARED = 1_000_000;
const MOST_WORDS = 400;
const WORDS = /\s+|[\w.+-]+|[^\w\s]/gu;

/** For each row of `one` the row of `other` that it is alike with, or -1: a longest common subsequence. */
export function alikeRows(one: readonly string[], other: readonly string[]): number[] {
  const found = new Array<number>(one.length).fill(-1);
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) {
    found[start] = start;
    start++;
  }
  let [end, otherEnd] = [one.length, other.length];
  while (end > start && otherEnd > start && one[end - 1] === other[otherEnd - 1]) {
    end--;
    otherEnd--;
    found[end] = otherEnd;
  }
  const [rows, columns] = [end - start, otherEnd - start];
  if (rows * columns > MOST_COMPARED) {
    return found; // too long for a table: everything between the common beginning and end counts as different
  }
  const lengths = commonLengths(one.slice(start, end), other.slice(start, otherEnd));
  for (let row = 0, column = 0; row < rows && column < columns;) {
    if (one[start + row] === other[start + column]) {
      found[start + row] = start + column;
      row++;
      column++;
    } else if (lengths[(row + 1) * (columns + 1) + column] >= lengths[row * (columns + 1) + column + 1]) {
      row++;
    } else {
      column++;
    }
  }
  return found;
}

/** At row * (columns + 1) + column: how many elements from there on are common. */
function commonLengths(one: readonly string[], other: readonly string[]): Uint32Array {
  const width = other.length + 1;
  const lengths = new Uint32Array((one.length + 1) * width);
  for (let row = one.length - 1; row >= 0; row--) {
    for (let column = other.length - 1; column >= 0; column--) {
      const at = row * width + column;
      lengths[at] =
        one[row] === other[column] ? lengths[at + width + 1] + 1 : Math.max(lengths[at + width], lengths[at + 1]);
    }
  }
  return lengths;
}

/** `content` cut at its newlines; a coloured stretch over several rows is in each of them. */
export function splitRows(content: DocumentFragment): DocumentFragment[] {
  const rows = [document.createDocumentFragment()];
  for (const child of content.childNodes) {
    const parts = child instanceof Element ? splitElement(child) : splitText(child.textContent ?? '');
    rows[rows.length - 1].append(parts[0]);
    for (const part of parts.slice(1)) {
      const row = document.createDocumentFragment();
      row.append(part);
      rows.push(row);
    }
  }
  return rows;
}

function splitElement(element: Element): Node[] {
  const inner = document.createDocumentFragment();
  inner.append(...[...element.childNodes].map(child => child.cloneNode(true)));
  return splitRows(inner).map(row => {
    const part = element.cloneNode(false);
    part.appendChild(row);
    return part;
  });
}

function splitText(text: string): Node[] {
  return text.split('\n').map(part => document.createTextNode(part));
}

/** For each block its text without the rows that all blocks have in common. The first block is what others differ from. */
export function onlyDifferences(contents: readonly DocumentFragment[]): DocumentFragment[] {
  const rows = contents.map(splitRows);
  const texts = rows.map(block => block.map(row => row.textContent ?? ''));
  const [reference, ...others] = texts;
  const matches = others.map(text => alikeRows(text, reference));
  const matched = matches.map(match => new Set(match));
  const shown = [shorten(rows[0], row => matched.every(match => match.has(row)))];
  matches.forEach((match, index) => {
    const block = rows[index + 1];
    for (const [row, of] of pairs(match, reference.length)) {
      if (block[row].querySelector('*') === null) {
        block[row] = marked(texts[index + 1][row], reference[of]);
      }
    }
    shown.push(shorten(block, row => match[row] >= 0));
  });
  return shown;
}

/** Rows that differ and stand at the same place between rows that are alike. */
function pairs(match: readonly number[], length: number): [number, number][] {
  const found: [number, number][] = [];
  let [row, of] = [0, 0];
  while (row < match.length) {
    let [end, ofEnd] = [row, of];
    while (end < match.length && match[end] < 0) {
      end++;
    }
    ofEnd = end < match.length ? match[end] : length;
    if (end - row === ofEnd - of) {
      for (let step = 0; row + step < end; step++) {
        found.push([row + step, of + step]);
      }
    }
    [row, of] = [end + 1, ofEnd + 1];
  }
  return found;
}

/** `text` with the words marked that `other` has not at that place. */
function marked(text: string, other: string): DocumentFragment {
  const row = document.createDocumentFragment();
  const [words, others] = [text.match(WORDS) ?? [], other.match(WORDS) ?? []];
  if (words.length > MOST_WORDS || others.length > MOST_WORDS) {
    row.append(text);
    return row;
  }
  const match = alikeRows(words, others);
  words.forEach((word, index) => {
    if (match[index] >= 0 || word.trim() === '') {
      row.append(word);
      return;
    }
    const mark = document.createElement('mark');
    mark.className = 'nbc-mark';
    mark.textContent = word;
    row.append(mark);
  });
  row.normalize();
  return row;
}

function shorten(rows: readonly DocumentFragment[], isAlike: (row: number) => boolean): DocumentFragment {
  const shown = document.createDocumentFragment();
  for (let row = 0; row < rows.length;) {
    let end = row;
    while (end < rows.length && isAlike(end)) {
      end++;
    }
    if (row > 0) {
      shown.append('\n');
    }
    if (end > row) {
      const note = document.createElement('span');
      note.className = 'nbc-alike';
      note.textContent = `··· ${end - row} ${end - row === 1 ? 'line' : 'lines'} alike ···`;
      shown.append(note);
      row = end;
    } else {
      shown.append(rows[row]);
      row++;
    }
  }
  shown.normalize();
  return shown;
}
