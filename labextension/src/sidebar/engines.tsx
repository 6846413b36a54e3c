/** Where a new cluster gets its machines from: this one, or an engine with what it is to be told of its hosts. */

import * as React from 'react';

import type { EngineChoice, StartLaunch } from '../generated';
import { useOpened } from './folding';

/** In place of an engine's name: none. */
export const HERE = '';
const MOST_HOSTS = 1000;

interface IOption {
  readonly label: string;
  /** What is typed, or what is so without. */
  readonly example: string;
  /** It is a number from 1 to this. */
  readonly most?: number;
}

/** What can be said of hosts under "More": fields of StartLaunch. */
const OPTIONS = {
  gpus: { label: 'GPUs of each host', example: 'all', most: 64 },
  nodes_per_host: { label: 'Nodes on each host', example: '1 per GPU', most: 64 },
  time: { label: 'Time', example: '2:00:00' },
  partition: { label: 'Partition', example: "the engine's own" },
  setup: { label: 'Setup line', example: 'module load python' },
  address: { label: 'Address of this machine', example: 'all that it has' },
  folder: { label: 'Shared folder', example: 'in your home' }
} satisfies Partial<Record<keyof StartLaunch, IOption>>;
type Option = keyof typeof OPTIONS;

/** The fields as they were typed. What one engine is not asked for is kept for another one. */
export type Typed = Readonly<Record<Option | 'count' | 'names', string>>;
export const NOTHING_TYPED: Typed = {
  ...{ count: '1', names: '' },
  ...{ gpus: '', nodes_per_host: '', time: '', partition: '', setup: '', address: '', folder: '' }
};

/** The options that `engine` may take, as far as this page knows them. */
function optionsOf(engine: EngineChoice): [Option, IOption][] {
  return (Object.entries(OPTIONS) as [Option, IOption][]).filter(([name]) => engine.options.includes(name));
}

function namesIn(text: string): string {
  return text
    .split(',')
    .map(name => name.trim())
    .filter(Boolean)
    .join(',');
}

/** What the server is asked for; only what `engine` may take. */
export function launchOf(engine: EngineChoice, typed: Typed): StartLaunch {
  const names = engine.hosts === 'number' ? '' : namesIn(typed.names);
  const count = engine.hosts === 'names' ? '' : typed.count.trim();
  const said = optionsOf(engine).filter(([name]) => typed[name].trim());
  return {
    on: names ? `${engine.name}:${names}` : engine.name,
    ...(count && { hosts: Number(count) }),
    ...Object.fromEntries(said.map(([name, { most }]) => [name, most ? Number(typed[name]) : typed[name].trim()]))
  };
}

/** Why `engine` cannot be asked for hosts with this; empty when it can. What only the engine knows it says itself. */
export function whyNoHosts(engine: EngineChoice, typed: Typed): string {
  if (engine.hosts === 'names' && !namesIn(typed.names)) {
    return `${engine.title} needs the names of hosts.`;
  }
  const mayBeEmpty = engine.hosts === 'either' && !typed.count.trim();
  if (engine.hosts !== 'names' && !mayBeEmpty && !isBetween(typed.count, 1, MOST_HOSTS)) {
    return `Hosts: a number from 1 to ${MOST_HOSTS}.`;
  }
  const wrong = optionsOf(engine).find(
    ([name, { most }]) => most && typed[name].trim() && !isBetween(typed[name], 1, most)
  );
  return wrong ? `${wrong[1].label}: a number from 1 to ${wrong[1].most}, or nothing.` : '';
}

function isBetween(text: string, least: number, most: number): boolean {
  const number = Number(text);
  return text.trim() !== '' && Number.isInteger(number) && number >= least && number <= most;
}

interface IOn {
  readonly engines: readonly EngineChoice[];
  readonly chosen: string;
  readonly onChoose: (name: string) => void;
}

/** "On": this machine, or an engine. Nothing where the server knows no engine. */
export function On({ engines, chosen, onChoose }: IOn): React.JSX.Element | null {
  if (engines.length === 0) {
    return null;
  }
  return (
    <label className="nbc-side-field">
      On
      <select value={chosen} onChange={event => onChoose(event.target.value)}>
        <option value={HERE}>this machine</option>
        {engines.map(engine => (
          <option key={engine.name} value={engine.name}>
            {engine.title}
          </option>
        ))}
      </select>
    </label>
  );
}

interface IField {
  readonly label: string;
  readonly value: string;
  readonly placeholder?: string;
  /** It is a number from 1 to this. */
  readonly most?: number;
  readonly onType: (text: string) => void;
}

function Field({ label, value, placeholder, most, onType }: IField): React.JSX.Element {
  return (
    <label className="nbc-side-field">
      {label}
      <input
        type={most ? 'number' : 'text'}
        min={most && 1}
        max={most}
        value={value}
        placeholder={placeholder}
        autoComplete="off"
        spellCheck={false}
        onChange={event => onType(event.target.value)}
      />
    </label>
  );
}

interface IHosts {
  readonly engine: EngineChoice;
  readonly typed: Typed;
  readonly onType: (field: keyof Typed, text: string) => void;
}

/** How many hosts, or which; and what else can be said of them, in a part that folds. */
export function Hosts({ engine, typed, onType }: IHosts): React.JSX.Element {
  const [isOpen, setOpen] = useOpened('more of hosts', false);
  const id = React.useId();
  const isEither = engine.hosts === 'either';
  const field = (name: keyof Typed, label: string, placeholder?: string, most?: number): React.JSX.Element => (
    <Field key={name} value={typed[name]} onType={text => onType(name, text)} {...{ label, placeholder, most }} />
  );
  return (
    <>
      {engine.hosts === 'names' && field('names', 'Hosts, commas between', 'gpu1, gpu2')}
      {engine.hosts !== 'names' && field('count', 'Hosts', undefined, MOST_HOSTS)}
      {isEither && field('names', `Which, if ${engine.title} has to be told`)}
      <button
        type="button"
        className="nbc-side-fold"
        aria-expanded={isOpen}
        aria-controls={id}
        onClick={() => setOpen(!isOpen)}
      >
        More
      </button>
      <div id={id} hidden={!isOpen} role="group" aria-label={`More about the hosts of ${engine.title}`}>
        {isOpen && optionsOf(engine).map(([name, { label, example, most }]) => field(name, label, example, most))}
      </div>
    </>
  );
}
