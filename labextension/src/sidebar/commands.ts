/** What the palette and the menu offer. */

import { JupyterFrontEnd } from '@jupyterlab/application';
import { Dialog, ICommandPalette, InputDialog, showDialog, showErrorMessage } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { IMainMenu } from '@jupyterlab/mainmenu';
import { INotebookTracker, NotebookActions } from '@jupyterlab/notebook';
import { Menu } from '@lumino/widgets';

import type { ClusterView } from '../generated';
import { cellsOf, classCell, ON_ALL } from './cells';
import type { Act } from './controls';
import { candidates, meantCluster } from './focus';
import { plural } from './format';
import { CLUSTER_PICTURE, clusterIcon } from './icon';
import { openClusterNotebook } from './newNotebook';
import type { Store } from './store';

export namespace CommandIDs {
  export const show = 'notebook-cluster:show';
  export const dashboard = 'notebook-cluster:dashboard';
  export const create = 'notebook-cluster:new-notebook';
  export const insert = 'notebook-cluster:insert-cell';
  export const openClass = 'notebook-cluster:class';
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

/** Register all of them, and put them into `palette`, a menu of `menus` and a tile of `launcher`. */
export function addCommands(
  tools: ITools,
  palette: ICommandPalette | null,
  menus: IMainMenu | null,
  launcher: ILauncher | null
): void {
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
    isEnabled: args => Boolean(args.cluster) || candidates(tools.store.state()).length > 0,
    execute: async args => {
      const name =
        (args.cluster as string | undefined) ?? (await chooseCluster(tools.store, 'Cluster Dashboard'))?.name;
      if (name) {
        tools.open(name);
      }
    }
  });
  commands.addCommand(CommandIDs.create, {
    label: args => (args.isPalette ? 'New Cluster Notebook' : 'Cluster Notebook'),
    caption: 'A notebook whose first cell starts a cluster',
    icon: args => (args.isPalette ? undefined : clusterIcon),
    isEnabled: () => commands.hasCommand('notebook:create-new'),
    execute: async args => void (await openClusterNotebook(tools.app, (args.cwd as string | undefined) ?? ''))
  });
  commands.addCommand(CommandIDs.openClass, {
    label: 'Open Class Page',
    caption: 'One code for the board, and a page with who is in',
    isEnabled: () => commands.hasCommand('notebook:create-new'),
    execute: args => openClass(tools, (args.cluster as string | undefined) ?? meantCluster(tools.store.state())?.name)
  });
  launcher?.add({ command: CommandIDs.create, category: 'Notebook', rank: 1000, kernelIconUrl: CLUSTER_PICTURE });
  addActions(tools);
  const menu = new Menu({ commands });
  menu.title.label = CATEGORY;
  menu.id = 'jp-mainmenu-notebook-cluster';
  for (const command of Object.values(CommandIDs)) {
    palette?.addItem({ command, category: CATEGORY, args: { isPalette: true } });
    menu.addItem({ command, args: { isPalette: true } });
  }
  menus?.addMenu(menu, true, { rank: 90 });
  tools.store.subscribe(() => commands.notifyCommandChanged());
}

function addActions({ app, store, act }: ITools): void {
  const runsCell = (cluster: ClusterView): boolean => cluster.cell?.status === 'running';
  const hasJob = (cluster: ClusterView): boolean => cluster.jobs.length > 0;
  const add = (
    id: string,
    action: 'interrupt' | 'detach' | 'checkpoint' | 'stop',
    label: string,
    fits: (cluster: ClusterView) => boolean = () => true
  ) =>
    app.commands.addCommand(id, {
      label,
      isEnabled: () => store.state().link === 'live' && candidates(store.state(), fits).length > 0,
      execute: async () => {
        const cluster = await chooseCluster(store, label, fits);
        if (!cluster || (action === 'stop' && !(await isSure(cluster)))) {
          return;
        }
        const job = action === 'checkpoint' ? cluster.jobs[0]?.name : undefined;
        const { error } = await act({ action, cluster: cluster.name, target: job });
        if (error) {
          await showErrorMessage(`${label}: ${cluster.name}`, error);
        }
      }
    });
  add(CommandIDs.interrupt, 'interrupt', 'Stop Cell on All Nodes', runsCell);
  add(CommandIDs.detach, 'detach', 'Detach from Running Cell', runsCell);
  add(CommandIDs.checkpoint, 'checkpoint', 'Save Checkpoint Now', hasJob);
  add(CommandIDs.stop, 'stop', 'Stop Cluster');
}

/** The cluster that a command is for, among those that `fits`: asked for where none is meant; null: none. */
async function chooseCluster(
  store: Store,
  label: string,
  fits: (cluster: ClusterView) => boolean = () => true
): Promise<ClusterView | null> {
  const found = candidates(store.state(), fits);
  if (found.length === 0 || meantCluster(store.state())) {
    return found[0] ?? null;
  }
  const { value } = await InputDialog.getItem({
    title: label,
    label: 'Several clusters run, and none is that of the notebook in front. Which one?',
    items: found.map(cluster => cluster.name)
  });
  return found.find(cluster => cluster.name === value) ?? null;
}

async function isSure({ name, nodes }: ClusterView): Promise<boolean> {
  const answer = await showDialog({
    title: `Stop cluster ${name}?`,
    body: `It ends with every kernel of it (${plural(nodes.length, 'node')}). What its nodes hold in memory is lost.`,
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: 'Stop Cluster' })],
    // Enter that is still held down from the palette must not answer.
    defaultButton: 0
  });
  return answer.button.accept;
}

/** Run what opens the class page of `cluster` below the active cell of the notebook in front, or else in a new notebook. */
async function openClass({ app, store, notebooks }: ITools, cluster?: string): Promise<void> {
  let panel = notebooks?.currentWidget ?? null;
  if (panel) {
    const kernel = panel.sessionContext.session?.kernel?.id ?? '';
    const loaded = candidates(store.state()).some(({ kernels }) => kernel in kernels);
    NotebookActions.insertBelow(panel.content);
    panel.content.activeCell?.model.sharedModel.setSource(classCell(cluster, loaded));
  } else {
    panel = await openClusterNotebook(app, '', [classCell(cluster), ON_ALL]);
  }
  if (panel) {
    await panel.sessionContext.ready;
    void NotebookActions.run(panel.content, panel.sessionContext);
  }
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
