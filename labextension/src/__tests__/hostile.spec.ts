import { MIME_TYPE } from '../page';
import type { OutputRenderer } from '../renderer';
import { all, attached, bundle, framed, newCell, seen, show, two } from './bundles';

let renderer: OutputRenderer;

beforeEach(() => {
  renderer = attached();
});

afterEach(() => renderer.dispose());

const ALLOWED = ['BUTTON', 'DIV', 'MARK', 'PRE', 'SECTION', 'SPAN'];

function elements(): HTMLElement[] {
  return all(renderer, '*');
}

it.each([
  '<img src=x onerror="window.hacked = 1">',
  '<script>window.hacked = 1</script>',
  '<svg onload="window.hacked = 1"><script>window.hacked = 1</script></svg>',
  '<iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>',
  '<a href="javascript:window.hacked = 1">click</a>',
  '<math><mtext><table><mglyph><style><img src=x onerror="window.hacked = 1">',
  '<template><img src=x onerror="window.hacked = 1"></template>',
  '<style>* { display: none }</style>',
  '<form action="https://example.com"><input name=q><button formaction=javascript:alert(1)>x</button></form>',
  '<object data="x"></object><embed src="x"><link rel=stylesheet href="https://example.com/x.css">',
  '<span onclick="window.hacked = 1" style="color:red">text</span>',
  '<mark onmouseover="window.hacked = 1"><img src=x onerror="window.hacked = 1"></mark>'
])('builds nothing but text from %s', async evil => {
  await show(renderer, two(newCell(), `before ${evil} after`, 'b'), false);
  for (const element of elements()) {
    expect(ALLOWED).toContain(element.nodeName);
    expect(element.getAttributeNames().filter(name => name.startsWith('on') || /src|href|action/.test(name))).toEqual(
      []
    );
  }
  expect((window as any).hacked).toBeUndefined();
});

it('shows names and titles as text', async () => {
  const evil = '<img src=x onerror=alert(1)>';
  const data = bundle(
    newCell(),
    [
      { name: evil, block: 0 },
      { name: 'desk', block: 1 }
    ],
    ['a', 'b']
  );
  data['text/html'] = framed(evil.replace(/</g, '&lt;'), 'a') + framed('desk', 'b');
  await show(renderer, data, false);
  expect(all(renderer, 'img')).toEqual([]);
  expect(all(renderer, '[role=tab]')[1].textContent).toContain(evil);
  expect(all(renderer, '.nbc-title')[0].textContent).toBe(evil);
});

it.each([
  ['color:url(https://example.com)', ''],
  ['color:expression(alert(1))', ''],
  ['color:var(--x)', ''],
  ['position:fixed;top:0;color:#e75c58', 'color: rgb(231, 92, 88);'],
  ['background-image:url(https://example.com/x.png)', ''],
  [
    'color:rgb(1,2,3);font-weight:bold;text-decoration:underline',
    'color: rgb(1, 2, 3); font-weight: bold; text-decoration: underline;'
  ],
  ['font-style:italic;background-color:#00a250', 'background-color: rgb(0, 162, 80); font-style: italic;']
])('takes of the style %s only %s', async (style, kept) => {
  await show(renderer, two(newCell(), `<span style="${style}">x</span>`, 'b'), false);
  expect(all(renderer, 'pre span')[0].getAttribute('style') ?? '').toBe(kept);
});

it('takes a colour for the frame and nothing else', async () => {
  const data = two(newCell(), 'a', 'b');
  data['text/html'] = framed('mini', 'a', '', 'red;position:fixed;left:0') + framed('desk', 'b', '', '#2da876');
  await show(renderer, data, false);
  expect(all(renderer, '.nbc-block').map(block => block.getAttribute('style'))).toEqual([
    '--nbc-colour: var(--jp-border-color1);',
    '--nbc-colour: rgb(45, 168, 118);'
  ]);
});

describe('what is not a page of ours is shown as plain text', () => {
  const good = two('nbc-x', 'a', 'b')[MIME_TYPE];
  it.each([
    ['nothing', undefined],
    ['null', null],
    ['a number', 7],
    ['a list', []],
    ['an empty object', {}],
    ['another version', { ...good, version: 2 }],
    ['no cell', { ...good, cell: '' }],
    ['a cell that is not text', { ...good, cell: ['x'] }],
    ['a negative row', { ...good, row: -1 }],
    ['half a page', { ...good, page: 0.5 }],
    ['no nodes', { ...good, names: [], ranks: [], states: [], blocks: [] }],
    ['lists of different lengths', { ...good, ranks: [0] }],
    ['a name that is not text', { ...good, names: ['mini', { toString: 1 }] }],
    ['a name twice', { ...good, names: ['mini', 'mini'] }],
    ['an endless name', { ...good, names: ['mini', 'x'.repeat(1000)] }],
    ['a rank that is not a number', { ...good, ranks: [0, '1'] }],
    ['a block that is not there', { ...good, blocks: [0, 5] }],
    ['a huge block', { ...good, blocks: [0, 1e9] }],
    ['more blocks than nodes', { ...good, first: 1, count: 2 }],
    ['other blocks than the HTML', { ...good, count: 1 }],
    ['too many nodes', { ...good, names: Array.from({ length: 9999 }, (_, n) => `n${n}`) }]
  ])('%s', async (_, page) => {
    await show(renderer, { ...two('nbc-x', 'a', 'b'), [MIME_TYPE]: page, 'text/plain': 'plain <b>text</b>' }, false);
    expect(renderer.node.innerHTML).toBe('<pre>plain &lt;b&gt;text&lt;/b&gt;</pre>');
  });

  it.each([
    ['no HTML', undefined],
    ['HTML that is not text', 5],
    ['HTML of another kind', '<h1>hello</h1><p>x</p>'],
    ['HTML without blocks', 'text'],
    ['a block without text', '<div><div>mini</div></div><div><div>desk</div></div>'],
    ['a title around the text', '<div><div><pre>a</pre></div></div>'.repeat(2)]
  ])('%s', async (_, html) => {
    await show(renderer, { ...two(newCell(), 'a', 'b'), 'text/html': html, 'text/plain': ['x\n', 'y'] }, false);
    expect(renderer.node.innerHTML).toBe('<pre>x\ny</pre>');
  });

  it('and shows tabs again when it becomes one', async () => {
    const cell = newCell();
    await show(renderer, two(cell, 'a', 'b'));
    await show(renderer, { 'text/plain': '' });
    expect(renderer.node.textContent).toBe('');
    await show(renderer, two(cell, 'c', 'd'));
    expect(seen(renderer)).toEqual(['c', 'd']);
    expect(all(renderer, '[role=tab]').length).toBe(3);
  });
});

it('shows an unknown state as none', async () => {
  await show(renderer, two(newCell(), 'a', 'b', 'constructor'));
  expect(all(renderer, '.nbc-state').map(mark => mark.dataset.state)).toEqual(['', '']);
});
