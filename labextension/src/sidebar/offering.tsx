/**
 * When a notebook that is opened is offered to show its cluster: once for each time that it is opened, while the cluster
 * runs and no live panel of it is in the notebook. A page that is loaded again in the middle of a cell has lost what was
 * not saved, and what the cell puts out does not come any more.
 */

import { INotebookTracker, Notebook, NotebookActions, NotebookPanel } from '@jupyterlab/notebook';
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';

import type { ClusterView } from '../generated';
import { PANEL_TYPE } from '../panelPlace';
import { clusterOfNotebook, runningClusters } from './focus';
import { Offer } from './offer';
import type { Store } from './store';

/** How long a panel that was saved may take to live again, and a kernel to say that it is idle: a busy one says nothing. */
const RESTORE_MILLISECONDS = 5000;
/** A panel that is live, not its picture. */
const LIVE = '.nbc-panel .nbc-button';

/** Offer it in every notebook that is opened; `open` opens the tab of a cluster. */
export function offerInNotebooks(notebooks: INotebookTracker, store: Store, open: (cluster: string) => void): void {
  notebooks.widgetAdded.connect((_, panel) => {
    const offering = new Offering(panel, store, open);
    panel.disposed.connect(() => offering.end());
  });
}

class Offering {
  private bar: ReactWidget | null = null;
  private isOver = false;
  private readonly unsubscribe: () => void;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private waited = false;

  constructor(
    private readonly panel: NotebookPanel,
    private readonly store: Store,
    private readonly open: (cluster: string) => void
  ) {
    this.unsubscribe = store.subscribe(() => this.update());
    panel.sessionContext.statusChanged.connect(this.update, this);
    NotebookActions.executionScheduled.connect(this.onExecution, this);
    void Promise.all([panel.context.ready, panel.revealed]).then(() => this.update());
  }

  /** Nothing is offered any more. */
  end(): void {
    this.isOver = true;
    clearTimeout(this.timer);
    this.unsubscribe();
    this.panel.sessionContext.statusChanged.disconnect(this.update, this);
    NotebookActions.executionScheduled.disconnect(this.onExecution, this);
    this.bar?.dispose();
    this.bar = null;
  }

  /** Who runs cells here sees what they put out. */
  private onExecution(_: unknown, { notebook }: { notebook: unknown }): void {
    if (notebook === this.panel.content) {
      this.end();
    }
  }

  private update(): void {
    const { panel, store } = this;
    const { overview, link } = store.state();
    const kernel = panel.sessionContext.session?.kernel;
    if (this.isOver || !kernel || !overview || link !== 'live' || !panel.context.isReady) {
      return;
    }
    const clusters = runningClusters(store.state());
    const cluster = clusterOfNotebook(clusters, { kernel: kernel.id, path: panel.context.path });
    if (!cluster || panel.content.widgets.some(cell => cell.node.querySelector(LIVE))) {
      if (this.bar) {
        this.end();
      }
      return;
    }
    const isIdle = kernel.status === 'idle';
    if (!this.bar && !this.waited && (!isIdle || hasPanel(panel))) {
      this.timer ??= setTimeout(() => {
        this.waited = true;
        this.update();
      }, RESTORE_MILLISECONDS);
      return;
    }
    this.show(cluster, !isIdle);
  }

  private show(cluster: ClusterView, isBusy: boolean): void {
    if (!this.bar) {
      this.bar = new OfferBar();
      this.panel.contentHeader.addWidget(this.bar);
    }
    const { panel, open } = this;
    (this.bar as OfferBar).draw(
      <Offer
        {...{ cluster, isBusy }}
        onShow={() => {
          this.end();
          showIn(panel, cluster.name);
        }}
        onOpen={() => {
          this.end();
          open(cluster.name);
        }}
        onClose={() => this.end()}
      />
    );
  }
}

class OfferBar extends ReactWidget {
  private what: React.JSX.Element = (<></>);
  constructor() {
    super();
    this.addClass('nbc-offer-bar');
  }
  draw(what: React.JSX.Element): void {
    this.what = what;
    this.update();
  }
  protected render(): React.JSX.Element {
    return this.what;
  }
}

/** Whether a panel was saved with the notebook, which may live again. */
function hasPanel({ content }: NotebookPanel): boolean {
  return [...(content.model?.sharedModel.cells ?? [])].some(
    cell =>
      cell.cell_type === 'code' &&
      (cell.toJSON().outputs as { data?: object }[]).some(output => output.data && PANEL_TYPE in output.data)
  );
}

/** Run what shows `cluster` in a cell at the end of the notebook, a new one unless it is there already, and look at it. */
function showIn(panel: NotebookPanel, cluster: string): void {
  const { content, sessionContext } = panel;
  // Where our magics are loaded `%load_ext` says so; an import says nothing, and is enough.
  const source = `import notebook_cluster\n%cluster start ${cluster}`;
  content.deselectAll();
  content.activeCellIndex = content.widgets.length - 1;
  const last = content.activeCell?.model;
  if (last?.type !== 'code' || last.sharedModel.getSource() !== source) {
    NotebookActions.insertBelow(content);
    content.activeCell?.model.sharedModel.setSource(source);
  }
  void NotebookActions.run(content, sessionContext);
  lookAtPanel(content);
}

/**
 * Keep the cell that runs at the top of the view until its panel is there, which would else be out of sight below it: one
 * cannot scroll to where nothing is yet. Who goes to another cell is not called back.
 */
function lookAtPanel(content: Notebook): void {
  const cell = content.activeCell;
  if (!cell) {
    return;
  }
  const growth = new ResizeObserver(() => {
    const isHere = !cell.isDisposed && content.activeCell === cell;
    if (isHere) {
      void content.scrollToItem(content.activeCellIndex, 'start', 0);
    }
    if (!isHere || cell.node.querySelector(LIVE)) {
      growth.disconnect();
    }
  });
  growth.observe(cell.node);
}
