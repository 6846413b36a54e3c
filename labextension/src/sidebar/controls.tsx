/** Buttons that say when they work, ask once more before they end something, and show what went wrong; text fields. */

import * as React from 'react';

import type { IAnswer, Request } from './connection';

/** Sends an action to the server. */
export type Act = (request: Request) => Promise<IAnswer>;

const SURE_MILLISECONDS = 4000;

interface IButton {
  readonly label: string;
  /** What a screen reader says instead of `label`. */
  readonly name?: string;
  /** Asked by the button's own label before it acts. */
  readonly sure?: string;
  readonly title?: string;
  readonly disabled?: boolean;
  readonly onPress: () => Promise<void> | void;
}

/** A button that is off while its action is under way. */
export function Button(props: IButton): React.JSX.Element {
  const [busy, setBusy] = React.useState(false);
  const [sure, setSure] = React.useState(false);
  const here = useMounted();
  React.useEffect(() => {
    const timer = sure ? setTimeout(() => setSure(false), SURE_MILLISECONDS) : undefined;
    return () => clearTimeout(timer);
  }, [sure]);
  const press = async (): Promise<void> => {
    if (props.sure && !sure) {
      setSure(true);
      return;
    }
    setSure(false);
    setBusy(true);
    try {
      await props.onPress();
    } finally {
      if (here.current) {
        setBusy(false);
      }
    }
  };
  return (
    <button
      type="button"
      className={`nbc-side-button${sure ? ' nbc-mod-sure' : ''}`}
      title={props.title}
      aria-label={sure ? undefined : props.name}
      aria-busy={busy}
      disabled={busy || props.disabled}
      onClick={() => void press()}
    >
      {sure ? props.sure : props.label}
    </button>
  );
}

interface ITextField {
  readonly value: string;
  /** What a screen reader says. */
  readonly label: string;
  readonly placeholder: string;
  readonly onType: (text: string) => void;
}

/** A name or a code: nothing that a browser should complete or correct. */
export function TextField({ value, label, placeholder, onType }: ITextField): React.JSX.Element {
  return (
    <input
      value={value}
      onChange={event => onType(event.target.value)}
      placeholder={placeholder}
      aria-label={label}
      autoComplete="off"
      spellCheck={false}
    />
  );
}

/** One line about what failed, read out at once; nothing while `text` is empty. */
export function Problem({ text, onClose }: { text: string; onClose?: () => void }): React.JSX.Element | null {
  if (!text) {
    return null;
  }
  return (
    <div className="nbc-side-problem" role="alert">
      <span>{text}</span>
      {onClose && (
        <button type="button" className="nbc-side-close" aria-label="Dismiss" onClick={onClose}>
          ×
        </button>
      )}
    </div>
  );
}

/** `[send, problem, clear]`: `send` returns the answer, `problem` is the error of the last action, or empty. */
export function useAction(act: Act): [Act, string, () => void] {
  const [problem, setProblem] = React.useState('');
  const here = useMounted();
  const send = async (request: Request): Promise<IAnswer> => {
    setProblem('');
    const answer = await act(request);
    if (here.current) {
      setProblem(answer.error);
    }
    return answer;
  };
  return [send, problem, () => setProblem('')];
}

const PULL_PIXELS = 5;

/** A handler for `onPointerDown`: calls `onPull` once the pointer was moved a little with its button held. */
export function usePull(onPull: (x: number, y: number) => void): React.PointerEventHandler {
  const end = React.useRef<() => void>(() => undefined);
  React.useEffect(() => () => end.current(), []);
  return ({ button, clientX, clientY }) => {
    if (button !== 0) {
      return;
    }
    const move = (event: PointerEvent): void => {
      if (Math.hypot(event.clientX - clientX, event.clientY - clientY) >= PULL_PIXELS) {
        end.current();
        onPull(event.clientX, event.clientY);
      }
    };
    const stop = (): void => end.current();
    end.current();
    end.current = () => {
      document.removeEventListener('pointermove', move, true);
      document.removeEventListener('pointerup', stop, true);
      document.removeEventListener('pointercancel', stop, true);
    };
    document.addEventListener('pointermove', move, true);
    document.addEventListener('pointerup', stop, true);
    document.addEventListener('pointercancel', stop, true);
  };
}

function useMounted(): React.RefObject<boolean> {
  const here = React.useRef(false) as React.MutableRefObject<boolean>;
  React.useEffect(() => {
    here.current = true;
    return () => {
      here.current = false;
    };
  }, []);
  return here;
}
