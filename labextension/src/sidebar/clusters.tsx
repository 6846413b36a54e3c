/** The clusters of this user: their nodes, and buttons that act on them. */

import * as React from 'react';

import type { ClusterRow, ClusterView } from '../generated';
import { ClusterButtons } from './clusterButtons';
import { Act, Button, Problem, useAction, usePull } from './controls';
import { Copied } from './copying';
import type { Curves } from './curves';
import { atWork, isGone, isUp, trains } from './facts';
import { useOpened } from './folding';
import { number, plural } from './format';
import { Node } from './nodes';

/** What is done with clusters outside the sidebar's own part of the page. */
export interface IHandling {
  readonly act: Act;
  /** Opens the tab with the whole cluster. */
  readonly onOpen: (cluster: string) => void;
  /** Opens the report of one that has ended; returns why not, or nothing. */
  readonly onReport: (cluster: string) => Promise<string>;
  /** Puts its cells into the notebook; returns why not, or nothing. */
  readonly onInsert: (cluster: string) => string;
  /** Open the class page in a notebook. */
  readonly onClass: (cluster: string) => void;
  /** It is pulled from its place here, with the pointer at x, y of the page. */
  readonly onDrag: (cluster: string, x: number, y: number) => void;
}

const NODE_ACTIONS: readonly string[] = ['restart', 'remove'];
/** After so long an error of an action on a node is no news any more. */
const NEWS_MILLISECONDS = 60_000;

interface ICluster extends IHandling {
  readonly row: ClusterRow;
  readonly curves: Curves;
}

/** One cluster, which folds: one that runs is open until a person folds it, one that has ended is folded. */
export function Cluster(props: ICluster): React.JSX.Element {
  const { row, onDrag } = props;
  const isEnded = row.condition === 'ended';
  const [isOpen, setOpen] = useOpened(`${isEnded ? 'ended ' : ''}cluster ${row.name}`, !isEnded);
  const pull = usePull((x, y) => onDrag(row.name, x, y));
  const id = React.useId();
  const state = row.condition === 'running' ? row.state : null;
  return (
    <section className="nbc-side-cluster" aria-label={`cluster ${row.name}`}>
      <div className="nbc-side-heading">
        <h3>
          <button
            type="button"
            className="nbc-side-fold"
            aria-expanded={isOpen}
            aria-controls={id}
            onClick={() => setOpen(!isOpen)}
            onPointerDown={state ? pull : undefined}
          >
            <span
              className={`nbc-side-name${state ? ' nbc-mod-pulled' : ''}`}
              title={state ? `${row.name}: drag it into a notebook` : row.name}
            >
              {row.name}
            </span>
          </button>
          <span className="nbc-side-progress">{state ? progress(state) : row.condition}</span>
        </h3>
        {isEnded && <EndedButtons {...props} />}
      </div>
      <div id={id} hidden={!isOpen}>
        {isOpen && row.reason && (
          <p className="nbc-side-hint" role="status">
            {row.reason}
          </p>
        )}
        {isOpen && isEnded && row.state && <p className="nbc-side-hint">{`At its end: ${progress(row.state)}`}</p>}
        {isOpen && state && <Running {...props} state={state} />}
      </div>
    </section>
  );
}

/** What it has left to read, and how it goes from the list. */
function EndedButtons({ row, act, onReport }: ICluster): React.JSX.Element {
  const [send, problem, clear] = useAction(act);
  const [noReport, setNoReport] = React.useState('');
  return (
    <>
      <Button
        label="Report"
        name={`Report of ${row.name}`}
        title="What it did, as a page in a tab"
        onPress={async () => setNoReport(await onReport(row.name))}
      />
      <Button
        label="Dismiss"
        name={`Dismiss ${row.name}`}
        title="Take it from this list; what it left is kept"
        onPress={async () => void (await send({ action: 'dismiss', cluster: row.name }))}
      />
      <Problem text={problem} onClose={clear} />
      <Problem text={noReport} onClose={() => setNoReport('')} />
    </>
  );
}

/** Buttons, nodes and invitation of a cluster that runs. */
function Running({
  state,
  curves,
  act,
  onOpen,
  onInsert,
  onClass
}: ICluster & { state: ClusterView }): React.JSX.Element {
  const [send, problem, clear] = useNodeAction(act, state);
  const [noNotebook, setNoNotebook] = React.useState('');
  return (
    <>
      <ClusterButtons {...{ state, send, onOpen, onClass }} onInsert={name => setNoNotebook(onInsert(name))} />
      <Problem text={problem} onClose={clear} />
      <Problem text={noNotebook} onClose={() => setNoNotebook('')} />
      {state.head && (
        <div className="nbc-side-line">
          <span className="nbc-side-hint">led from {state.head}: it goes on without this computer</span>
          <Button
            label="Lead from here"
            name={`Lead ${state.name} from this computer`}
            title="What runs goes on"
            onPress={async () => void (await send({ action: 'hand_over', cluster: state.name, target: 'local' }))}
          />
        </div>
      )}
      {state.launches
        .filter(launch => launch.condition !== 'ended')
        .map(launch => (
          <div key={launch.launch} className="nbc-side-hint">
            {launch.text}
          </div>
        ))}
      <ul className="nbc-side-list">
        {state.nodes.map(node => (
          <Node key={node.name} node={node} state={state} curves={curves} send={send} />
        ))}
      </ul>
      {state.invitation && (
        <div className="nbc-side-hint">
          On the other machine:{' '}
          <Copied
            text={`notebook-cluster share --dial ${state.invitation.replace(' ', ' --code ')}`}
            what={`the line that joins ${state.name}`}
          />
        </div>
      )}
    </>
  );
}

/**
 * As `useAction`; an error of an action on a node goes after a while, or when that node's condition changes. Not when it
 * went down: that may be what the error tells of, and come after it.
 */
function useNodeAction(act: Act, { nodes }: ClusterView): ReturnType<typeof useAction> {
  const [ask, problem, clear] = useAction(act);
  const [target, setTarget] = React.useState<string>();
  const isOfNode = Boolean(problem) && target !== undefined;
  const node = nodes.find(({ name }) => name === target);
  const condition = node?.condition;
  const before = React.useRef(condition);
  React.useEffect(() => {
    before.current = condition;
    const timer = isOfNode ? setTimeout(clear, NEWS_MILLISECONDS) : undefined;
    return () => clearTimeout(timer);
  }, [isOfNode, problem]);
  React.useEffect(() => {
    if (isOfNode && condition !== before.current && !(node && isGone(node))) {
      clear();
    }
  }, [condition]);
  const send: Act = request => {
    setTarget(NODE_ACTIONS.includes(request.action) ? request.target : undefined);
    return ask(request);
  };
  return [send, problem, clear];
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

/** The mean of the losses of the nodes that have not failed, or null where none has one. */
export function meanLoss(state: ClusterView): number | null {
  const losses = atWork(state)
    .map(node => node.loss)
    .filter(loss => loss !== null && Number.isFinite(loss)) as number[];
  return losses.length ? losses.reduce((sum, loss) => sum + loss, 0) / losses.length : null;
}
