/** The peers on this network, each with what it takes to add it to a cluster, and whether this machine is one. */

import * as React from 'react';

import type { ClusterRow, Overview, PeerView, Sharing } from '../generated';
import { Act, Button, Problem, TextField, useAction } from './controls';
import { Copied } from './copying';

interface IPeers {
  readonly overview: Overview;
  /** Name of the cluster that is meant, or empty. */
  readonly preferred: string;
  readonly act: Act;
}

/** By which name or address `peer` is asked for: its address where others have its name too. */
export function targetOf(peer: PeerView, peers: readonly PeerView[]): string {
  return peers.filter(other => other.name === peer.name).length > 1 ? peer.address : peer.name;
}

/** All peers that were found. With several clusters a menu says which one they are added to. */
export function Peers({ overview, preferred, act }: IPeers): React.JSX.Element {
  const { peers, clusters, sharing } = overview;
  const names = clusters.filter(row => row.condition === 'running').map(row => row.name);
  const [chosen, setChosen] = React.useState('');
  const cluster = [chosen, preferred, ...names].find(name => names.includes(name)) ?? '';
  // Who goes to another notebook means its cluster, whatever was chosen before.
  React.useEffect(() => setChosen(''), [preferred]);
  return (
    <section aria-label="Peers on this network">
      <h3>Peers on this network</h3>
      {names.length > 1 && (
        <label className="nbc-side-line">
          Add to
          <select value={cluster} onChange={event => setChosen(event.target.value)}>
            {names.map(name => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      )}
      {peers.length === 0 && (
        <p className="nbc-side-hint">
          None. Run &quot;notebook-cluster share&quot; on another machine of this network.
        </p>
      )}
      {peers.length > 0 && !cluster && <p className="nbc-side-hint">Start a cluster below to add them to it.</p>}
      <ul className="nbc-side-list">
        {peers.map(peer => (
          <Peer
            key={peer.key || peer.address}
            peer={peer}
            target={targetOf(peer, peers)}
            isHere={sharing.keys.includes(peer.key)}
            cluster={cluster}
            clusters={clusters}
            act={act}
          />
        ))}
      </ul>
    </section>
  );
}

interface IPeer {
  readonly peer: PeerView;
  /** What it is asked for by. */
  readonly target: string;
  /** It is this machine, which is shared. */
  readonly isHere: boolean;
  /** Name of the cluster that it is added to, or empty. */
  readonly cluster: string;
  readonly clusters: readonly ClusterRow[];
  readonly act: Act;
}

function Peer({ peer, target, isHere, cluster, clusters, act }: IPeer): React.JSX.Element {
  const [code, setCode] = React.useState('');
  const [send, problem] = useAction(act);
  const state = clusters.find(row => row.name === cluster)?.state;
  const isIn = Boolean(state?.nodes.some(node => node.peer === peer.name));
  const mayLead = Boolean(state) && peer.trusted && !isHere && state?.head !== peer.name;
  const isRefused = peer.condition === 'refused';
  const needsCode = Boolean(cluster) && !peer.trusted && !isIn && !isRefused;
  // Each time that a code is sent is one of the few attempts that the peer allows.
  const isAdding = React.useRef(false);
  const add = async (): Promise<void> => {
    if (isAdding.current) {
      return;
    }
    isAdding.current = true;
    try {
      const { error } = await send({ action: 'add', cluster, target, code: code.trim() });
      if (!error) {
        setCode('');
      }
    } finally {
      isAdding.current = false;
    }
  };
  const button = (
    <Button
      label="Add"
      name={cluster ? `Add ${peer.name} to ${cluster}` : `Add ${peer.name}`}
      title={cluster ? `Start a node of ${cluster} on ${peer.name}` : 'Start a cluster first'}
      disabled={!cluster || isRefused || (needsCode && !code.trim())}
      onPress={add}
    />
  );
  return (
    <li className="nbc-side-peer" aria-label={`peer ${peer.name}`}>
      <div className="nbc-side-line">
        <span className="nbc-side-name" title={`${peer.name}, ${peer.address}`}>
          {peer.name}
        </span>
        <span className="nbc-side-device">{[isHere && 'this computer', peer.device].filter(Boolean).join(', ')}</span>
        {mayLead && (
          <Button
            label="Lead"
            name={`Lead ${cluster} from ${peer.name}`}
            title={`${cluster} goes on without this computer; what runs goes on`}
            onPress={async () => void (await send({ action: 'hand_over', cluster, target }))}
          />
        )}
        {isIn ? (
          <span className="nbc-side-in" title={`in ${cluster}`}>
            in {cluster}
          </span>
        ) : (
          !needsCode && button
        )}
      </div>
      {needsCode && (
        <CodeField peer={peer} code={code} onType={setCode} onEnter={() => void (code.trim() && add())}>
          {button}
        </CodeField>
      )}
      {!needsCode && !isIn && cluster && peer.reason && <p className="nbc-side-hint">{peer.reason}</p>}
      <Problem text={problem} />
    </li>
  );
}

interface ICodeField {
  readonly peer: PeerView;
  readonly code: string;
  readonly onType: (code: string) => void;
  readonly onEnter: () => void;
  readonly children: React.ReactNode;
}

function CodeField({ peer, code, onType, onEnter, children }: ICodeField): React.JSX.Element {
  return (
    <form
      className="nbc-side-line"
      title={peer.reason}
      onSubmit={event => {
        event.preventDefault();
        onEnter();
      }}
      // A key that is held down would send the same code again after each answer.
      onKeyDown={event => event.repeat && event.key === 'Enter' && event.preventDefault()}
    >
      <TextField
        value={code}
        label={`Code that ${peer.name} shows`}
        placeholder={peer.pairing ? 'the code that it shows' : 'no code is open there'}
        onType={onType}
      />
      {children}
    </form>
  );
}

/** The switch "share this machine", and while it is on, how others add it. */
export function SharePart({ sharing, act }: { sharing: Sharing; act: Act }): React.JSX.Element {
  const [send, problem] = useAction(act);
  const [busy, setBusy] = React.useState(false);
  const toggle = async (): Promise<void> => {
    setBusy(true);
    await send({ action: sharing.on ? 'share_off' : 'share_on' });
    setBusy(false);
  };
  return (
    <section aria-label="Share this machine">
      <label className="nbc-side-line nbc-side-switch">
        <input
          type="checkbox"
          role="switch"
          checked={sharing.on}
          aria-disabled={busy || undefined}
          onChange={() => void (!busy && toggle())}
        />
        {busy ? (sharing.on ? 'Ending …' : 'Starting …') : 'Share this machine'}
      </label>
      <Problem text={problem} />
      {sharing.on && (
        <div className="nbc-side-shared">
          <div>
            <p>
              Shared as <b>{sharing.name}</b>
            </p>
            {sharing.code && (
              <p>
                Code <Copied className="nbc-side-code" text={sharing.code} what="the code" />
              </p>
            )}
            <p className="nbc-side-hint">Whoever has the code runs programs here as you.</p>
          </div>
          {sharing.qr_svg_data_url.startsWith('data:image/svg+xml') && (
            <img src={sharing.qr_svg_data_url} alt="The code as a QR code" />
          )}
          {sharing.command && (
            <div className="nbc-side-wide">
              <Copied className="nbc-side-command" text={sharing.command} what="the line for a notebook" />
            </div>
          )}
        </div>
      )}
    </section>
  );
}
