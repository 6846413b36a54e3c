/** The nodes of a cluster in the sidebar. */

import * as React from 'react';

import type { ClusterView, NodeView } from '../generated';
import { Act, Button } from './controls';
import { Curves, newest, newestLoss } from './curves';
import { conditionOf, isGone } from './facts';
import { ABSENT, ago, byteCount, number } from './format';
import { nodeColour } from './palette';
import { Sparkline } from './sparkline';

const MARKS: Partial<Record<string, string>> = {
  ok: '●',
  starting: '◔',
  replaying: '◔',
  suspect: '▲',
  asleep: '◌',
  stopping: '◌'
};
const FAILED = '✖';

interface INode {
  readonly node: NodeView;
  readonly state: ClusterView;
  readonly curves: Curves;
  readonly send: Act;
}

/** One node: its state, memory and loss, with the buttons that act on it. */
export function Node({ node, state, curves, send }: INode): React.JSX.Element {
  const points = newestLoss(curves, node.name);
  const loss = isGone(node) ? ABSENT : number(node.loss ?? newest(points));
  const [cluster, target] = [state.name, node.name];
  const [condition, reason] = conditionOf(node);
  return (
    <li className="nbc-side-node" aria-label={`node ${node.name}, ${condition}`}>
      <div className="nbc-side-line">
        <span className="nbc-side-mark" data-condition={condition} aria-hidden="true">
          {MARKS[condition] ?? FAILED}
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
      {condition !== 'ok' && (
        <p className="nbc-side-hint">
          {node.replaying || condition}
          {reason && `: ${reason}`}
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
