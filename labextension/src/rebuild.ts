/**
 * The text/html that `notebook_cluster/magics/display/folding.py` makes, built again from the few elements it consists of.
 *
 * It is parsed in a document of its own, where nothing is loaded and nothing runs; what is copied from there is text,
 * checked colours, bold, italic and underlined. So a hostile notebook shows its text and does nothing.
 */

const COLOUR = /^(#[0-9a-f]{3,8}|rgba?\([\d.,%\s/]{1,40}\))$/i;
const SWITCHES: readonly (readonly [string, string])[] = [
  ['font-weight', 'bold'],
  ['font-style', 'italic'],
  ['text-decoration', 'underline']
];

/** One block: the text that some nodes have in common. */
export interface IBlock {
  /** `all 6 nodes`, `mini · rank 1` or `5 of 6 nodes: air, desk, ...` */
  readonly title: string;
  /** The labels of its nodes, for a tooltip; empty where it is one node. */
  readonly names: string;
  /** The node's colour; empty for several nodes. */
  readonly colour: string;
  /** Text, and `span` and `mark` elements that hold text. */
  readonly content: DocumentFragment;
}

/** The blocks in `html`, or null where it is not made of blocks. */
export function readBlocks(html: string): IBlock[] | null {
  const parsed = new DOMParser().parseFromString(html, 'text/html');
  const blocks: IBlock[] = [];
  for (const frame of parsed.body.children) {
    const title = frame.firstElementChild;
    const text = frame.querySelector('pre');
    if (!(frame instanceof HTMLElement) || title === null || text === null || title.contains(text)) {
      return null;
    }
    blocks.push({
      title: (title.textContent ?? '').trim(),
      names: title.getAttribute('title') ?? '',
      colour: colourOf(frame, 'border-left-color'),
      content: rebuilt(text)
    });
  }
  return blocks.length > 0 ? blocks : null;
}

function rebuilt(source: Node): DocumentFragment {
  const fragment = document.createDocumentFragment();
  for (const child of source.childNodes) {
    if (child instanceof Text) {
      fragment.append(document.createTextNode(child.data));
    } else if (child.nodeName === 'MARK') {
      const mark = document.createElement('mark');
      mark.className = 'nbc-mark';
      mark.append(rebuilt(child));
      fragment.append(mark);
    } else if (child.nodeName === 'SPAN') {
      fragment.append(coloured(child as HTMLElement));
    } else if (child instanceof Element && !['SCRIPT', 'STYLE', 'TEMPLATE'].includes(child.nodeName)) {
      fragment.append(document.createTextNode(child.textContent ?? ''));
    }
  }
  return fragment;
}

function coloured(source: HTMLElement): HTMLSpanElement {
  const span = document.createElement('span');
  for (const property of ['color', 'background-color']) {
    const colour = colourOf(source, property);
    if (colour) {
      span.style.setProperty(property, colour);
    }
  }
  for (const [property, value] of SWITCHES) {
    if (source.style.getPropertyValue(property) === value) {
      span.style.setProperty(property, value);
    }
  }
  span.append(rebuilt(source));
  return span;
}

function colourOf(element: HTMLElement, property: string): string {
  const value = element.style.getPropertyValue(property);
  return COLOUR.test(value) ? value : '';
}

/**
 * Make the children of `target` those of `source`, leaving alone what is the same: text that only grew keeps the
 * reader's selection and scroll position.
 */
export function patch(target: Node, source: DocumentFragment): void {
  let old = target.firstChild;
  for (const fresh of [...source.childNodes]) {
    if (old === null) {
      target.appendChild(fresh);
      continue;
    }
    const next: ChildNode | null = old.nextSibling;
    if (old instanceof Text && fresh instanceof Text) {
      changeText(old, fresh.data);
    } else if (!old.isEqualNode(fresh)) {
      target.replaceChild(fresh, old);
    }
    old = next;
  }
  while (old !== null) {
    const next: ChildNode | null = old.nextSibling;
    target.removeChild(old);
    old = next;
  }
}

function changeText(node: Text, data: string): void {
  if (data.startsWith(node.data)) {
    if (data.length > node.data.length) {
      node.appendData(data.slice(node.data.length));
    }
  } else {
    node.data = data;
  }
}
