/** What a person has folded or opened in the sidebar; it is so again when the page is loaded again. */

import * as React from 'react';

const PLACE = 'notebook-cluster:opened';
const MOST_KEPT = 200;

/** What is kept: name of a part -> whether it is open, the newest last. */
type Kept = Record<string, boolean>;

function read(): Kept {
  try {
    const kept: unknown = JSON.parse(localStorage.getItem(PLACE) ?? '{}');
    return kept && typeof kept === 'object' && !Array.isArray(kept) ? (kept as Kept) : {};
  } catch {
    return {}; // no storage, or what is in it was not written here
  }
}

function write(part: string, isOpen: boolean): void {
  const others = Object.entries(read()).filter(([name]) => name !== part);
  try {
    localStorage.setItem(PLACE, JSON.stringify(Object.fromEntries([...others, [part, isOpen]].slice(-MOST_KEPT))));
  } catch {
    // Then it is folded until the page is loaded again.
  }
}

/** `[isOpen, set]` of `part`: as a person left it, else `unlessSaid`. */
export function useOpened(part: string, unlessSaid: boolean): [boolean, (isOpen: boolean) => void] {
  const [said, setSaid] = React.useState<Kept>({});
  const kept = React.useMemo(() => read()[part], [part]);
  const isOpen = said[part] ?? kept ?? unlessSaid;
  return [
    isOpen === true,
    open => {
      setSaid(before => ({ ...before, [part]: open }));
      write(part, open);
    }
  ];
}
