/** The report of a cluster that has ended, in a tab: a page in which no script runs. */

import { JupyterFrontEnd } from '@jupyterlab/application';
import { MainAreaWidget } from '@jupyterlab/apputils';
import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { Widget } from '@lumino/widgets';

import { clusterIcon } from './icon';

/** What opens the report of a cluster, or brings its tab to the front with the newest; it returns why not, or nothing. */
export function reports(app: JupyterFrontEnd): (cluster: string) => Promise<string> {
  const tabs = new Map<string, MainAreaWidget>();
  return async cluster => {
    let page: string;
    try {
      page = await pageOf(cluster, app.serviceManager.serverSettings);
    } catch (error) {
      return error instanceof Error ? error.message : String(error);
    }
    let tab = tabs.get(cluster);
    if (!tab) {
      tab = tabOf(cluster);
      tab.disposed.connect(() => void tabs.delete(cluster));
      tabs.set(cluster, tab);
      app.shell.add(tab, 'main');
    }
    tab.content.node.querySelector('iframe')!.srcdoc = page;
    app.shell.activateById(tab.id);
    return '';
  };
}

async function pageOf(cluster: string, settings: ServerConnection.ISettings): Promise<string> {
  const url = URLExt.join(settings.baseUrl, 'notebook-cluster', 'clusters', encodeURIComponent(cluster), 'report');
  const answer = await ServerConnection.makeRequest(url, {}, settings);
  const text = await answer.text();
  if (answer.ok) {
    return text;
  }
  throw new Error(messageIn(text) || `the Jupyter server has no report of ${cluster} (status ${answer.status})`);
}

function messageIn(text: string): string {
  try {
    return String((JSON.parse(text) as { message?: unknown }).message ?? '');
  } catch {
    return '';
  }
}

function tabOf(cluster: string): MainAreaWidget {
  const content = new Widget();
  content.addClass('nbc-report');
  const frame = document.createElement('iframe');
  frame.title = `Report of cluster ${cluster}`;
  frame.setAttribute('sandbox', '');
  content.node.append(frame);
  const tab = new MainAreaWidget({ content });
  tab.title.label = `Report of ${cluster}`;
  tab.title.icon = clusterIcon;
  tab.title.closable = true;
  return tab;
}
