/** Buttons that save a chart of the dashboard: the picture as SVG, its points, as they came, as CSV. */

import * as React from 'react';

import { Across, ILine, IRange, pathOf } from './sparkline';

const WIDTH = 760;
const HEIGHT = 260;
const LEFT = 12;
const TOP = 34;
const LINE = 18;
/** In the dashboard it has the colour of text, which a file does not know. */
const GLOBAL = '#c9508a';

/** A chart as it is drawn, and the lines of which it was made. */
export interface ISaved {
  readonly name: string;
  readonly title: string;
  readonly lines: readonly ILine[];
  readonly measured: () => readonly ILine[];
  readonly range: IRange;
  readonly across: Across;
  readonly format: (value: number) => string;
  readonly dashes: readonly (string | undefined)[];
}

/** Two buttons for `chart`. */
export function Save({ chart }: { chart: ISaved }): React.JSX.Element {
  const button = (kind: string, press: () => void): React.JSX.Element => (
    <button type="button" className="nbc-side-button" aria-label={`Save ${chart.name} as ${kind}`} onClick={press}>
      {kind}
    </button>
  );
  return (
    <span className="nbc-dash-saves">
      {button('SVG', () => save(`${chart.name}.svg`, 'image/svg+xml', svgOf(chart)))}
      {button('CSV', () => save(`${chart.name}.csv`, 'text/csv', csvOf(chart.measured())))}
    </span>
  );
}

/** A row for each point of `lines`; what is no number is empty. */
export function csvOf(lines: readonly ILine[]): string {
  const rows = lines.flatMap(({ name, points }) =>
    points.map(({ step, time, value }) => `${cell(name)},${step},${time.toFixed(3)},${value ?? ''}`)
  );
  return ['line,step,time,value', ...rows, ''].join('\n');
}

/** What begins like a formula gets an apostrophe, as `client/curve_rows.py` does it: names come from other machines. */
function cell(text: string): string {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

/** The chart as a file of its own, with title, least and greatest value and the names of its lines. */
export function svgOf({ title, lines, range, across, format, dashes }: ISaved): string {
  const bottom = TOP + HEIGHT;
  const grid = [TOP, TOP + HEIGHT / 2, bottom].map(y => `M${LEFT} ${y}h${WIDTH}`).join('');
  const drawn = lines.map(line => {
    const dash = dashes[(line.dash ?? 0) % dashes.length];
    return (
      `<path d="${escaped(pathOf(line.points, range, WIDTH, HEIGHT, across))}" stroke="${colourOf(line)}"` +
      `${line.faint ? ' stroke-opacity="0.3"' : ''}${dash ? ` stroke-dasharray="${dash}"` : ''}/>`
    );
  });
  const legend = lines.map((line, index) => {
    const y = bottom + LINE * (index + 2);
    const rule = `<path d="M${LEFT} ${y - 4}h14" stroke="${colourOf(line)}" stroke-width="3"/>`;
    return `${rule}<text x="${LEFT + 20}" y="${y}">${escaped(line.name)}</text>`;
  });
  const height = bottom + LINE * (lines.length + 3);
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH + 2 * LEFT}" height="${height}" font-family="sans-serif" font-size="12">`,
    `<rect width="100%" height="100%" fill="#ffffff"/>`,
    `<text x="${LEFT}" y="20" font-weight="bold">${escaped(title)}</text>`,
    `<g fill="none" stroke-width="1.5" stroke-linejoin="round"><path d="${grid}" stroke="#d8dee4" stroke-width="1"/>`,
    `<g transform="translate(${LEFT} ${TOP})">${drawn.join('')}</g></g>`,
    `<text x="${LEFT + WIDTH}" y="${TOP - 4}" text-anchor="end">${escaped(format(range.high))}</text>`,
    `<text x="${LEFT + WIDTH}" y="${bottom + 14}" text-anchor="end">${escaped(format(range.low))}</text>`,
    ...legend,
    '</svg>\n'
  ].join('\n');
}

function colourOf(line: ILine): string {
  return /^#[0-9a-f]{6}$/i.test(line.colour) ? line.colour : GLOBAL;
}

function escaped(text: string): string {
  return text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;').replace(/"/g, '&quot;');
}

/** Have the browser save `text` as a file; of its name only what every file system takes. */
function save(name: string, type: string, text: string): void {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement('a');
  link.href = address;
  link.download = name.replace(/[^\w .-]/g, '_');
  link.click();
  URL.revokeObjectURL(address);
}
