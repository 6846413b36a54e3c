/** The last lines that a node wrote to its terminal: text, whatever stands in it. */

import * as React from 'react';

import type { ClusterView } from '../generated';
import { Act, Button, Problem, useAction } from './controls';
import { CopyButton } from './copying';
import { clock } from './format';

interface ILog {
  readonly node: string;
  readonly lines: readonly string[];
  /** Seconds since 1970 at which it was read. */
  readonly read: number;
}

/** A log that is read when its node is chosen, and again with a button. */
export function Logs({ state, act }: { state: ClusterView; act: Act }): React.JSX.Element {
  const [send, problem, clear] = useAction(act);
  const [chosen, setChosen] = React.useState('');
  const [log, setLog] = React.useState<ILog | null>(null);
  const names = state.nodes.map(node => node.name);
  const node = names.includes(chosen) ? chosen : (names[0] ?? '');
  const newest = React.useRef(0);
  const end = React.useRef<HTMLPreElement>(null);
  const read = async (): Promise<void> => {
    const number = ++newest.current;
    const { error, value } = await send({ action: 'log', cluster: state.name, target: node });
    // One that was asked for before, of another node, may come late.
    if (number === newest.current && !error && Array.isArray(value)) {
      setLog({ node, lines: value.map(String), read: Date.now() / 1000 });
    }
  };
  React.useEffect(() => {
    if (node) {
      void read();
    }
  }, [node, state.name]);
  React.useEffect(() => {
    // What was written last is what is looked for.
    end.current?.scrollTo?.(0, end.current.scrollHeight);
  }, [log]);
  const shown = log?.node === node ? log : null;
  if (!node) {
    return <p className="nbc-side-hint">No nodes.</p>;
  }
  return (
    <>
      <div className="nbc-side-line">
        <label className="nbc-side-line">
          Node
          <select value={node} onChange={event => setChosen(event.target.value)}>
            {names.map(name => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
        <Button label="Refresh" name={`Refresh the log of ${node}`} onPress={read} />
        {shown !== null && shown.lines.length > 0 && (
          <CopyButton text={shown.lines.join('\n')} what={`the log of ${node}`} />
        )}
        {shown && <span className="nbc-side-hint">{`as it was at ${clock(shown.read)}`}</span>}
      </div>
      <Problem text={problem} onClose={clear} />
      {shown?.lines.length === 0 && <p className="nbc-side-hint">{`${node} has written nothing to its terminal.`}</p>}
      {shown !== null && shown.lines.length > 0 && (
        <pre ref={end} className="nbc-dash-log" tabIndex={0} role="region" aria-label={`log of ${node}`}>
          {shown.lines.join('\n')}
        </pre>
      )}
      <p className="nbc-side-hint">What its kernel and libraries wrote there; what cells print is in the notebook.</p>
    </>
  );
}
