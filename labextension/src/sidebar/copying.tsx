/** A button that copies a code or a line to type, and says that it did. */

import * as React from 'react';

/** How long it says so. */
const SAID_MILLISECONDS = 2500;

/** `text` as code with a button beside it; `what` names it for a screen reader. */
export function Copied({
  text,
  what,
  className
}: {
  text: string;
  what: string;
  className?: string;
}): React.JSX.Element {
  return (
    <span className="nbc-side-copied">
      <code className={className}>{text}</code>
      <CopyButton text={text} what={what} />
    </span>
  );
}

/** Puts `text` on the clipboard when it is pressed. */
export function CopyButton({ text, what }: { text: string; what: string }): React.JSX.Element {
  const [said, setSaid] = React.useState('');
  React.useEffect(() => {
    const timer = said ? setTimeout(() => setSaid(''), SAID_MILLISECONDS) : undefined;
    return () => clearTimeout(timer);
  }, [said]);
  const copy = async (): Promise<void> => setSaid((await copyText(text)) ? 'Copied' : 'Not copied: select it');
  return (
    <>
      <button
        type="button"
        className="nbc-side-button nbc-side-copy"
        aria-label={said ? `${said}: ${what}` : `Copy ${what}`}
        title={`Copy ${what}`}
        onClick={() => void copy()}
      >
        {said || 'Copy'}
      </button>
      <span className="nbc-side-unseen" role="status">
        {said && `${said}: ${what}`}
      </span>
    </>
  );
}

/** Copy `text`; whether it worked. A page that came over plain HTTP from another machine has no `navigator.clipboard`. */
export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyOfOld(text);
  }
}

function copyOfOld(text: string): boolean {
  const before = document.activeElement;
  const field = document.createElement('textarea');
  field.value = text;
  field.style.position = 'fixed';
  field.style.opacity = '0';
  document.body.append(field);
  field.focus();
  field.select();
  try {
    return document.execCommand('copy');
  } catch {
    return false;
  } finally {
    field.remove();
    (before as HTMLElement | null)?.focus?.();
  }
}
