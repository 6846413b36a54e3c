/** Starts a cluster: its name, where its machines come from, how many nodes on this one, and on which peers. */

import * as React from 'react';

import type { Overview, PeerView } from '../generated';
import { Act, Button, Problem, TextField, useAction } from './controls';
import { HERE, Hosts, launchOf, NOTHING_TYPED, On, Typed, whyNoHosts } from './engines';
import { targetOf } from './peers';

const MOST_LOCAL = 64;
const ALL = 'all';

interface IStart {
  readonly overview: Overview;
  readonly act: Act;
}

/** A name alone starts a cluster with one node here. */
export function StartPart({ overview, act }: IStart): React.JSX.Element {
  const [name, setName] = React.useState('');
  const [on, setOn] = React.useState(HERE);
  const [typed, setTyped] = React.useState<Typed>(NOTHING_TYPED);
  const [typedCount, setCount] = React.useState<string | null>(null);
  const [chosen, setChosen] = React.useState<ReadonlySet<string>>(new Set());
  const [code, setCode] = React.useState('');
  const [typedHead, setHead] = React.useState('');
  const [isStarting, setStarting] = React.useState(false);
  // Known at once, also to a press that comes before what it changes is drawn.
  const isOnItsWay = React.useRef(false);
  const [said, setSaid] = React.useState<readonly string[]>([]);
  const [send, problem, clear] = useAction(act);

  // An engine that is not known any more is not asked.
  const engine = overview.engines.find(({ name }) => name === on);
  // On an engine's hosts, unless a person says otherwise, none is wanted here.
  const count = typedCount ?? (engine ? '0' : '1');
  const peers = overview.peers.filter(peer => peer.condition !== 'refused');
  const targets = new Map(peers.map(peer => [targetOf(peer, overview.peers), peer]));
  // A peer that is gone is not asked for any more.
  const picked = [...chosen].filter(target => target === ALL || targets.has(target));
  const needsCode = picked.some(target => target === ALL || !targets.get(target)?.trusted);
  // A machine that others share and that is paired may lead; this computer does without being asked.
  const heads = [...targets].filter(([, peer]) => peer.trusted && !overview.sharing.keys.includes(peer.key));
  const head = heads.some(([target]) => target === typedHead) ? typedHead : '';
  const missing = picked.find(target => targets.get(target)?.trusted === false);
  const obstacle = isStarting
    ? 'Starting …'
    : whyNot(name.trim(), count, picked.length > 0 || engine !== undefined, overview) ||
      (engine ? whyNoHosts(engine, typed) : '') ||
      (missing && !code.trim() && !picked.includes(ALL) ? `It needs the code that ${missing} shows.` : '');

  const start = async (): Promise<void> => {
    if (isOnItsWay.current) {
      return;
    }
    isOnItsWay.current = true;
    setSaid([]);
    setStarting(true);
    const { error, value } = await send({
      action: 'start',
      cluster: name.trim(),
      value: Number(count),
      target: picked.includes(ALL) ? ALL : picked.join(','),
      code: needsCode ? code.trim() : '',
      ...(head && { head }),
      ...(engine && { launch: launchOf(engine, typed) })
    });
    isOnItsWay.current = false;
    setStarting(false);
    if (!error) {
      setName('');
      setChosen(new Set());
      setCode('');
      setSaid(Array.isArray(value) ? value.map(String) : []);
    }
  };
  const pick = (target: string, isOn: boolean): void => {
    const next = new Set(chosen);
    isOn ? next.add(target) : next.delete(target);
    setChosen(next);
  };
  return (
    <section aria-label="Start a cluster">
      <h3>Start a cluster</h3>
      {overview.clusters.length === 0 && (
        <p className="nbc-side-hint">
          No cluster runs. Type <code>%cluster start</code> in a notebook, or start one here.
        </p>
      )}
      <form
        onSubmit={event => {
          event.preventDefault();
          if (!obstacle) {
            void start();
          }
        }}
      >
        <div className="nbc-side-line">
          <TextField value={name} label="Name of a new cluster" placeholder="name of a new cluster" onType={setName} />
        </div>
        <On engines={overview.engines} chosen={engine ? on : HERE} onChoose={setOn} />
        {engine && (
          <Hosts
            engine={engine}
            typed={typed}
            onType={(field, text) => setTyped(before => ({ ...before, [field]: text }))}
          />
        )}
        <label className="nbc-side-line">
          with
          <input
            type="number"
            min={0}
            max={MOST_LOCAL}
            value={count}
            onChange={event => setCount(event.target.value)}
          />
          {Number(count) === 1 ? 'node here' : 'nodes here'}
        </label>
        {heads.length > 0 && (
          <label className="nbc-side-line">
            led from
            <select value={head} onChange={event => setHead(event.target.value)}>
              <option value="">this computer</option>
              {heads.map(([target]) => (
                <option key={target} value={target}>
                  {target}, without this computer
                </option>
              ))}
            </select>
          </label>
        )}
        {targets.size > 0 && <Choice targets={targets} picked={picked} onPick={pick} own={overview.sharing.keys} />}
        <div className="nbc-side-line">
          {needsCode && (
            <TextField
              value={code}
              label="Code that the chosen peers show"
              placeholder="the code that they show"
              onType={setCode}
            />
          )}
          <Button label="Start" name="Start a cluster" disabled={obstacle !== ''} onPress={start} />
          {/* Enter in a field of a form with several of them works with a button of this kind only. */}
          <button type="submit" hidden />
        </div>
      </form>
      {obstacle && name.trim() && (
        <p className="nbc-side-hint" role="status">
          {obstacle}
        </p>
      )}
      <Problem text={problem} onClose={clear} />
      {said.length > 0 && (
        <p className="nbc-side-hint" role="status">
          {said.join(' · ')}
        </p>
      )}
    </section>
  );
}

/** Why a cluster cannot be started with this; empty when it can. */
function whyNot(name: string, count: string, hasOthers: boolean, { clusters }: Overview): string {
  const nodes = Number(count);
  if (!name) {
    return 'It needs a name.';
  }
  if (clusters.some(row => row.name === name && row.condition !== 'ended')) {
    return `${name} runs already: choose another name.`;
  }
  if (count.trim() === '' || !Number.isInteger(nodes) || nodes < 0 || nodes > MOST_LOCAL) {
    return `Nodes here: a number from 0 to ${MOST_LOCAL}.`;
  }
  return nodes === 0 && !hasOthers ? 'It needs a node here, or a peer.' : '';
}

interface IChoice {
  readonly targets: ReadonlyMap<string, PeerView>;
  readonly picked: readonly string[];
  readonly own: readonly string[];
  readonly onPick: (target: string, isOn: boolean) => void;
}

function Choice({ targets, picked, own, onPick }: IChoice): React.JSX.Element {
  const box = (target: string, text: string, isOff = false): React.JSX.Element => (
    <label key={target} className="nbc-side-choice">
      <input
        type="checkbox"
        value={target}
        checked={picked.includes(target)}
        disabled={isOff}
        onChange={event => onPick(target, event.target.checked)}
      />
      {text}
    </label>
  );
  const isAll = picked.includes(ALL);
  return (
    <fieldset className="nbc-side-choices">
      <legend>and on</legend>
      {box(ALL, 'all that may be used')}
      {[...targets].map(([target, peer]) =>
        box(target, own.includes(peer.key) ? `${target} (this computer)` : target, isAll)
      )}
    </fieldset>
  );
}
