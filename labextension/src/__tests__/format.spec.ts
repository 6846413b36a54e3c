import { ABSENT, ago, byteCount, clock, duration, number, percent } from '../sidebar/format';
import * as shown from './shown.json';

/** The moment of these pieces of local time, in seconds since 1970. */
function moment([year, month, day, hour, minute, second]: number[]): number {
  return new Date(year, month - 1, day, hour, minute, second).getTime() / 1000;
}

it('writes the moments of the examples, with the date where the day is another one', () => {
  for (const [at, today, text] of shown.clock as [number[], number[], string][]) {
    expect(clock(moment(at), moment(today))).toBe(text);
  }
  expect(clock(Date.now() / 1000)).toMatch(/^\d\d:\d\d:\d\d$/);
});

it('has a dash for what is no moment', () => {
  for (const broken of [...shown.no_clock, null, NaN, Infinity]) {
    expect(clock(broken)).toBe(ABSENT);
  }
});

it.each([
  ['duration', duration],
  ['ago', ago],
  ['number', number],
  ['percent', percent],
  ['bytes', byteCount]
] as const)('writes the examples of %s', (name, write) => {
  const examples = shown[name] as [number, string][];
  expect(examples.map(([value]) => write(value))).toEqual(examples.map(([, text]) => text));
});
