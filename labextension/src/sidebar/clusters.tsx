/** The clusters of this user: their nodes, and buttons that act on them. */

import * as React from 'react';

import type { ClusterRow, ClusterView, NodeView } from '../generated';
import type { Request } from './connection';
import { Act, Button, Problem, useAction, usePull } from './controls';
import { Curves, newest, newestLoss } from './curves';
import { isGone, isUp, trains } from './facts';
import { ABSENT, ago, byteCount, number, plural } from './format';
import { nodeColour } from './palette';
import { Sparkline } from './sparkline';

/** What is done with clusters outside the sidebar's own part of the page. */
export interface IHandling {
  readonly act: Act;
  /** Opens the tab with the whole cluster. */
  readonly onOpen: (cluster: string) => void;
  /** Puts its cells into the notebook; returns why not, or nothing. */
  readonly onInsert: (cluster: string) => string;
  /** It is pulled from its place here, with the pointer at x, y of the page. */
  readonly onDrag: (cluster: string, x: number, y: number) => void;
}

interface ICluster extends IHandling {
  readonly row: ClusterRow;
  readonly curves: Curves;
}

const MARKS: Partial<Record<NodeView['condition'], string>> = {
  ok: '●',
  starting: '◔',
  replaying: '◔',
  suspect: '▲',
  asleep: '◌',
  stopping: '◌'
};
const FAILED = '✖';

/** One cluster. */
export function Cluster({ row, curves, act, onOpen, onInsert, onDrag }: ICluster): React.JSX.Element {
  const [send, problem, clear] = useAction(act);
  const [noNotebook, setNoNotebook] = React.useState('');
  const pull = usePull((x, y) => onDrag(row.name, x, y));
  const state = row.condition === 'running' ? row.state : null;
  return (
    <section className="nbc-side-cluster" aria-label={`cluster ${row.name}`}>
      <h3>
        {state ? (
          <span
            className="nbc-side-name nbc-mod-pulled"
            title={`Drag ${row.name} into a notebook`}
            onPointerDown={pull}
          >
            {row.name}
          </span>
        ) : (
          <span className="nbc-side-name" title={row.name}>
            {row.name}
          </span>
        )}
        <span className="nbc-side-progress">{state ? progress(state) : row.condition}</span>
      </h3>
      {row.reason && (
        <p className="nbc-side-hint" role="status">
          {row.reason}
        </p>
      )}
      {state && (
        <>
          <ClusterButtons state={state} send={send} onOpen={onOpen} onInsert={name => setNoNotebook(onInsert(name))} />
          <Problem text={problem} onClose={clear} />
          <Problem text={noNotebook} onClose={() => setNoNotebook('')} />
          <ul className="nbc-side-list">
            {state.nodes.map(node => (
              <Node key={node.name} node={node} state={state} curves={curves} send={send} />
            ))}
          </ul>
          {state.invitation && (
            <p className="nbc-side-hint">
              On the other machine:{' '}
              <code>notebook-cluster share --dial {state.invitation.replace(' ', ' --code ')}</code>
            </p>
          )}
        </>
      )}
    </section>
  );
}

/** `2 nodes`, or `1 of 2 nodes` where one of them is not up. */
export function nodesUp({ nodes }: ClusterView): string {
  const up = nodes.filter(isUp).length;
  return (up < nodes.length ? `${up} of ` : '') + plural(nodes.length, 'node');
}

/** `2 nodes · round 12 · loss 0.3120`, with `cell 3 running` before it; no round of what that cell does not train. */
export function progress(state: ClusterView): string {
  const parts = [nodesUp(state)];
  if (state.cell?.status === 'running') {
    parts.unshift(`cell ${state.cell.id} running`);
    if (state.jobs.length && !trains(state)) {
      return parts.join(' · ');
    }
  }
  if (state.jobs.length) {
    parts.push(`round ${state.jobs[0].round}`);
  }
  const loss = meanLoss(state);
  if (loss !== null) {
    parts.push(`loss ${number(loss)}`);
  }
  return parts.join(' · ');
}

/** The mean of the nodes' losses, or null where none has one. */
export function meanLoss(state: ClusterView): number | null {
  const losses = state.nodes.map(node => node.loss).filter(loss => loss !== null && Number.isFinite(loss)) as number[];
  return losses.length ? losses.reduce((sum, loss) => sum + loss, 0) / losses.length : null;
}

interface IButtons {
  readonly state: ClusterView;
  readonly send: Act;
  readonly onOpen: (name: string) => void;
  readonly onInsert: (name: string) => void;
}

function ClusterButtons({ state, send, onOpen, onInsert }: IButtons): React.JSX.Element {
  const cluster = state.name;
  const press =
    (action: 'checkpoint' | 'invite' | 'stop', rest: Partial<Request> = {}) =>
    async () => {
      await send({ action, cluster, ...rest });
    };
  return (
    <div className="nbc-side-buttons" role="group" aria-label={`actions of ${cluster}`}>
      <Button label="Dashboard" title="Curves, nodes and events in a tab" onPress={() => onOpen(cluster)} />
      <Button
        label="Insert cell"
        title="Put a cell that runs on all nodes into the notebook"
        onPress={() => onInsert(cluster)}
      />
      {/* The key: what a cell's nodes did when it was stopped says nothing about the next cell. */}
      <CellButtons key={state.cell?.id} state={state} send={send} />
      <Button
        label="Checkpoint"
        title="Save the model that is trained"
        disabled={!state.jobs.length}
        onPress={press('checkpoint', { target: state.jobs[0]?.name })}
      />
      <Button
        label={state.invitation ? 'End invitation' : 'Invite'}
        title="Whether other machines may join with a code"
        onPress={press('invite', state.invitation ? { value: false } : {})}
      />
      <Button
        label="Stop cluster"
        sure="End all its kernels?"
        sureName={`Really stop cluster ${cluster} and end all its kernels?`}
        title="End the cluster and every kernel of it"
        onPress={press('stop')}
      />
    </div>
  );
}

