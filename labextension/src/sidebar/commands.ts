/** What the palette and the menu offer. */

import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, ICommandPalette, showDialog, showErrorMessage } from '@jupyterlab/apputils';
import { IMainMenu } from '@jupyterlab/mainmenu';
import { INotebookTracker, NotebookActions } from '@jupyterlab/notebook';
import { Menu } from '@lumino/widgets';

import { cellsOf } from './cells';
import type { Act } from './controls';
import { currentCluster } from './statusItem';
import type { Store } from './store';

export namespace CommandIDs {
  export const show = 'notebook-cluster:show';
  export const dashboard = 'notebook-cluster:dashboard';
  export const insert = 'notebook-cluster:insert-cell';
  export const interrupt = 'notebook-cluster:interrupt';
  export const detach = 'notebook-cluster:detach';
  export const checkpoint = 'notebook-cluster:checkpoint';
  export const stop = 'notebook-cluster:stop';
}

const CATEGORY = 'Cluster';

/** What the commands work with. */
export interface ITools {
  readonly app: JupyterFrontEnd;
  readonly store: Store;
  readonly act: Act;
  readonly notebooks: INotebookTracker | null;
  /** Show the sidebar. */
  readonly show: () => void;
  /** Open the tab of a cluster. */
  readonly open: (cluster: string) => void;
}

/** Register all of them, and put them into `palette` and a menu of `menus`. */
export function addCommands(tools: ITools, palette: ICommandPalette | null, menus: IMainMenu | null): void {
  const { commands } = tools.app;
  commands.addCommand(CommandIDs.show, { label: 'Show Clusters', execute: tools.show });
  commands.addCommand(CommandIDs.insert, {
    label: 'Insert Cluster Cell Below',
    caption: 'A cell that runs on all nodes',
    isEnabled: () => Boolean(tools.notebooks?.currentWidget),
    execute: args => insertCells(tools.notebooks, args.cluster as string | undefined)
  });
  commands.addCommand(CommandIDs.dashboard, {
    label: args => (args.cluster ? `Dashboard of ${args.cluster as string}` : 'Cluster Dashboard'),
    isEnabled: args => Boolean(args.cluster) || currentCluster(tools.store.state()) !== null,
    execute: args => {
      const name = (args.cluster as string | undefined) ?? currentCluster(tools.store.state())?.name;
      if (name) {
        tools.open(name);
      }
    }
  });
  addActions(tools);
  const menu = new Menu({ commands });
  menu.title.label = CATEGORY;
  menu.id = 'jp-mainmenu-notebook-cluster';
  for (const command of Object.values(CommandIDs)) {
    palette?.addItem({ command, category: CATEGORY });
    menu.addItem({ command });
  }
  menus?.addMenu(menu, true, { rank: 90 });
  tools.store.subscribe(() => commands.notifyCommandChanged());
}

function addActions({ app, store, act }: ITools): void {
  const isRunning = (): boolean => currentCluster(store.state())?.cell?.status === 'running';
  const hasJob = (): boolean => Boolean(currentCluster(store.state())?.jobs.length);
  const exists = (): boolean => currentCluster(store.state()) !== null;
  const add = (id: string, action: 'interrupt' | 'detach' | 'checkpoint' | 'stop', label: string, on: () => boolean) =>
    app.commands.addCommand(id, {
      label,
      isEnabled: () => store.state().link === 'live' && on(),
      execute: async () => {
        const cluster = currentCluster(store.state());
        if (!cluster || (action === 'stop' && !(await isSure(cluster.name)))) {
          return;
        }
        const job = action === 'checkpoint' ? cluster.jobs[0]?.name : undefined;
        const { error } = await act({ action, cluster: cluster.name, target: job });
        if (error) {
          await showErrorMessage(`${label}: ${cluster.name}`, error);
        }
      }
    });
  add(CommandIDs.interrupt, 'interrupt', 'Stop Cell on All Nodes', isRunning);
  add(CommandIDs.detach, 'detach', 'Detach from Running Cell', isRunning);
  add(CommandIDs.checkpoint, 'checkpoint', 'Save Checkpoint Now', hasJob);
  add(CommandIDs.stop, 'stop', 'Stop Cluster', exists);
}

async function isSure(cluster: string): Promise<boolean> {
  const answer = await showDialog({
    title: `Stop cluster ${cluster}?`,
    body: 'It ends with every kernel of it. What its nodes hold in memory is lost.',
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: 'Stop Cluster' })]
  });
  return answer.button.accept;
}

/** Put the cells of `cluster` below the active one, the cursor in the last; returns why not, or nothing. */
export function insertCells(notebooks: INotebookTracker | null, cluster?: string): string {
  const notebook = notebooks?.currentWidget?.content;
  if (!notebook) {
    return 'there is no open notebook: open one, then insert the cell again';
  }
  for (const source of cellsOf(cluster)) {
    NotebookActions.insertBelow(notebook);
    notebook.activeCell?.model.sharedModel.setSource(source);
  }
  notebook.mode = 'edit';
  notebook.activeCell?.editor?.setCursorPosition({ line: 1, column: 0 });
  return '';
}
