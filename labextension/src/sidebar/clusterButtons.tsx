/** What can be done with a cluster: what is wanted most stands there, the rest behind "More", what ends something last. */

import * as React from 'react';

import type { ClusterView } from '../generated';
import type { Request } from './connection';
import { Act, Button } from './controls';
import { useOpened } from './folding';

interface IButtons {
  readonly state: ClusterView;
  readonly send: Act;
  readonly onOpen: (name: string) => void;
  readonly onInsert: (name: string) => void;
  readonly onClass: (name: string) => void;
}

/** Its dashboard, and while a cell runs what stops that; the rest in a row of its own, which "More" opens. */
export function ClusterButtons({ state, send, onOpen, onInsert, onClass }: IButtons): React.JSX.Element {
  const cluster = state.name;
  const [isOpen, setOpen] = useOpened(`more of ${cluster}`, false);
  const id = React.useId();
  return (
    <>
      <div className="nbc-side-buttons" role="group" aria-label={`actions of ${cluster}`}>
        <Button
          label="Dashboard"
          title="Curves, nodes, events and logs in a tab"
          isMain
          onPress={() => onOpen(cluster)}
        />
        <button
          type="button"
          className="nbc-side-button"
          aria-expanded={isOpen}
          aria-controls={id}
          onClick={() => setOpen(!isOpen)}
        >
          {isOpen ? 'Less' : 'More …'}
        </button>
        {/* Last, so that nothing stands elsewhere when it comes. The key: what a cell's nodes did when it was stopped
            says nothing about the next cell. */}
        {state.cell?.status === 'running' && <StopCell key={state.cell.id} state={state} send={send} />}
      </div>
      <div
        id={id}
        className="nbc-side-buttons nbc-side-more"
        role="group"
        aria-label={`more actions of ${cluster}`}
        hidden={!isOpen}
      >
        {isOpen && <RarerButtons state={state} send={send} onInsert={onInsert} onClass={onClass} />}
      </div>
    </>
  );
}

function RarerButtons({ state, send, onInsert, onClass }: Omit<IButtons, 'onOpen'>): React.JSX.Element {
  const cluster = state.name;
  const press =
    (action: 'checkpoint' | 'detach' | 'invite' | 'stop', rest: Partial<Request> = {}) =>
    async () => {
      await send({ action, cluster, ...rest });
    };
  return (
    <>
      <Button
        label="Insert cell"
        title="Put a cell that runs on all nodes into the notebook"
        onPress={() => onInsert(cluster)}
      />
      <Button
        label="Checkpoint"
        title={state.jobs.length ? 'Save the model that is trained' : 'Nothing has been trained yet'}
        disabled={!state.jobs.length}
        onPress={press('checkpoint', { target: state.jobs[0]?.name })}
      />
      <Button
        label={state.invitation ? 'End invitation' : 'Invite'}
        title="Whether other machines may join with a code"
        onPress={press('invite', state.invitation ? { value: false } : {})}
      />
      <Button
        label="Class page"
        title="For the projector: one code, and who is in; in a cell of the notebook"
        onPress={() => onClass(cluster)}
      />
      <Button
        label="Detach"
        title="The cell that waits in the notebook ends; the nodes go on"
        disabled={state.cell?.status !== 'running'}
        onPress={press('detach')}
      />
      {/* In a row of its own: its question is longer, and must stand under the pointer too. */}
      <div className="nbc-side-last">
        <Button
          label="Stop cluster"
          sure="End all its kernels?"
          sureName={`Really stop cluster ${cluster} and end all its kernels?`}
          title="End the cluster and every kernel of it"
          isDangerous
          onPress={press('stop')}
        />
      </div>
    </>
  );
}

/** Milliseconds that a stopped cell has to end before the button offers to kill its nodes, which loses their state. */
const PATIENCE = 3000;

/** Interrupts the running cell on all nodes, and kills those that are still busy after that. */
function StopCell({ state, send }: { state: ClusterView; send: Act }): React.JSX.Element {
  const [told, setTold] = React.useState<readonly string[]>([]);
  const [late, setLate] = React.useState(false);
  const cluster = state.name;
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
    <Button
      label={stubborn.length ? `Kill ${stubborn.join(', ')}` : 'Stop cell'}
      title={stubborn.length ? 'Still busy: start these nodes anew' : 'Interrupt it on all nodes'}
      waits={told.length > 0 && !late}
      onPress={interrupt}
    />
  );
}
