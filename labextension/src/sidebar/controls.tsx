/** Buttons that say when they work, ask once more before they end something, and show what went wrong; text fields. */

import * as React from 'react';

import type { IAnswer, Request } from './connection';
import { Press, Question, QUIET_MILLISECONDS, SURE_MILLISECONDS } from './question';

/** Sends an action to the server. */
export type Act = (request: Request) => Promise<IAnswer>;

interface IButton {
  readonly label: string;
  /** What a screen reader says instead of `label`. */
  readonly name?: string;
  /** Asked by the button's own label before it acts. */
  readonly sure?: string;
  /** What a screen reader says instead of `sure`: it names what the button acts on. */
  readonly sureName?: string;
  readonly title?: string;
  readonly disabled?: boolean;
  /** What it did last is not over. */
  readonly waits?: boolean;
  /** What is wanted most where it stands. */
  readonly isMain?: boolean;
  /** It ends something. */
  readonly isDangerous?: boolean;
  readonly onPress: () => Promise<void> | void;
}

/** A button that is off while its action is under way. */
export function Button(props: IButton): React.JSX.Element {
  const [busy, setBusy] = React.useState(false);
  const here = useMounted();
  const { asks, isEarly, press, takeBack } = useQuestion();
  const isOff = busy || props.waits;
  const act = async (): Promise<void> => {
    setBusy(true);
    try {
      await props.onPress();
    } finally {
      if (here.current) {
        setBusy(false);
      }
    }
  };
  const classes = [
    ...['nbc-side-button', props.isMain && 'nbc-mod-main', props.isDangerous && 'nbc-mod-dangerous'],
    ...[asks && 'nbc-mod-sure', asks && isEarly && 'nbc-mod-early']
  ];
  return (
    <button
      type="button"
      className={classes.filter(Boolean).join(' ')}
      title={asks ? (props.sureName ?? props.title) : props.title}
      aria-label={asks ? props.sureName : props.name}
      aria-busy={busy}
      // Not `disabled` meanwhile: that would take the focus away from who works with the keyboard.
      aria-disabled={isOff || undefined}
      disabled={props.disabled}
      onClick={event => void (!isOff && (!props.sure || press(event.detail) === 'act') && act())}
      // A key that is held down presses again and again.
      onKeyDown={event => event.repeat && event.preventDefault()}
      onBlur={takeBack}
    >
      {asks ? props.sure : props.label}
    </button>
  );
}

interface IQuestion {
  /** It stands now. */
  readonly asks: boolean;
  /** A press would not be taken for an answer yet. */
  readonly isEarly: boolean;
  readonly press: (clicks: number) => Press;
  readonly takeBack: () => void;
}

/** A question that time, Escape and `takeBack` end. */
function useQuestion(): IQuestion {
  const question = React.useRef(new Question());
  const [asks, setAsks] = React.useState(false);
  const [isEarly, setEarly] = React.useState(false);
  // Another one with each press, so that the times begin anew.
  const [presses, setPresses] = React.useState(0);
  const takeBack = (): void => {
    question.current.takeBack();
    setAsks(false);
  };
  React.useEffect(() => {
    if (!asks) {
      return undefined;
    }
    const timers = [setTimeout(() => setEarly(false), QUIET_MILLISECONDS), setTimeout(takeBack, SURE_MILLISECONDS)];
    const escape = (event: KeyboardEvent): void => {
      if (event.key === 'Escape') {
        event.preventDefault();
        event.stopPropagation();
        takeBack();
      }
    };
    document.addEventListener('keydown', escape, true);
    return () => {
      timers.forEach(clearTimeout);
      document.removeEventListener('keydown', escape, true);
    };
  }, [asks, presses]);
  const press = (clicks: number): Press => {
    const what = question.current.press(performance.now(), clicks);
    if (what !== 'nothing') {
      setAsks(what === 'ask');
    }
    setEarly(true);
    setPresses(presses + 1);
    return what;
  };
  return { asks, isEarly, press, takeBack };
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
