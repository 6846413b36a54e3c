/** When a press of a button that asks once more is an answer, and when it is still part of the press before. Pure. */

/** A press so soon after another one is no press of its own: a double click, a hand that trembles, impatience. */
export const QUIET_MILLISECONDS = 500;
/** How long the question stands. */
export const SURE_MILLISECONDS = 4000;

/** What a press does: ask, act, or nothing. */
export type Press = 'ask' | 'act' | 'nothing';

/** One button's question. Times are milliseconds of any clock that only goes forward. */
export class Question {
  private open = false;
  private last = -Infinity;

  /** A press at `now`; `clicks` counts those that the system takes for one double click (0 for a key). */
  press(now: number, clicks: number): Press {
    const isEarly = now - this.last < QUIET_MILLISECONDS || clicks > 1;
    this.last = now;
    if (isEarly) {
      return 'nothing';
    }
    this.open = !this.open;
    return this.open ? 'ask' : 'act';
  }

  /** Nobody wants it any more. */
  takeBack(): void {
    this.open = false;
  }
}
