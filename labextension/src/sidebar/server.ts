/** The addresses of the server extension, opened the way JupyterLab opens all of its own. */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import type { IServer } from './connection';

/** The Jupyter server of this page. */
export function jupyterServer(settings: ServerConnection.ISettings): IServer {
  return {
    open: () => {
      const url = URLExt.join(settings.wsUrl, 'notebook-cluster', 'stream');
      const query = settings.appendToken && settings.token ? `?token=${encodeURIComponent(settings.token)}` : '';
      return new settings.WebSocket(url + query);
    },
    probe: async () => {
      const url = URLExt.join(settings.baseUrl, 'notebook-cluster', 'overview');
      return (await ServerConnection.makeRequest(url, {}, settings)).status;
    }
  };
}
