/** Tabs inside a page, after the ARIA pattern: arrow keys go between them. */

import * as React from 'react';

interface ITabs {
  /** What a screen reader calls them together. */
  readonly label: string;
  readonly names: readonly string[];
  readonly chosen: string;
  readonly onChoose: (name: string) => void;
  /** What the chosen one shows. */
  readonly children: React.ReactNode;
}

/** A row of tabs above what the chosen one shows. */
export function Tabs({ label, names, chosen, onChoose, children }: ITabs): React.JSX.Element {
  const id = React.useId();
  const buttons = React.useRef(new Map<string, HTMLButtonElement>());
  const onKey = (event: React.KeyboardEvent): void => {
    const at = names.indexOf(chosen);
    const steps: Record<string, number> = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 };
    const wanted = steps[event.key];
    if (wanted === undefined || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    const name = names[(wanted + names.length) % names.length];
    onChoose(name);
    buttons.current.get(name)?.focus();
  };
  return (
    <>
      <div className="nbc-dash-tabs" role="tablist" aria-label={label} onKeyDown={onKey}>
        {names.map(name => (
          <button
            key={name}
            ref={button => void (button ? buttons.current.set(name, button) : buttons.current.delete(name))}
            type="button"
            role="tab"
            id={`${id}-${name}`}
            aria-selected={name === chosen}
            aria-controls={id}
            tabIndex={name === chosen ? 0 : -1}
            onClick={() => onChoose(name)}
          >
            {name}
          </button>
        ))}
      </div>
      <div id={id} role="tabpanel" aria-labelledby={`${id}-${chosen}`}>
        {children}
      </div>
    </>
  );
}