/** Milliseconds that a stopped cell has to end before the button offers to kill its nodes, which loses their state. */
const PATIENCE = 3000;

function CellButtons({ state, send }: { state: ClusterView; send: Act }): React.JSX.Element {
  const [told, setTold] = React.useState<readonly string[]>([]);
  const [late, setLate] = React.useState(false);
  const cluster = state.name;
  const running = state.cell?.status === 'running';
  const stubborn = late ? told : [];
  const interrupt = async (): Promise<void> => {
    const { value } = await send({ action: 'interrupt', cluster, value: stubborn.length > 0 });
    setLate(false);
    setTold(Array.isArray(value) ? value.map(String) : []);
  };
  React.useEffect(() => {
    const timer = told.length ? setTimeout(() => setLate(true), PATIENCE) : undefined;
    return () => clearTimeout(timer);
  }, [told]);
  return (
    <>
      <Button
        label={running && stubborn.length ? `Kill ${stubborn.join(', ')}` : 'Stop cell'}
        title={stubborn.length ? 'Still busy: start these nodes anew' : 'Interrupt it on all nodes'}
        disabled={!running || (told.length > 0 && !late)}
        onPress={interrupt}
      />
      <Button
        label="Detach"
        title="The cell that waits in the notebook ends; the nodes go on"
        disabled={!running}
        onPress={async () => void (await send({ action: 'detach', cluster }))}
      />
    </>
  );
}

interface INode {
  readonly node: NodeView;
  readonly state: ClusterView;
  readonly curves: Curves;
  readonly send: Act;
}

function Node({ node, state, curves, send }: INode): React.JSX.Element {
  const points = newestLoss(curves, node.name);
  const loss = number(node.loss ?? newest(points));
  const [cluster, target] = [state.name, node.name];
  return (
    <li className="nbc-side-node" aria-label={`node ${node.name}, ${node.condition}`}>
      <div className="nbc-side-line">
        <span className="nbc-side-mark" data-condition={node.condition} aria-hidden="true">
          {MARKS[node.condition] ?? FAILED}
        </span>
        <span className="nbc-side-name" title={`${node.name} on ${node.peer}`}>
          {node.name}
        </span>
        <span className="nbc-side-device" title={node.device_name}>
          {node.device_name || node.device}
        </span>
        <Button
          label="↻"
          name={`Restart ${node.name}`}
          sure="Restart?"
          sureName={`Really restart ${node.name}?`}
          title="Restart its kernel"
          onPress={async () => void (await send({ action: 'restart', cluster, target }))}
        />
        <Button
          label="✕"
          name={`Remove ${node.name}`}
          sure="Remove?"
          sureName={`Really remove ${node.name}?`}
          title="Remove it from the cluster"
          onPress={async () => void (await send({ action: 'remove', cluster, target }))}
        />
      </div>
      {node.condition !== 'ok' && (
        <p className="nbc-side-hint">
          {node.replaying || node.condition}
          {node.reason && `: ${node.reason}`}
        </p>
      )}
      {node.left_out && <p className="nbc-side-hint">{node.left_out}</p>}
      <div className="nbc-side-line">
        <Memory node={node} />
        <Sparkline line={{ name: node.name, colour: nodeColour(node), points }} label={`loss ${loss}`} />
        <span className="nbc-side-loss">{loss}</span>
      </div>
      <Checkpoint node={node} now={state.now} />
    </li>
  );
}

/** A bar of the memory that `node` uses, with its numbers. */
export function Memory({ node }: { node: NodeView }): React.JSX.Element {
  const used = isGone(node) ? 0 : node.memory_used;
  const share = node.memory_total > 0 ? Math.min(used / node.memory_total, 1) : 0;
  const shown = isGone(node) ? ABSENT : byteCount(used);
  const text = node.memory_total ? `${shown} of ${byteCount(node.memory_total)}` : shown;
  return (
    <span
      className="nbc-side-memory"
      role="meter"
      aria-label={`${node.memory_kind} of ${node.name}`}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={Math.round(share * 100)}
      aria-valuetext={text}
      title={`${node.memory_kind} ${text}, at most ${byteCount(node.memory_peak)} so far`}
    >
      <span className="nbc-side-bar">
        <span style={{ width: `${(share * 100).toFixed(1)}%` }} />
      </span>
      {text}
    </span>
  );
}

function Checkpoint({ node, now }: { node: NodeView; now: number | null }): React.JSX.Element | null {
  if (!node.checkpoint) {
    return null;
  }
  const age = node.checkpoint_time === null || now === null ? '' : `, ${ago(now - node.checkpoint_time)}`;
  return <p className="nbc-side-hint">{`✓ checkpoint ${node.checkpoint}${age}`}</p>;
}
