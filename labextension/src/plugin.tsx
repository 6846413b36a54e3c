/** JupyterLab's application part: the sidebar, the tab of a cluster, commands, a menu and a line in the status bar. */

import { ILayoutRestorer, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, MainAreaWidget, WidgetTracker } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { IMainMenu } from '@jupyterlab/mainmenu';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';

import { panelFactory, RANK } from './panelPlace';
import { addCommands, CommandIDs, insertCells } from './sidebar/commands';
import { Connection } from './sidebar/connection';
import { Dashboard } from './sidebar/dashboard';
import { dragCluster } from './sidebar/dragging';
import { clusterIcon } from './sidebar/icon';
import { notifyOf } from './sidebar/notifying';
import { offerInNotebooks } from './sidebar/offering';
import { reports } from './sidebar/report';
import { jupyterServer } from './sidebar/server';
import { StatusItem } from './sidebar/statusItem';
import { Store } from './sidebar/store';
import { Sidebar } from './sidebar/view';

const ID = 'notebook-cluster:plugin';
const SIDEBAR = 'notebook-cluster-sidebar';

const plugin: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Shows and steers the clusters of this user, also while a kernel is busy or gone.',
  autoStart: true,
  optional: [ICommandPalette, IMainMenu, INotebookTracker, IStatusBar, ISettingRegistry, ILayoutRestorer, ILauncher],
  activate
};

export default plugin;

function activate(
  app: JupyterFrontEnd,
  palette: ICommandPalette | null,
  menus: IMainMenu | null,
  notebooks: INotebookTracker | null,
  statusBar: IStatusBar | null,
  settings: ISettingRegistry | null,
  restorer: ILayoutRestorer | null,
  launcher: ILauncher | null
): void {
  const store = new Store();
  const { act, tryNow } = new Connection(jupyterServer(app.serviceManager.serverSettings), store);
  const open = (cluster: string): void => void app.commands.execute(CommandIDs.dashboard, { cluster });
  const show = (): void => app.shell.activateById(SIDEBAR);

  const handling = {
    ...{ act, onOpen: open, onInsert: (cluster: string) => insertCells(notebooks, cluster) },
    onClass: (cluster: string) => void app.commands.execute(CommandIDs.openClass, { cluster }),
    onReport: reports(app),
    onDrag: (cluster: string, x: number, y: number) => void dragCluster(cluster, x, y)
  };
  const sidebar = ReactWidget.create(<Sidebar store={store} tryNow={tryNow} {...handling} />);
  sidebar.id = SIDEBAR;
  sidebar.title.icon = clusterIcon;
  sidebar.title.caption = 'Clusters';
  sidebar.node.setAttribute('role', 'region');
  sidebar.node.setAttribute('aria-label', 'Clusters');
  app.shell.add(sidebar, 'left', { rank: 300 });
  restorer?.add(sidebar, SIDEBAR);

  const tabs = new WidgetTracker<MainAreaWidget>({ namespace: 'notebook-cluster-dashboard' });
  const openTab = dashboards(app, store, { act, tryNow }, tabs, restorer);
  followFocus(app, store, tabs, notebooks);
  notebooks?.widgetAdded.connect((_, { content: { rendermime } }) => {
    rendermime.addFactory(panelFactory(rendermime), RANK);
  });
  if (notebooks) {
    offerInNotebooks(notebooks, store, open);
  }
  addCommands({ app, store, act, notebooks, show, open: openTab }, palette, menus, launcher);
  const loaded = settings?.load(ID).catch(() => null) ?? Promise.resolve(null);
  void loaded.then(ours => {
    notifyOf(store, () => ours?.get('notify').composite !== false, open);
    if (statusBar) {
      addStatusItem(statusBar, ours, store, show);
    }
  });
}

/** What opens the tab of a cluster, or brings it to the front; open tabs come back when the page is reloaded. */
function dashboards(
  app: JupyterFrontEnd,
  store: Store,
  connection: Pick<Connection, 'act' | 'tryNow'>,
  tracker: WidgetTracker<MainAreaWidget>,
  restorer: ILayoutRestorer | null
): (cluster: string) => void {
  void restorer?.restore(tracker, {
    command: CommandIDs.dashboard,
    args: tab => ({ cluster: nameOf(tab) }),
    name: nameOf
  });
  return cluster => {
    let tab = tracker.find(candidate => nameOf(candidate) === cluster);
    if (!tab) {
      const content = ReactWidget.create(
        <Dashboard store={store} name={cluster} act={connection.act} tryNow={connection.tryNow} />
      );
      tab = new MainAreaWidget({ content });
      tab.title.label = cluster;
      tab.title.icon = clusterIcon;
      tab.title.closable = true;
      app.shell.add(tab, 'main');
      void tracker.add(tab);
    }
    app.shell.activateById(tab.id);
  };
}

const nameOf = (tab: MainAreaWidget): string => tab.title.label;

/** Keep the store up to date about what is in front: the tab of a cluster, or a notebook with its kernel. */
function followFocus(
  app: JupyterFrontEnd,
  store: Store,
  tabs: WidgetTracker<MainAreaWidget>,
  notebooks: INotebookTracker | null
): void {
  const update = (): void => {
    const notebook = notebooks?.currentWidget;
    // Not the tracker's own current one: that is the tab which had the focus last.
    const tab = tabs.find(candidate => candidate === app.shell.currentWidget);
    store.focus({
      cluster: tab ? nameOf(tab) : '',
      kernel: notebook?.sessionContext.session?.kernel?.id ?? '',
      path: notebook?.context.path ?? ''
    });
  };
  app.shell.currentChanged?.connect(update);
  tabs.widgetAdded.connect(update);
  notebooks?.currentChanged.connect(update);
  notebooks?.widgetAdded.connect((_, { sessionContext, context }) => {
    sessionContext.kernelChanged.connect(update);
    context.pathChanged.connect(update);
    update();
  });
  update();
}

/** Put the line into the status bar, unless the setting says no. */
function addStatusItem(
  statusBar: IStatusBar,
  settings: ISettingRegistry.ISettings | null,
  store: Store,
  show: () => void
): void {
  const item = ReactWidget.create(<StatusItem store={store} onPress={show} />);
  statusBar.registerStatusItem(`${ID}:status`, {
    item,
    align: 'left',
    rank: 40,
    isActive: () => settings?.get('showStatusBar').composite !== false,
    activeStateChanged: settings?.changed
  });
}
